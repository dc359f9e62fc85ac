import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.profiling.objective import DIRECTIONS, Scores, mean_scores

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.builds(Scores, *[numbers] * len(DIRECTIONS)), min_size=1, max_size=6))
def test_every_sample_weighs_the_same(samples: list[Scores]) -> None:
    mean = mean_scores(samples)
    for name in DIRECTIONS:
        assert mean[name] == pytest.approx(math.fsum(s[name] for s in samples) / len(samples), abs=1e-6)


def test_scores_are_looked_up_by_the_objectives_name() -> None:
    scores = Scores(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert [scores[name] for name in DIRECTIONS] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_what_measures_a_distance_is_minimised() -> None:
    assert {name for name, direction in DIRECTIONS.items() if direction == "minimize"} == {
        "kl",
        "loss",
        "log_kl",
    }
