"""A tiny model's session, tasks for it, and who enters."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.data import Row
from clusterprof.data.rows import question_row
from clusterprof.evaluation.contestants import contestants
from clusterprof.evaluation.records import Record
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, Task, TaskMaker, entrants
from clusterprof.profile import Window
from tests.tiny import tiny_tokenizer

WINDOW = 8
# Of the tiny tokenizer: with so many, every token has a text of its own.
VOCAB_SIZE = len(tiny_tokenizer())
WORDS = ("ash", "bay", "cape", "dale", "east", "ford", "glen", "hill", "isle", "lake", "moor", "oak", "reed")


def words(characters: int, seed: int = 0) -> str:
    """Words and blanks, so many characters and as many tokens."""
    rng = Random(seed)
    return " ".join(rng.choices(WORDS, k=characters))[: characters - 1] + "."


def row(tokens: int, question: str = "where?", answers: tuple[str, ...] = ("ash bay",), seed: int = 0) -> Row:
    """A question about a text, together so many tokens long."""
    context = words(tokens - len(question) - 2, seed)
    made = question_row(context, question, answers=answers, max_new_tokens=8)
    return Row(**{**vars(made), "id": f"row-{tokens}-{seed}"})


def open_session(model: PreTrainedModel, folder: Path, decode_tokens: int = 0) -> Session:
    return Session.open(model, tiny_tokenizer(), folder, decode_tokens=decode_tokens)


def make_tasks(session: Session, rows: Sequence[Row], max_new_tokens: int | None = None) -> list[Task]:
    maker = TaskMaker(session.model, session.tokenizer)
    return maker.make("places", rows, max_new_tokens=max_new_tokens)


def make_entrants(
    names: Sequence[str], sizes: Sequence[int] = (24,), window: Window = WINDOW
) -> list[Entrant]:
    """The full cache, and these at every size."""
    return entrants(contestants(names), sizes, window)


def prompt_of(task: Task) -> Tensor:
    """(1, tokens)."""
    return torch.tensor([task.prompt.input_ids])


class Heard:
    """An `EvaluationListener` that remembers."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, int]] = []
        self.measuring_: list[tuple[str, int]] = []
        self.records: list[Record] = []
        self.dropped: list[tuple[str, str]] = []

    def begin(self, tasks: int, results: int, known: int) -> None:
        self.begun.append((tasks, results, known))

    def measuring(self, task: Task, results: int) -> None:
        self.measuring_.append((task.prompt.id, results))

    def measured(self, record: Record) -> None:
        self.records.append(record)

    def left_out(self, task: Task, reason: str) -> None:
        self.dropped.append((task.prompt.id, reason))
