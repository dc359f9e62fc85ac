"""LongBench's scores: which metric a task takes, how an answer is prepared for it, and the task's group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from clusterprof.data import Row
from clusterprof.errors import DataError
from clusterprof.evaluation.metrics import class_match, edit_similarity, number_share, rouge_l, token_f1

# In the order of the tables of LongBench and of the papers that use it.
GROUPS = {
    "Single-Document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Document QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot Learning": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}
GROUP_OF_TASK = {task: group for group, tasks in GROUPS.items() for task in tasks}

# Models go on with examples of their own after these tasks' answers, which end with their line.
FIRST_LINE_ONLY = frozenset(GROUPS["Few-shot Learning"])
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def check_rows(task_name: str, rows: Iterable[Row]) -> None:
    """Raise a DataError for the first row whose answers LongBench's metric of the task cannot score."""
    for row in rows:
        problem = _why_not_scored(task_name, row)
        if problem is not None:
            raise DataError(f"Row {row.id!r} of {task_name} {problem}")


def _why_not_scored(task_name: str, row: Row) -> str | None:
    if not row.answers:
        return "has no answers to score against; leave it out."
    if task_name == "trec" and not row.all_classes:
        return "has no 'all_classes'; take LongBench's own rows, which list them."
    if task_name == "passage_retrieval_en":
        wrong = next((answer for answer in row.answers if not _PARAGRAPH.search(answer)), None)
        if wrong is not None:
            return f"has the answer {wrong[:40]!r}; it has to be like 'Paragraph 7'."
    return None


def score(task_name: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] = ()) -> float:
    """Score a generated answer as LongBench does.

    Parameters
    ----------
    task_name : str
        A key of `GROUP_OF_TASK`.
    prediction : str
        What the model generated.
    answers : sequence of str
        Accepted answers of a row that passed :func:`check_rows`; the best match counts.
    all_classes : sequence of str
        What trec's answer is chosen from; other tasks have none.

    Returns
    -------
    float
        From 0 to 100.
    """
    if task_name in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").partition("\n")[0]
    if task_name == "trec":
        return 100 * max(class_match(prediction, answer, all_classes) for answer in answers)
    metric = _METRICS[task_name]
    return 100 * max(metric(prediction, answer) for answer in answers)


def _paragraph_share(prediction: str, answer: str) -> float:
    paragraph = _PARAGRAPH.search(answer)
    assert paragraph is not None
    return number_share(prediction, paragraph[1])


_METRICS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(GROUPS["Single-Document QA"] + GROUPS["Multi-Document QA"], token_f1),
    **dict.fromkeys(GROUPS["Summarization"], rouge_l),
    "triviaqa": token_f1,
    "samsum": rouge_l,
    "passage_count": number_share,
    "passage_retrieval_en": _paragraph_share,
    **dict.fromkeys(GROUPS["Code"], edit_similarity),
}
