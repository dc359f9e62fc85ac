import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.statistics import BATCH, Estimate, interval_95, mean_estimate, paired_difference


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.6]])
def test_no_interval_for_fewer_than_three_samples(values: list[float]) -> None:
    assert interval_95(values) is None
    assert mean_estimate(values) == Estimate(sum(values) / len(values), None, None, len(values))


@pytest.mark.parametrize("value", [0.0, 0.97, 1.0, 100.0])
def test_equal_samples_have_an_interval_of_no_width(value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interval_95([value] * 5) == (value, value)
        estimate = mean_estimate([value] * 5)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((value,) * 3)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=8))
@settings(deadline=None)  # the first interval imports scipy
def test_interval_holds_the_mean(values: list[float]) -> None:
    interval = interval_95(values)
    assert interval is not None
    low, high = interval
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert low - 1e-9 <= np.mean(values) <= high + 1e-9


@given(st.floats(-1e3, 1e3), st.integers(3, 20))
@settings(deadline=None)
def test_the_ends_of_an_estimate_are_never_past_its_mean(value: float, count: int) -> None:
    estimate = mean_estimate([value] * count)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low <= estimate.mean <= estimate.high


def test_interval_of_many_samples_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(3).normal(0.9, 0.05, 400)
    interval = interval_95(values.tolist())
    assert interval is not None
    half = 1.96 * values.std() / 20
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.001)


def test_interval_of_a_rate_is_that_of_the_binomial_distribution() -> None:
    values = [1.0] * 160 + [0.0] * 40
    # Quantiles at 2.5 and 97.5 % of the binomial distribution of 200 draws at 0.8: 149 and 171.
    estimate = mean_estimate(values)
    assert estimate.mean == 0.8
    assert estimate.samples == 200
    assert (estimate.low, estimate.high) == pytest.approx((149 / 200, 171 / 200), abs=0.0051)


def test_interval_is_the_same_every_time() -> None:
    values = np.random.default_rng(4).normal(0.9, 0.05, 12).tolist()
    assert interval_95(values, seed=1) == interval_95(values, seed=1)
    assert interval_95(values, seed=1) != interval_95(values, seed=2)
    assert mean_estimate(values, seed=1) == mean_estimate(values, seed=1)


def test_a_pair_differs_by_less_than_two_means_seem_to() -> None:
    rng = np.random.default_rng(5)
    hard = rng.uniform(0, 1, 50)
    values, others = (hard + 0.02 + rng.normal(0, 0.01, 50)).tolist(), hard.tolist()
    difference = paired_difference(values, others)
    assert difference.mean == pytest.approx(np.mean(values) - np.mean(others))
    assert difference.low is not None
    assert difference.low > 0
    apart = mean_estimate(values), mean_estimate(others)
    assert apart[0].low is not None
    assert apart[1].high is not None
    assert apart[0].low < apart[1].high


def test_a_pair_the_other_way_round_has_the_opposite_difference() -> None:
    one, two = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]
    assert paired_difference(one, two).mean == 0.5
    assert paired_difference(two, one).mean == -0.5
    assert paired_difference(one, one) == Estimate(0.0, 0.0, 0.0, 4)


def test_values_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0, 2.0], [1.0])


def test_resamples_are_held_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    mean = np.mean

    def watched(values: Any, axis: int | None = None) -> Any:
        sizes.append(np.size(values))
        return mean(values, axis=axis)

    monkeypatch.setattr(np, "mean", watched)
    interval_95([float(value) for value in range(30)])
    assert max(sizes) == BATCH * 30
