"""LongBench's scores: which metric a task takes, how an answer is prepared for it, and the task's group."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

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


def score(task_name: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] = ()) -> float:
    """Score a generated answer as LongBench does.

    Parameters
    ----------
    task_name : str
        A key of `GROUP_OF_TASK`.
    prediction : str
        What the model generated.
    answers : sequence of str
        Accepted answers; the best match counts.
    all_classes : sequence of str
        What trec's answer is chosen from; other tasks have none.

    Returns
    -------
    float
        From 0 to 100.

    Raises
    ------
    DataError
        If the row cannot be scored: no answers, trec without classes, passage retrieval without a number.
    """
    if not answers:
        raise DataError(f"A row of {task_name} has no answers to score against; leave it out.")
    if task_name in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").partition("\n")[0]
    if task_name == "trec":
        if not all_classes:
            raise DataError("A row of trec has no 'all_classes'; take LongBench's own rows, which list them.")
        return 100 * max(class_match(prediction, answer, all_classes) for answer in answers)
    metric = _METRICS[task_name]
    return 100 * max(metric(prediction, answer) for answer in answers)


def _paragraph_share(prediction: str, answer: str) -> float:
    paragraph = re.search(r"Paragraph (\d+)", answer)
    if paragraph is None:
        raise DataError(
            f"A row of passage_retrieval_en has the answer {answer[:40]!r}; it has to be like 'Paragraph 7'."
        )
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
