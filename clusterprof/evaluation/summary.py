"""Summaries of records: means with 95 % intervals, and paired differences to other methods on the same prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

from clusterprof.evaluation.contestants import FULL
from clusterprof.evaluation.groups import (
    VARIED,
    PromptKey,
    Value,
    label_of,
    methods_in,
    ordered,
    prompt_key,
    references,
)

if TYPE_CHECKING:
    from clusterprof.evaluation.records import Record
    from clusterprof.statistics import Estimate

_RESAMPLES = 10_000
_FEWEST = 3


@dataclass(frozen=True)
class Cell:
    """A method at a size, on the prompts that have these labels.

    Attributes
    ----------
    size : int, optional
        None for the full cache.
    labels : tuple
        Values in the order of the labels that were asked for.
    """

    method: str
    size: int | None
    labels: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Row:
    """A cell's mean, and how far it is from other methods' on the same prompts.

    Attributes
    ----------
    mean : Estimate
        Over the cell's prompts.
    differences : dict of str to Estimate
        By the other method: the mean of this cell's values minus the other's, over the prompts that both have,
        at the same size and labels. Missing where there is nothing to compare with.
    """

    cell: Cell
    mean: Estimate
    differences: Mapping[str, Estimate] = field(default_factory=dict)


def cells_of(
    records: Iterable[Record], metric: str, by: Sequence[str] = ()
) -> dict[Cell, dict[PromptKey, float]]:
    """Collect a score by cell and prompt; records without it are left out.

    Parameters
    ----------
    metric : str
        A name in ``Record.scores``.
    by : sequence of str
        Labels besides method and size; see :func:`label_of`.
    """
    cells: dict[Cell, dict[PromptKey, float]] = defaultdict(dict)
    for record in records:
        if metric in record.scores:
            labels = tuple(label_of(record, name) for name in by)
            cells[Cell(record.method, record.size, labels)][prompt_key(record)] = record.scores[metric]
    return dict(cells)


def summarise(
    records: Sequence[Record],
    metric: str,
    by: Sequence[str] = (),
    *,
    over: str | None = None,
    against: Sequence[str] | None = None,
) -> list[Row]:
    """Average a score per method, size and labels, with 95 % intervals.

    Parameters
    ----------
    records : sequence of Record
        Of one group; see :func:`comparable`.
    metric : str
        A name in ``Record.scores``; records without it are left out.
    by : sequence of str
        Labels to group by besides method and size; see :func:`label_of`.
    over : str, optional
        A label, such as "task", each of whose values counts the same: the mean is the mean of their means, and
        the bootstrap draws prompts within each of them.
    against : sequence of str, optional
        Methods to take paired differences to, over the same prompts and at the same size; by default those of
        :func:`references`.

    Returns
    -------
    list of Row
        Ordered by the labels, then the size (the full cache first), then the method.
    """
    cells = cells_of(records, metric, by)
    strata = _strata(records, over)
    methods = methods_in(records)
    order = [ordered(cell.labels[place] for cell in cells) for place in range(len(by))]

    def rank(cell: Cell) -> tuple[list[int], int, int]:
        places = [values.index(value) for values, value in zip(order, cell.labels, strict=True)]
        return places, cell.size or 0, methods.index(cell.method)

    others = references(records) if against is None else against
    return [_row(cell, cells, strata, others) for cell in sorted(cells, key=rank)]


def same_prompts(records: Iterable[Record], metric: str, by: Sequence[str] = ()) -> bool:
    """Whether all cells have the same prompts, or all that are of the same labels where these are of the prompts."""
    prompts: dict[tuple[Value, ...], set[frozenset[PromptKey]]] = defaultdict(set)
    for cell, values in cells_of(records, metric, by).items():
        of_prompts = (it for name, it in zip(by, cell.labels, strict=True) if name not in VARIED)
        prompts[tuple(of_prompts)].add(frozenset(values))
    return all(len(different) == 1 for different in prompts.values())


def winner(
    records: Sequence[Record], metric: str, size: int, *, over: str | None = None, lower: bool
) -> str | None:
    """Return the method that is better than every other at a size, by paired intervals that exclude 0, if one is.

    Parameters
    ----------
    lower : bool
        Whether a lower score is better.
    """
    drawn = [record for record in records if record.size == size]
    cells, strata = cells_of(drawn, metric), _strata(drawn, over)
    means = {cell: _row(cell, cells, strata, ()).mean.mean for cell in cells}
    if len(means) < 2:
        return None
    best = (min if lower else max)(means, key=means.__getitem__)
    against = [cell.method for cell in cells if cell != best]
    differences = _row(best, cells, strata, against).differences
    ahead = len(differences) == len(against) and all(
        it.excludes_zero and (it.mean < 0) == lower for it in differences.values()
    )
    return best.method if ahead else None


def _strata(records: Iterable[Record], over: str | None) -> dict[PromptKey, Value]:
    return {} if over is None else {prompt_key(record): label_of(record, over) for record in records}


def _row(
    cell: Cell,
    cells: Mapping[Cell, Mapping[PromptKey, float]],
    strata: Mapping[PromptKey, Value],
    against: Sequence[str],
) -> Row:
    values = cells[cell]
    differences = {}
    for name in against:
        other = Cell(name, None if name == FULL else cell.size, cell.labels)
        both = sorted(values.keys() & cells.get(other, {}).keys(), key=str)
        if other != cell and both:
            gaps = (values[key] - cells[other][key] for key in both)
            differences[name] = _estimate(gaps, [strata.get(key, "") for key in both])
    keys = sorted(values, key=str)
    mean = _estimate((values[key] for key in keys), [strata.get(key, "") for key in keys])
    return Row(cell, mean, differences)


def _estimate(values: Iterable[float], strata: Sequence[Value]) -> Estimate:
    return _mean_of_means(tuple(values), tuple(strata)) if len(set(strata)) > 1 else _mean(tuple(values))


# Tables and plots of a page ask for the same means.
@lru_cache(maxsize=10_000)
def _mean(values: tuple[float, ...]) -> Estimate:
    from clusterprof.statistics import mean_estimate

    return mean_estimate(values)


@lru_cache(maxsize=10_000)
def _mean_of_means(values: tuple[float, ...], strata: tuple[Value, ...]) -> Estimate:
    """The mean over strata of their means; a bootstrap over the values within each."""
    import numpy as np

    from clusterprof.statistics import BATCH, Estimate

    groups: dict[Value, list[float]] = defaultdict(list)
    for value, stratum in zip(values, strata, strict=True):
        groups[stratum].append(value)
    mean = fmean(fmean(group) for group in groups.values())
    # Two values say next to nothing of how much they vary.
    if min(map(len, groups.values())) < _FEWEST:
        return Estimate(mean, None, None, len(values))
    rng = np.random.default_rng(0)
    drawn = np.zeros((_RESAMPLES // BATCH, BATCH))
    for group, batch in product(groups.values(), drawn):
        batch += rng.choice(np.array(group), (BATCH, len(group))).mean(axis=1) / len(groups)
    low, high = np.percentile(drawn, (2.5, 97.5))
    # As in mean_estimate: rounding must not put the mean outside.
    return Estimate(mean, min(float(low), mean), max(float(high), mean), len(values))
