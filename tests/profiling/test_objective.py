import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.profiling.objective import DIRECTIONS, Scores, interval_95, mean_scores

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.builds(Scores, numbers, numbers, numbers, numbers, numbers), min_size=1, max_size=6))
def test_every_sample_weighs_the_same(samples: list[Scores]) -> None:
    mean = mean_scores(samples)
    for name in DIRECTIONS:
        assert mean[name] == pytest.approx(math.fsum(s[name] for s in samples) / len(samples), abs=1e-6)


def test_scores_are_looked_up_by_the_objectives_name() -> None:
    scores = Scores(cosine=0.1, cosine_padded=0.2, kl=0.3, agreement=0.4, loss=0.5)
    assert [scores[name] for name in DIRECTIONS] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_what_measures_a_distance_is_minimised() -> None:
    assert {name for name, direction in DIRECTIONS.items() if direction == "minimize"} == {"kl", "loss"}


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.6]])
def test_no_interval_for_fewer_than_three_samples(values: list[float]) -> None:
    assert interval_95(values) is None


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert interval_95([0.97] * 5) == (0.97, 0.97)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=8))
def test_interval_holds_the_mean(values: list[float]) -> None:
    interval = interval_95(values)
    assert interval is not None
    low, high = interval
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert low - 1e-9 <= np.mean(values) <= high + 1e-9


def test_interval_of_many_samples_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(3).normal(0.9, 0.05, 400)
    interval = interval_95(values.tolist())
    assert interval is not None
    half = 1.96 * values.std() / 20
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.001)


def test_interval_is_the_same_every_time() -> None:
    values = np.random.default_rng(4).normal(0.9, 0.05, 12).tolist()
    assert interval_95(values, seed=1) == interval_95(values, seed=1)
    assert interval_95(values, seed=1) != interval_95(values, seed=2)
