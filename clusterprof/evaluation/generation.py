"""Benchmarks that let the model answer, and score the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.evaluation.metrics import contains, edit_similarity, lines_accuracy, rouge_1, rouge_l
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.tasks import Entrant, Task

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session

Score = Callable[[Task, str], Mapping[str, float]]


@dataclass(frozen=True)
class GenerationBenchmark:
    """Greedy answers, each scored by ``score``."""

    name: str
    score: Score
    settings: Mapping[str, Any] = field(default_factory=dict)

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Every entrant."""
        return True

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Answer the task's prompt for every entrant."""
        for entrant, text in session.answers(task, entering):
            yield entrant, Measured(self.score(task, text), text=text)


def scorer_of(dataset: str) -> Score | None:
    """How answers to a dataset's questions are scored; None where nobody knows."""
    if dataset in LONGBENCH_TASKS:
        return score_longbench
    return {"needle": _score_number, "lines": score_lines, "code": _score_line}.get(dataset)


def _score_number(task: Task, text: str) -> dict[str, float]:
    return {"accuracy": contains(text, task.row.answers)}


def _score_line(task: Task, text: str) -> dict[str, float]:
    return {"score": 100 * max(edit_similarity(text, answer) for answer in task.row.answers)}


def score_needle(task: Task, text: str) -> dict[str, float]:
    """Whether the answer holds what was hidden; ROUGE-1 F of the answer against the hidden sentence."""
    return {
        "accuracy": contains(text, task.row.answers),
        "rouge1": max(rouge_1(text, reference) for reference in task.references),
    }


def score_lines(task: Task, text: str) -> dict[str, float]:
    """Whether the last number of the answer is the one asked for."""
    return {"accuracy": lines_accuracy(text, task.row.answers[0])}


def score_longbench(task: Task, text: str) -> dict[str, float]:
    """LongBench's own metric of the task, 0 to 100."""
    from clusterprof.evaluation.longbench_scores import score

    return {"score": score(task.dataset, text, task.row.answers, task.row.all_classes)}


def score_sample(task: Task, text: str) -> dict[str, float]:
    """ROUGE-L F against the closest reference, where there is one."""
    if not task.references:
        return {}
    return {"rouge_l": max(rouge_l(text, reference) for reference in task.references)}
