from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.data import Dataset, Message, Row, sample_rows
from clusterprof.errors import DataError


def dataset(count: int) -> Dataset:
    rows = tuple(Row(id=f"row {i}", messages=(Message("user", str(i)),)) for i in range(count))
    return Dataset("d", "s", "", rows, "", 0)


@given(count=st.integers(1, 300), percent=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_a_fraction_is_that_share_of_distinct_rows_in_order(count: int, percent: int, seed: int) -> None:
    drawn = sample_rows(dataset(count), fraction=percent / 100, seed=seed)
    positions = [int(row.messages[0].content) for row in drawn]
    assert positions == sorted(set(positions))
    assert len(drawn) >= 1
    assert abs(len(drawn) - max(Fraction(count * percent, 100), Fraction(1))) <= Fraction(1, 2)
    assert drawn == sample_rows(dataset(count), fraction=percent / 100, seed=seed)


@given(count=st.integers(1, 50), smaller=st.integers(1, 60), larger=st.integers(1, 60))
def test_a_larger_draw_contains_the_smaller(count: int, smaller: int, larger: int) -> None:
    few, many = (sample_rows(dataset(count), samples=samples) for samples in sorted((smaller, larger)))
    assert {len(few), len(many)} == {min(smaller, count), min(larger, count)}
    assert set(few) <= set(many)


def test_three_rows_with_twenty_percent_give_one() -> None:
    assert len(sample_rows(dataset(3))) == 1


def test_twenty_percent_is_the_default() -> None:
    assert len(sample_rows(dataset(60))) == 12


def test_samples_go_before_the_fraction_and_cannot_exceed_the_rows() -> None:
    assert len(sample_rows(dataset(5), fraction=0.2, samples=4)) == 4
    assert sample_rows(dataset(5), samples=100) == dataset(5).rows


def test_every_row_is_drawn_equally_often() -> None:
    drawn = [sample_rows(dataset(10), samples=1, seed=seed)[0].id for seed in range(2000)]
    counts = [drawn.count(f"row {i}") for i in range(10)]
    # Six standard deviations of a binomial count.
    assert all(abs(count - 200) < 6 * (2000 * 0.1 * 0.9) ** 0.5 for count in counts)


def test_other_seeds_draw_other_rows() -> None:
    assert len({sample_rows(dataset(60), seed=seed) for seed in range(10)}) == 10


def test_the_draw_follows_the_rows_not_their_order() -> None:
    whole = dataset(30)
    turned = Dataset("d", "s", "", whole.rows[::-1], "", 0)
    assert set(sample_rows(whole)) == set(sample_rows(turned))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan"), float("inf")])
def test_fractions_out_of_range_are_refused(fraction: float) -> None:
    with pytest.raises(DataError, match="above 0 and at most 1"):
        sample_rows(dataset(3), fraction=fraction)


@pytest.mark.parametrize("samples", [0, -1])
def test_fewer_than_one_sample_is_refused(samples: int) -> None:
    with pytest.raises(DataError, match="at least 1"):
        sample_rows(dataset(3), samples=samples)
