"""What a search leaves behind: its best point, or what was known before."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from clusterprof.methods import ClusterAttn, SnapKV
from clusterprof.profiling.choice import choose, values_by_sample
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName
from clusterprof.statistics import paired_difference
from tests.profiling.test_judge import ROWS
from tests.profiling.test_tune import Loaded, loaded, run

__all__ = ["loaded"]

Direction = Literal["minimize", "maximize"]
KNOWN = [{"x": 0}, {"x": 1}]
SEED = 3


def study_of(
    points: Mapping[int, Sequence[float]], direction: Direction = "minimize", given_up: Sequence[int] = ()
) -> optuna.Study:
    """With a trial at each point, of these values by sample."""
    study = optuna.create_study(direction=direction)
    for x, values in points.items():
        pruned = x in given_up
        trial = create_trial(
            state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
            value=None if pruned else sum(values) / len(values),
            params={"x": x},
            distributions={"x": IntDistribution(0, 99)},
            intermediate_values=dict(enumerate(values)),
        )
        study.add_trial(trial)
    return study


def taken(study: optuna.Study, known: Sequence[Mapping[str, Any]] = KNOWN) -> int:
    trial, difference = choose(study, [dict(point) for point in known], seed=0)
    assert (difference is None) == (trial.params == study.best_params)
    return int(trial.params["x"])


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        # Better on every sample, and by enough on most of them.
        ((0.1, 0.2, 0.1, 0.3, 0.1, 0.2), 7),
        ((0.1, 0.2, -0.05, 0.3, 0.1, 0.2, 0.1), 7),
        # One sample makes the mean.
        ((1.5, -0.1, -0.1, -0.1, -0.1, -0.1), 1),
        # What a tune found: two prompts make up for four.
        ((0.971, 0.317, -0.423, -0.018, -0.078, 0.396, -0.046, 0.384), 1),
        # Fewer samples than can show anything.
        ((0.1, 0.2, 0.1, 0.3, 0.1), 1),
        ((0.1,), 1),
    ],
)
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_is_taken_where_it_is_shown_to_be_better(
    gains: Sequence[float], expected: int, direction: Direction
) -> None:
    sign = -1 if direction == "minimize" else 1
    start = [5.0 + 0.1 * i for i in range(len(gains))]
    best = [value + sign * gain for value, gain in zip(start, gains, strict=True)]
    worst = [value - sign for value in start]
    assert taken(study_of({0: worst, 1: start, 7: best}, direction)) == expected
    # The better of those that were known, whichever it is.
    assert taken(study_of({1: worst, 0: start, 7: best}, direction)) == (7 if expected == 7 else 0)
    # Without any, there is nothing to stay at.
    assert taken(study_of({0: worst, 1: start, 7: best}, direction), ()) == 7


def test_the_difference_is_of_the_one_left_out() -> None:
    study = study_of({0: [3.0, 3.0, 3.0], 1: [2.0, 2.5, 3.0], 7: [2.5, 1.0, 3.0]})
    trial, difference = choose(study, KNOWN, seed=0)
    assert trial.params == {"x": 1}
    assert values_by_sample(trial) == [2.0, 2.5, 3.0]
    assert difference is not None
    assert difference.mean == pytest.approx((0.5 - 1.5) / 3)
    assert difference.samples == 3


def test_the_interval_is_of_the_seed_that_is_asked_for() -> None:
    start = [0.0] * 9
    best = [-0.971, -0.317, 0.423, 0.018, 0.078, -0.396, 0.046, -0.384, 0.211]
    study = study_of({0: start, 7: best})
    for seed in (0, 7):
        assert choose(study, KNOWN, seed=seed)[1] == paired_difference(best, start, seed=seed)
    assert choose(study, KNOWN, seed=0)[1] != choose(study, KNOWN, seed=7)[1]


def test_a_known_point_that_was_given_up_is_not_returned_to() -> None:
    points = {0: [3.0] * 8, 1: [4.0] * 3, 7: [2.8, 3.1] * 4}
    assert taken(study_of(points, given_up=[1])) == 0
    assert taken(study_of(points, given_up=[0, 1])) == 7


def test_where_what_was_known_is_the_best_nothing_is_left_out() -> None:
    for best in (0, 1):
        study = study_of({best: [1.0, 1.2] * 4, 1 - best: [2.0] * 8, 7: [1.1, 1.2] * 4})
        trial, difference = choose(study, KNOWN, seed=0)
        assert (trial.params["x"], difference) == (best, None)


def test_equal_values_stay_at_what_was_known() -> None:
    assert taken(study_of({7: [1.0] * 8, 1: [1.0] * 8})) == 1


@given(st.data())
def test_whatever_is_taken_is_known_or_the_best(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 9))
    values = st.lists(st.floats(-10, 10), min_size=samples, max_size=samples)
    study = study_of(data.draw(st.dictionaries(st.integers(0, 5), values, min_size=1)))
    trial, difference = choose(study, KNOWN, seed=0)
    if difference is None:
        assert trial.value == study.best_value
    else:
        assert trial.params in KNOWN
        assert difference.mean <= 0
        assert not difference.excludes_zero


@pytest.mark.parametrize(("samples", "objective"), [(4, "kl"), (8, "attention_output")])
def test_a_tune_has_what_it_began_with_unless_more_is_shown(
    loaded: Loaded, tmp_path: Path, samples: int, objective: ObjectiveName
) -> None:
    storage = f"sqlite:///{tmp_path / 'mine.db'}"
    options = {"trials": 24, "samples": samples, "objective": objective, "seed": SEED, "storage": storage}
    result = run(loaded, tmp_path, ROWS, **options)
    [rival] = [each.method for each in result.judgement.methods if each.label == "SnapKV tuned"]
    tuning = result.profile.results.tuning
    aside = result.set_aside
    assert aside is not None
    # The values of the default, or what keeps what tuned SnapKV keeps.
    method = result.profile.compression.method
    assert isinstance(method, ClusterAttn)
    assert isinstance(rival, SnapKV)
    high = result.profile.search.space["theta"][1]
    start = (high, rival.kernel_size, rival.pooling)
    assert method == ClusterAttn.paper_default(40) or (
        (method.theta, method.gap_pool, method.gap_pooling) == start
    )
    assert aside.method != method
    sign = 1 if DIRECTIONS[objective] == "minimize" else -1
    assert sign * aside.value < sign * tuning.value
    assert aside.difference.mean == pytest.approx(aside.value - tuning.value, abs=1e-6)
    assert aside.difference.samples == samples
    assert not aside.difference.excludes_zero
    study = optuna.load_study(study_name=result.profile.search.study, storage=storage)
    searched = {name: getattr(method, name) for name in result.profile.search.space}
    [taken] = [trial for trial in study.trials if trial.params == searched]
    values = [values_by_sample(trial) for trial in (study.best_trial, taken)]
    assert aside.difference == paired_difference(*values, seed=SEED)
