"""What was measured, as one JSON document of means with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from clusterprof.evaluation.groups import (
    ABLATION,
    VARIED,
    comparable,
    ordered,
    prompts_with,
    settings_of,
)
from clusterprof.evaluation.summary import Row, summarise
from clusterprof.report.evaluation_tables import PERPLEXITY, perplexity_of

if TYPE_CHECKING:
    from clusterprof.evaluation.groups import Group
    from clusterprof.evaluation.records import Record

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
    metrics = dict.fromkeys(name for record in group.records for name in record.scores if name != PERPLEXITY)
    over = _OVER.get(group.bench)
    return {
        "bench": group.bench,
        "environment": dict(group.environment),
        "settings": dict(group.settings),
        "prompts": group.prompts,
        "prompts_cut": prompts_with("cut", group.records),
        "datasets": ordered(record.dataset for record in group.records),
        "methods": [asdict(setting) for setting in settings_of(group.records)],
        "means": [
            document
            for metric in metrics
            for by in groupings
            # Within one of its values a label has nothing to average over.
            for row in summarise(group.records, metric, by, over=None if over in by else over)
            for document in _documents(row, metric, by, group.bench)
        ],
    }


def _documents(row: Row, metric: str, by: Sequence[str], bench: str) -> Iterator[dict[str, Any]]:
    """A mean, and what is derived from it."""
    yield {"metric": metric, **_row(row, by)}
    if bench == PERPLEXITY:
        name, perplexity = perplexity_of(row.mean)
        yield {"metric": name, **_row(Row(row.cell, perplexity), by)}


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
