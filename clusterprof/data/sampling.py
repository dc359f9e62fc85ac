"""Which rows of a dataset a run uses."""

from __future__ import annotations

import hashlib

from clusterprof.data.rows import Dataset, Row
from clusterprof.errors import DataError


def sample_rows(
    dataset: Dataset, *, fraction: float = 0.2, samples: int | None = None, seed: int = 0
) -> tuple[Row, ...]:
    """Draw rows without replacement, in the dataset's order; a larger draw contains the smaller ones.

    Rows are ranked by a hash of the seed and their id, so the draw depends neither on the Python version
    nor on the order of the file.

    Parameters
    ----------
    dataset : Dataset
    fraction : float
        Share of the rows, in (0, 1]; rounded to whole rows, at least one. The paper profiles on 20 %.
    samples : int, optional
        How many rows instead of a share; all rows if the dataset has fewer.
    seed : int

    Returns
    -------
    tuple of Row

    Raises
    ------
    DataError
        If `fraction` is not in (0, 1], or `samples` is below 1.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"The sampled fraction is {fraction}, and must be above 0 and at most 1.")
    if samples is not None and samples < 1:
        raise DataError(f"The number of samples is {samples}, and must be at least 1.")
    wanted = max(1, round(fraction * len(dataset.rows))) if samples is None else samples
    return tuple(dataset.rows[index] for index in sorted(drawing_order(dataset, seed)[:wanted]))


def drawing_order(dataset: Dataset, seed: int) -> list[int]:
    """Positions of all rows, in the order in which :func:`sample_rows` draws them."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}\n{dataset.rows[index].id}".encode()).digest()

    return sorted(range(len(dataset.rows)), key=rank)
