"""Comparisons as sheets: methods at each size, by a label, or by several scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from clusterprof.evaluation.contestants import FULL
from clusterprof.evaluation.groups import Value, methods_in, ordered, prompts_with, references
from clusterprof.evaluation.summary import Cell, same_prompts, summarise, winner
from clusterprof.report.metrics import metric_of
from clusterprof.report.sheets import Entry, Section, Sheet, difference_entry, mean_entry

if TYPE_CHECKING:
    from clusterprof.evaluation.records import Record
    from clusterprof.statistics import Estimate

_WHOLE = "all"


def comparison_sheet(
    records: Sequence[Record],
    metric: str,
    *,
    over: str | None = None,
    against: Sequence[str] | None = None,
    note: str = "",
) -> Sheet:
    """Return a row per size and method: the mean, and the paired differences; see :func:`summarise`.

    The best method at a size stands out only where it is ahead of every other by paired intervals.
    """
    spec = metric_of(metric)
    others = references(records) if against is None else [it for it in against if it in methods_in(records)]
    rows = summarise(records, metric, over=over, against=others)
    sizes = dict.fromkeys(row.cell.size for row in rows if row.cell.size is not None)
    winners = {
        (winner(records, metric, size, over=over, lower=spec.better == "lower"), size) for size in sizes
    }
    by_cell = {row.cell: row for row in rows}

    def numbers(cell: Cell) -> tuple[Entry, ...]:
        row = by_cell[cell]
        mean = mean_entry(row.mean, spec, strong=(cell.method, cell.size) in winners)
        differences = (difference_entry(row.differences.get(it), spec, row.mean.samples) for it in others)
        return Entry(f"{row.mean.samples:,}"), mean, *differences

    notes = [note, *_uneven(records, metric), *_special(records)]
    full = [row.mean.mean for row in rows if row.cell.method == FULL]
    if full and not any(full) and spec.better == "higher":
        notes.append(
            "The full cache has 0: the model itself cannot do this, so nothing shows about the methods."
        )
    if any(method for method, _ in winners):
        notes.append("Bold: better than every other method at that size, by paired intervals that exclude 0.")
    return Sheet(
        f"{spec.title[0].upper()}{spec.title[1:]} ({spec.direction})",
        ("size", "method", "prompts", spec.heading, *(f"\N{MINUS SIGN} {other}" for other in others)),
        2,
        _sections(by_cell, numbers),
        tuple(filter(None, notes)),
    )


def matrix_sheet(
    records: Sequence[Record],
    metric: str,
    columns: str,
    title: str,
    *,
    over: str | None = None,
    shown_as: Callable[[Estimate], tuple[str, Estimate]] | None = None,
) -> Sheet:
    """Return a row per size and method, and a column per value of a label.

    Parameters
    ----------
    shown_as : callable, optional
        Turns an estimate of the metric into the name of another metric and an estimate of that.
    """
    rows = summarise(records, metric, (columns,), over=over, against=())
    values = ordered(row.cell.labels[0] for row in rows)
    means = {row.cell: row.mean for row in rows}
    kinds = dict.fromkeys(Cell(row.cell.method, row.cell.size) for row in rows)

    def numbers(cell: Cell) -> tuple[Entry, ...]:
        found = (means.get(Cell(cell.method, cell.size, (value,))) for value in values)
        return tuple(_entry(mean, metric, shown_as) for mean in found)

    order = methods_in(records)
    alike = sorted(kinds, key=lambda cell: (cell.size or 0, order.index(cell.method)))
    headings = ("size", "method", *(value_text(value) for value in values))
    return Sheet(title, headings, 2, _sections(alike, numbers), _uneven(records, metric, columns))


def scores_sheet(records: Sequence[Record], metrics: Sequence[str], by: Sequence[str], title: str) -> Sheet:
    """Return a row per size, method and labels, and a column per score."""
    there = [name for name in metrics if any(name in record.scores for record in records)]
    means = {(name, row.cell): row.mean for name in there for row in summarise(records, name, by, against=())}
    cells = sorted(dict.fromkeys(cell for _, cell in means), key=lambda cell: cell.size or 0)

    def numbers(cell: Cell) -> tuple[Entry, ...]:
        found = [means.get((name, cell)) for name in there]
        count = max(mean.samples for mean in found if mean is not None)
        entries = (mean_entry(mean, metric_of(name)) for name, mean in zip(there, found, strict=True))
        return *(Entry(value_text(value)) for value in cell.labels), Entry(f"{count:,}"), *entries

    headings = ("size", "method", *by, "prompts", *(metric_of(name).heading for name in there))
    notes = (note for name in there for note in _uneven(records, name, *by))
    return Sheet(
        title, headings, 2, _sections(cells, numbers), tuple(dict.fromkeys((*notes, *_special(records))))
    )


def label_sheet(records: Sequence[Record], metric: str, label: str, title: str) -> Sheet:
    """Return a row per size and value of a label, and a column per method, for labels of many values."""
    means = {row.cell: row.mean for row in summarise(records, metric, (label,), against=())}
    values = ordered(cell.labels[0] for cell in means)
    methods, spec = methods_in(records), metric_of(metric)
    sections: list[Section] = []
    for size in ordered(cell.size for cell in means if cell.size is not None) or [0]:
        rows = []
        for value in values:
            cells = (Cell(it, None if it == FULL else int(size), (value,)) for it in methods)
            entries = (mean_entry(means.get(cell), spec) for cell in cells)
            rows.append((Entry(value_text(size)), Entry(value_text(value)), *entries))
        sections.append(tuple(rows))
    headings = ("size", label, *methods)
    return Sheet(title, headings, 2, tuple(sections), _uneven(records, metric, label))


def value_text(value: Value) -> str:
    """Return a label's value as a table shows it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def _entry(
    mean: Estimate | None, metric: str, shown_as: Callable[[Estimate], tuple[str, Estimate]] | None
) -> Entry:
    name = metric
    if mean is not None and shown_as is not None:
        name, mean = shown_as(mean)
    return mean_entry(mean, metric_of(name))


def _sections(cells: Iterable[Cell], numbers: Callable[[Cell], tuple[Entry, ...]]) -> tuple[Section, ...]:
    """A section per size, and a row per cell."""
    return tuple(
        tuple(
            (Entry(_WHOLE if size is None else f"{size:,}"), Entry(cell.method), *numbers(cell))
            for cell in members
        )
        for size, members in groupby(cells, key=lambda cell: cell.size)
    )


def _uneven(records: Sequence[Record], metric: str, *by: str) -> tuple[str, ...]:
    """Say so where means are over different prompts."""
    if same_prompts(records, metric, by):
        return ()
    return ("Not every method and size has every prompt here: compare the differences, not the means.",)


def _special(records: Sequence[Record]) -> list[str]:
    """Say what is special about some prompts."""
    notes = []
    cut = prompts_with("cut", records)
    if cut:
        notes.append(f"{_prompts(cut)} longer than the model or --max-tokens allows and lost the middle.")
    for size in ordered(record.size for record in records if record.size is not None):
        fitting = prompts_with("fits", (record for record in records if record.size == size))
        if fitting:
            fit, them = ("prompt fits", "it") if fitting == 1 else ("prompts fit", "them")
            notes.append(f"{fitting:,} {fit} in size {size:,}; nothing was evicted from {them}.")
    return notes


def _prompts(count: int) -> str:
    return "1 prompt was" if count == 1 else f"{count:,} prompts were"
