"""Curves of records, such as one number per layer and head, and their means over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import nan
from typing import TYPE_CHECKING

from clusterprof.errors import DataError
from clusterprof.text import one_line

if TYPE_CHECKING:
    from clusterprof.evaluation.records import Record

# Rows of numbers, such as (layers, heads); NaN where there is none.
Matrix = Sequence[Sequence[float]]


def mean_curve(records: Sequence[Record], name: str) -> Matrix:
    """Average a curve of rows over records, place by place, over those that have the place.

    Raises
    ------
    DataError
        If a record's curve is not a list of lists of numbers.
    """
    curves = [_rows(record, name) for record in records]
    return [
        [_mean(values) for values in zip_longest(*rows, fillvalue=nan)]
        for rows in zip_longest(*curves, fillvalue=[])
    ]


def places(records: Sequence[Record], name: str, count: int) -> list[int]:
    """Return what the places of a curve stand for, such as the layers' indices: the longest list, or 0, 1, 2..."""
    lists = [value for record in records if isinstance(value := record.curves.get(name), list)]
    longest = max(lists, key=len, default=[])
    named = [place for place in longest if isinstance(place, int)]
    return named if len(named) == count else list(range(count))


def _rows(record: Record, name: str) -> list[list[float]]:
    curve = record.curves.get(name)
    if not isinstance(curve, list) or not curve:
        raise _no_curve(record, name)
    rows = []
    for row in curve:
        if not isinstance(row, list) or any(
            isinstance(x, bool) or not isinstance(x, int | float) for x in row
        ):
            raise _no_curve(record, name)
        rows.append([float(x) for x in row if isinstance(x, int | float)])
    return rows


def _no_curve(record: Record, name: str) -> DataError:
    return DataError(
        f"The {record.bench} result of {record.method} for the prompt {one_line(record.prompt, 60)} has no {name} "
        "that is a list of lists of numbers; measure it again."
    )


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if value == value]
    return sum(there) / len(there) if there else nan
