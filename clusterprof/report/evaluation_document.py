"""What was measured, as one JSON document of means with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from clusterprof.evaluation.groups import ABLATION, VARIED, comparable, ordered, settings_of
from clusterprof.evaluation.summary import summarise

if TYPE_CHECKING:
    from clusterprof.evaluation.groups import Group
    from clusterprof.evaluation.records import Record
    from clusterprof.evaluation.summary import Row

# Beside the mean of everything: the labels to group by.
_LABELS = {
    "needle": ("tokens",),
    "lines": ("tokens",),
    "longbench": ("group", "task"),
    "perplexity": ("dataset",),
    "hit-rate": ("tokens",),
}
# Labels whose values count the same in a mean, however many prompts have them.
_OVER = {"longbench": "task", "perplexity": "dataset"}


def summary_document(records: Iterable[Record]) -> dict[str, Any]:
    """Return the means of every score per method and size, with 95 % intervals and paired differences.

    Raises
    ------
    DataError
        As :func:`comparable`.
    """
    return {"groups": [_group(group) for group in comparable(records)]}


def _group(group: Group) -> dict[str, Any]:
    if group.bench == ABLATION:
        groupings: list[Sequence[str]] = [VARIED]
    else:
        groupings = [(), *((label,) for label in _LABELS.get(group.bench, ()))]
    metrics = dict.fromkeys(name for record in group.records for name in record.scores)
    over = _OVER.get(group.bench)
    return {
        "bench": group.bench,
        "environment": dict(group.environment),
        "settings": dict(group.settings),
        "datasets": ordered(record.dataset for record in group.records),
        "methods": [asdict(setting) for setting in settings_of(group.records)],
        "means": [
            {"metric": metric, **_row(row, by)}
            for metric in metrics
            for by in groupings
            # Within one of its values a label has nothing to average over.
            for row in summarise(group.records, metric, by, over=None if over in by else over)
        ],
    }


def _row(row: Row, by: Sequence[str]) -> dict[str, Any]:
    labels = {name: value for name, value in zip(by, row.cell.labels, strict=True) if value != ""}
    differences = {other: asdict(difference) for other, difference in row.differences.items()}
    return {
        "method": row.cell.method,
        "size": row.cell.size,
        "labels": labels,
        **asdict(row.mean),
        "differences": differences,
    }
