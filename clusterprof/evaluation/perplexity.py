"""Perplexity of the reference answers, given the compressed prompt (the paper's Table 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clusterprof.data import Row
from clusterprof.errors import DataError
from clusterprof.evaluation.decode import answer_losses
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.tasks import Entrant, Task

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session


class PerplexityBenchmark:
    """Mean loss of a prompt's first reference answer, in nats per token, and its exponential."""

    name = "perplexity"
    settings: Mapping[str, Any] = {}

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Every entrant."""
        return True

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Read the answer after the task's prompt, for every entrant.

        Raises
        ------
        DataError
            If the row has no answer.
        """
        answer = self._answer(session, task)
        for one_by_one in (False, True):
            # What evicts at every step has to see every step.
            alike = [it for it in entering if it.evicts_answer(task) == one_by_one]
            step = 1 if one_by_one else len(answer)
            decode = partial(answer_losses, session.model, answer, step=step)
            for entrant, loss in session.run(task, alike, decode):
                yield entrant, Measured({"loss": loss, "perplexity": math.exp(min(loss, 13.0))})

    def _answer(self, session: Session, task: Task) -> Tensor:
        check_answers([task.row])
        # What follows a prompt that ends with a colon begins with a space.
        text = task.row.answers[0] if task.row.use_chat_template else f" {task.row.answers[0]}"
        tokens = session.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise DataError(f"The answer of row {task.row.id!r} has no tokens; drop the row.")
        return torch.tensor(tokens[: task.max_new_tokens], device=session.model.device)


def check_answers(rows: Iterable[Row]) -> None:
    """Raise a DataError for the first row that has no answer."""
    for row in rows:
        if not row.answers:
            raise DataError(
                f"Row {row.id!r} has no answer to measure the perplexity of; give rows with 'answers'."
            )
