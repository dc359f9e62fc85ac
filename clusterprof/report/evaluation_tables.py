"""Tables of each benchmark: which means, by which labels, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import exp
from typing import TYPE_CHECKING

from clusterprof.evaluation.contestants import FULL
from clusterprof.evaluation.groups import (
    ABLATION,
    VARIED,
    comparable,
    differing,
    label_of,
    ordered,
    references,
)
from clusterprof.report.comparisons import comparison_sheet, label_sheet, matrix_sheet, scores_sheet
from clusterprof.report.numbers import counted
from clusterprof.report.sheets import rich_tables

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.evaluation.groups import Group
    from clusterprof.evaluation.records import Record
    from clusterprof.report.sheets import Sheet
    from clusterprof.statistics import Estimate

# A benchmark, and the metric that is derived from its losses.
PERPLEXITY = "perplexity"
# A loss beyond which its exponential is only a long number.
_HOPELESS = 20.0
_READING = (
    "In brackets are 95 % intervals, from a bootstrap over prompts, if they are three or more; differences are over "
    "the same prompts at the same size (all of the row's, unless the number of pairs is given), and dim where their "
    "interval includes 0 or there are too few prompts: that proves nothing either way."
)


def evaluation_sheets(group: Group) -> list[Sheet]:
    """Return the tables of a group of records; none where only texts are shown."""
    records = [record for record in group.records if record.scores]
    sheets = _BENCHES.get(group.bench, _plain)(records) if records else []
    return [sheet for sheet in sheets if sheet.sections]


def evaluation_tables(records: Iterable[Record], width: int) -> list[Table]:
    """Return the tables of records for a terminal of so many columns.

    Raises
    ------
    DataError
        As :func:`clusterprof.evaluation.groups.comparable`.
    """
    groups = comparable(records)
    return [
        table
        for group in groups
        for sheet in evaluation_sheets(group)
        for table in rich_tables(sheet, width, _apart(group, groups) if len(groups) > 1 else "")
    ]


def _apart(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group's tables from those of the others."""
    names = differing(other for other in groups if other.bench == group.bench)
    found = (group.conditions.get(name, "") for name in names if name != "model")
    return f"{', '.join((group.bench, group.environment.get('model', 'model not named'), *found))}: "


def evaluation_notes(records: Iterable[Record]) -> list[str]:
    """Return in a sentence each how to read the same tables, and what is special about these records."""
    sheets = [sheet for group in comparable(records) for sheet in evaluation_sheets(group)]
    notes = [note for sheet in sheets for note in sheet.notes]
    return list(dict.fromkeys([_READING, *notes])) if sheets else []


def length_label(records: Iterable[Record]) -> str:
    """Return the label that says how long prompts are: "tokens", or "lines" where all have that instead."""
    return "lines" if all("lines" in record.labels for record in records) else "tokens"


def _accuracy(records: Sequence[Record]) -> list[Sheet]:
    length = length_label(records)
    title = f"Share of right answers by prompt length, in {length}"
    return [comparison_sheet(records, "accuracy"), matrix_sheet(records, "accuracy", length, title)]


def _needle(records: Sequence[Record]) -> list[Sheet]:
    return [*_accuracy(records), comparison_sheet(records, "rouge1")]


def _longbench(records: Sequence[Record]) -> list[Sheet]:
    tasks = len(ordered(label_of(record, "task") for record in records))
    note = f"The mean of the means of {counted(tasks, 'task')}; the bootstrap draws prompts within each task."
    by_group = "LongBench by group, the mean of its tasks' means"
    return [
        comparison_sheet(records, "score", over="task", note=note),
        matrix_sheet(records, "score", "group", by_group, over="task"),
        label_sheet(records, "score", "task", "LongBench by task"),
    ]


def _perplexity(records: Sequence[Record]) -> list[Sheet]:
    title = "Perplexity of the reference answers, the exponential of the mean loss (lower is better)"
    return [
        comparison_sheet(records, "loss", over="dataset"),
        matrix_sheet(records, "loss", "dataset", title, shown_as=perplexity_of),
    ]


def perplexity_of(loss: Estimate) -> tuple[str, Estimate]:
    """Return the perplexity of a mean loss, its exponential, as a metric's name and an estimate."""
    low, high = (None if end is None else _exp(end) for end in (loss.low, loss.high))
    return PERPLEXITY, replace(loss, mean=_exp(loss.mean), low=low, high=high)


def _exp(loss: float) -> float:
    return exp(min(loss, _HOPELESS))


def _hit_rate(records: Sequence[Record]) -> list[Sheet]:
    return [scores_sheet(records, ("hit_rate", "window_share"), ("tokens",), "Hit rate by prompt length")]


def _fit(records: Sequence[Record]) -> list[Sheet]:
    metrics = ("log_kl", "kl", "agreement", "cosine", "cosine_padded", "attention_output", "loss")
    title = "How close attention and next tokens stay to the full cache's"
    return [
        scores_sheet(records, metrics, (), title),
        comparison_sheet(records, "log_kl", against=("clusterattn", "snapkv")),
    ]


# What a tune goes by unless told otherwise, and what is easily read.
_AGAINST_FULL = ("log_kl", "kl", "agreement")


def _held_out(records: Sequence[Record]) -> list[Sheet]:
    answered = [name for name in ("accuracy", "score") if any(name in record.scores for record in records)]
    # What the full cache has is what these are measured from.
    against = ["clusterattn", *(it for it in references(records) if it != FULL)]
    title = "On samples that no profile was tuned on"
    return [
        *(comparison_sheet(records, name) for name in answered),
        *(comparison_sheet(records, name, against=against) for name in _AGAINST_FULL),
        scores_sheet(records, ("cosine", "cosine_padded", "attention_output", "loss"), (), title),
    ]


def _ablation(records: Sequence[Record]) -> list[Sheet]:
    names = [name for name in VARIED if any(label_of(record, name) != "" for record in records)]
    return [scores_sheet(records, ("cosine", "kl", "agreement"), names, "One parameter at a time")]


def _plain(records: Sequence[Record]) -> list[Sheet]:
    metrics = dict.fromkeys(name for record in records for name in record.scores)
    return [comparison_sheet(records, metric) for metric in metrics]


_BENCHES: dict[str, Callable[[Sequence[Record]], list[Sheet]]] = {
    "needle": _needle,
    "lines": _accuracy,
    "longbench": _longbench,
    PERPLEXITY: _perplexity,
    "hit-rate": _hit_rate,
    "fit": _fit,
    "held-out": _held_out,
    ABLATION: _ablation,
}
