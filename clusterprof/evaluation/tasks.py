"""Tasks: the prompts of a benchmark, with what belongs to each; and who is measured on them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterprof.data import Dataset, Prompt, Row, build_prompt, drawing_order
from clusterprof.errors import CompressionError, DataError
from clusterprof.evaluation.contestants import Contestant
from clusterprof.profile import Compression

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.methods.base import Need
    from clusterprof.profile import Window

Labels = Mapping[str, int | float | str]


@dataclass(frozen=True)
class Task:
    """One prompt of a benchmark.

    Attributes
    ----------
    dataset : str
        Where the row is from.
    labels : mapping
        What results are grouped by.
    references : tuple of str
        Shown beside what was generated.
    max_new_tokens : int
        Longest answer.
    content_hash : str
        Of all rows of the dataset; empty where the prompts are made for the benchmark.
    """

    dataset: str
    row: Row
    prompt: Prompt
    labels: Labels
    references: tuple[str, ...]
    max_new_tokens: int
    content_hash: str = ""


@dataclass(frozen=True)
class Entrant:
    """A contestant at one size; ``size`` and ``compression`` are None for the full cache."""

    contestant: Contestant
    size: int | None = None
    compression: Compression | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """What its method needs to know beyond the window's attention."""
        return frozenset() if self.compression is None else self.compression.method.needs

    def evicts(self, prompt: Prompt) -> bool:
        """Whether it evicts anything of a prompt."""
        return self.size is not None and len(prompt.input_ids) > self.size

    @property
    def evicts_decoded(self) -> bool:
        """Whether it holds the cache at its size at every decode step, too."""
        return self.compression is not None and getattr(
            self.compression.method, "evict_while_decoding", False
        )

    def evicts_answer(self, task: Task) -> bool:
        """Whether it evicts anything while a task's answer is decoded."""
        longest = len(task.prompt.input_ids) + task.max_new_tokens
        return self.evicts_decoded and self.size is not None and longest > self.size


def entrants(contestants: Sequence[Contestant], sizes: Iterable[int], window: Window) -> list[Entrant]:
    """Every contestant at every size, those of one size together, the full cache first.

    Raises
    ------
    DataError
        If a size does not leave room beside the window.
    ClusterprofError
        If a method needs a library that is not installed.
    """
    found = [Entrant(contestant) for contestant in contestants if contestant.at_size is None]
    own = {contestant.size for contestant in contestants if contestant.size is not None}
    asked = set(sizes)
    for size in sorted(asked | own):
        for contestant in contestants:
            if contestant.at_size is None or contestant.size not in (None, size):
                continue
            # A method by its name also takes part at the sizes of the profiles it is compared with.
            used = contestant.window or window
            if used != "query" and size <= used:
                raise DataError(f"Size {size} is not above the observation window of {used} tokens.")
            compression = contestant.compression(size, window)
            compression.method.check_installed()
            found.append(Entrant(contestant, size, compression))
    return found


def window_of(compression: Compression, prompt: Prompt) -> int:
    """Tokens of a compression's observation window in a prompt.

    Raises
    ------
    DataError
        If it is the prompt's question, and that is not known.
    CompressionError
        If it is not shorter than the size.
    """
    window = prompt.query_length if compression.window == "query" else compression.window
    if window is None:
        raise DataError(
            f"The window is the prompt's question, and which tokens of prompt {prompt.id!r} are its question is not "
            "known; give rows with 'context' and 'question', or a window of N tokens."
        )
    if window >= compression.size:
        raise CompressionError(
            f"The question has {window} tokens and is the observation window, which leaves nothing of size "
            f"{compression.size} for the rest of the prompt."
        )
    return window


def check_questions(tasks: Iterable[Task], entering: Sequence[Entrant]) -> None:
    """Raise a DataError for the first prompt whose question is to be a window, and is not known."""
    for task in tasks:
        if task.prompt.query_length is None:
            for entrant in entering:
                if entrant.compression is not None and entrant.evicts(task.prompt):
                    window_of(entrant.compression, task.prompt)


@dataclass
class TaskMaker:
    """Builds prompts for a model, and counts those that had to be left out.

    Attributes
    ----------
    longest : int, optional
        Most tokens of a prompt; by default what the model's context leaves beside the answer.
    whole : bool
        Leave a prompt out that would have to be cut.
    left_out : Counter of str
        How many prompts were, by the reason.
    exhausted : list of str
        Datasets of which none was left to draw.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    longest: int | None = None
    whole: bool = False
    left_out: Counter[str] = field(default_factory=Counter, init=False)
    exhausted: list[str] = field(default_factory=list, init=False)

    def draw(
        self,
        dataset: Dataset,
        *,
        samples: int | None,
        seed: int,
        max_new_tokens: int | None = None,
        labels: Labels | None = None,
    ) -> list[Task]:
        """The tasks of as many rows as are asked for, in the dataset's order; fewer if it has no more that are usable.

        They are drawn as by :func:`clusterprof.data.sample_rows`, another row in place of each that is left out, so
        a larger draw contains the smaller ones.

        Parameters
        ----------
        samples : int, optional
            By default all rows.
        max_new_tokens, labels
            As for :meth:`make`.

        Raises
        ------
        DataError
            As :meth:`make`.
        """
        drawn: dict[int, Task] = {}
        for index in drawing_order(dataset, seed):
            if len(drawn) == samples:
                break
            for task in self.make(
                dataset.name,
                [dataset.rows[index]],
                max_new_tokens=max_new_tokens,
                labels=labels,
                content_hash=dataset.content_hash,
            ):
                drawn[index] = task
        if not drawn:
            self.exhausted.append(dataset.name)
        return [drawn[index] for index in sorted(drawn)]

    def make(
        self,
        dataset: str,
        rows: Iterable[Row],
        *,
        max_new_tokens: int | None = None,
        labels: Labels | None = None,
        references: tuple[str, ...] | None = None,
        content_hash: str = "",
    ) -> list[Task]:
        """The tasks of rows.

        Parameters
        ----------
        max_new_tokens : int, optional
            Longest answer; by default the row's own, or 64.
        references : tuple of str, optional
            By default the row's answers.
        content_hash : str
            Of all rows of the dataset they are from.

        Raises
        ------
        DataError
            If the model's context leaves no room for a prompt.
        """
        from clusterprof.models import describe_model

        context = describe_model(self.model).max_position_embeddings or sys.maxsize
        tasks = []
        for row in rows:
            answer = max_new_tokens or row.max_new_tokens or 64
            if answer >= context:
                advice = (
                    "use a model with a longer one" if max_new_tokens is None else "lower --decode-tokens"
                )
                raise DataError(
                    f"An answer of {answer} tokens leaves no room for a prompt in the model's context of {context}; "
                    f"{advice}."
                )
            limit = min(context - answer, self.longest or context)
            prompt = build_prompt(row, self.tokenizer, max_tokens=limit)
            if prompt.tokens_cut and self.whole:
                self.left_out["they would have to be cut"] += 1
                continue
            shown = row.answers if references is None else references
            tasks.append(Task(dataset, row, prompt, dict(labels or {}), shown, answer, content_hash))
        return tasks
