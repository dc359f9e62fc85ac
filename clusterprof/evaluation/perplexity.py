"""Perplexity of the reference answers, given the compressed prompt (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clusterprof.data import Row
from clusterprof.errors import DataError
from clusterprof.evaluation.decode import answer_losses
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.tasks import Entrant, Task, TaskMaker

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerBase

    from clusterprof.evaluation.session import Session


class PerplexityBenchmark:
    """Mean loss of a prompt's first reference answer after its first token, in nats per token.

    The perplexity is the exponential of a mean of such losses, so no prompt has one of its own.
    """

    name = "perplexity"
    settings: Mapping[str, Any] = {"tokens": "after the first"}

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Every entrant."""
        return True

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Read the answer after the task's prompt, for every entrant."""
        answer = torch.tensor(_tokens(task, session.tokenizer), device=session.model.device)
        for one_by_one in (False, True):
            # What evicts at every step has to see every step.
            alike = [it for it in entering if it.evicts_answer(task) == one_by_one]
            step = 1 if one_by_one else len(answer)

            def decode(cache: Cache, first: Tensor, rows: int, step: int = step) -> list[float]:
                return answer_losses(session.model, answer, cache, rows, step=step)

            for entrant, loss in session.run(task, alike, decode):
                yield entrant, Measured({"loss": loss})


def measurable(tasks: Iterable[Task], maker: TaskMaker) -> list[Task]:
    """The tasks whose answers go on after their first token; the maker counts the others as left out."""
    found = []
    for task in tasks:
        if len(_tokens(task, maker.tokenizer)) > 1:
            found.append(task)
        else:
            maker.left_out["their answers end with the first token, which no compression changes"] += 1
    return found


def _tokens(task: Task, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # What follows a prompt that ends with a colon begins with a space.
    text = task.row.answers[0] if task.row.use_chat_template else f" {task.row.answers[0]}"
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens[: task.max_new_tokens]


def check_answers(rows: Iterable[Row]) -> None:
    """Raise a DataError for the first row that has no answer."""
    for row in rows:
        if not row.answers:
            raise DataError(
                f"Row {row.id!r} has no answer to measure the perplexity of; give rows with 'answers'."
            )
