"""Searching spaces that have finitely many points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from clusterprof.errors import ClusterprofError, CompressionError
from clusterprof.methods import MethodConfig, NGram, SnapKV, TopK
from clusterprof.profile import Compression
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.samplers import finished, trials_in_the_end
from clusterprof.profiling.search import search
from clusterprof.profiling.settings import SamplerName
from clusterprof.profiling.spaces import SearchSpace

NGRAM: dict[str, BaseDistribution] = {"n": IntDistribution(1, 4)}
SNAPKV: dict[str, BaseDistribution] = {
    "kernel_size": IntDistribution(1, 63, step=2),
    "pooling": CategoricalDistribution(["avg", "max"]),
}


class Scripted(Evaluator):
    """Scores methods by a function."""

    def __init__(self, value: Callable[[Any], float]) -> None:
        self.value = value
        self.captures: Any = [None]
        self.asked: list[MethodConfig] = []

    def sample_scores(self, i: int, compressions: Sequence[Compression]) -> list[Scores | CompressionError]:
        results: list[Scores | CompressionError] = []
        for compression in compressions:
            self.asked.append(compression.method)
            try:
                results.append(Scores(self.value(compression.method), 0.2, 0.3, 0.3, 0.4, 0.5, 0.6))
            except CompressionError as error:
                results.append(error)
        return results


def run(
    default: MethodConfig,
    distributions: Mapping[str, BaseDistribution],
    value: Callable[[Any], float],
    trials: int,
    *,
    study: optuna.Study | None = None,
    seed: int = 0,
    sampler: SamplerName = "tpe",
) -> tuple[optuna.Study, list[MethodConfig]]:
    study = study or optuna.create_study(direction="maximize")
    evaluator = Scripted(value)
    told: list[FrozenTrial] = []
    search(
        study,
        evaluator,
        SearchSpace(default, 256, 32, distributions),
        sampler=sampler,
        objective="cosine",
        trials=trials,
        timeout=None,
        seed=seed,
        on_round=told.extend,
        on_interrupt=lambda: None,
    )
    assert len(told) == len(evaluator.asked)
    return study, evaluator.asked


def bumpy(method: SnapKV) -> float:
    """Best at one point that its neighbours say nothing about."""
    if (method.kernel_size, method.pooling) == (47, "max"):
        return 1.0
    return -abs(method.kernel_size - 9) / 100


def test_a_space_smaller_than_the_trials_is_tried_to_the_end_and_no_further() -> None:
    study, asked = run(NGram(), NGRAM, lambda method: -abs(method.n - 4), 50)
    assert asked[0] == NGram()
    assert {method.n for method in asked if isinstance(method, NGram)} == {1, 2, 3, 4}
    assert len(asked) == len(finished(study)) == 4
    assert study.best_params == {"n": 4}
    # Nothing is left for another run.
    assert run(NGram(), NGRAM, lambda method: 0.0, 50, study=study)[1] == []


@pytest.mark.parametrize("seed", range(3))
def test_no_point_is_tried_twice(seed: int) -> None:
    _, asked = run(SnapKV(), SNAPKV, bumpy, 50, seed=seed)
    assert asked[0] == SnapKV()
    assert len(asked) == len(set(asked)) == 50


def test_as_many_trials_as_points_find_the_best_of_a_dense_grid() -> None:
    study, asked = run(SnapKV(), SNAPKV, bumpy, 64)
    grid = [SnapKV(kernel_size=k, pooling=p) for k in range(1, 64, 2) for p in ("avg", "max")]
    assert set(asked) == set(grid)
    assert study.best_params == {"kernel_size": 47, "pooling": "max"}
    assert study.best_value == max(map(bumpy, grid))


def test_where_points_are_left_the_search_follows_the_values() -> None:
    _, asked = run(SnapKV(), SNAPKV, lambda method: -abs(method.kernel_size - 45) / 10, 40)
    near = [method for method in asked if isinstance(method, SnapKV) and abs(method.kernel_size - 45) <= 8]
    # 18 of 64 points are that near; blind draws would find 11 of them.
    assert len(near) >= 15


def test_without_parameters_there_is_one_evaluation() -> None:
    study, asked = run(TopK(), {}, lambda method: 0.5, 50)
    assert asked == [TopK()]
    assert (study.best_value, study.best_params) == (0.5, {})
    assert run(TopK(), {}, lambda method: 0.5, 50, study=study)[1] == []


def test_there_are_no_more_trials_than_points() -> None:
    study = optuna.create_study(direction="maximize")
    space = SearchSpace(NGram(), 256, 32, NGRAM)
    ends = [trials_in_the_end(study, space, "tpe", trials, None) for trials in (1, 3, 50)]
    assert ends == [1, 3, 4]
    run(NGram(), NGRAM, lambda method: 0.5, 3, study=study)
    assert trials_in_the_end(study, space, "tpe", 2, None) == 3


def test_resuming_goes_through_the_rest() -> None:
    study, first = run(SnapKV(), SNAPKV, bumpy, 30)
    _, second = run(SnapKV(), SNAPKV, bumpy, 60, study=study)
    _, third = run(SnapKV(), SNAPKV, bumpy, 100, study=study)
    assert [len(each) for each in (first, second, third)] == [30, 30, 4]
    assert len({*first, *second, *third}) == 64
    assert study.best_value == 1.0


def test_a_killed_trial_is_made_up_for() -> None:
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"n": 2})
    killed = study.ask(NGRAM)
    assert killed.params == {"n": 2}
    _, asked = run(NGram(), NGRAM, lambda method: 0.5, 50, study=study)
    assert sorted(method.n for method in asked if isinstance(method, NGram)) == [1, 2, 3, 4]


def test_a_point_that_fails_is_tried_once_in_a_run_and_again_in_the_next() -> None:
    def three_fails(method: NGram) -> float:
        if method.n == 3:
            raise CompressionError("it is not finite")
        return 0.5

    study, asked = run(NGram(), NGRAM, three_fails, 50)
    assert len(asked) == len(set(asked)) == 4
    assert len(finished(study)) == 3
    _, again = run(NGram(), NGRAM, lambda method: 1.0, 50, study=study)
    assert again == [NGram(n=3)]
    assert study.best_params == {"n": 3}


def test_when_every_point_fails_the_reason_is_told() -> None:
    def fail(method: TopK) -> float:
        raise CompressionError("it is not finite")

    study = optuna.create_study(direction="maximize")
    with pytest.raises(ClusterprofError, match="All trials failed, the last one with: it is not finite"):
        run(TopK(), {}, fail, 50, study=study)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]
    with pytest.raises(ClusterprofError, match="All trials failed, the last one with: it is not finite"):
        run(NGram(), NGRAM, fail, 50)


def test_another_process_takes_part() -> None:
    study = optuna.create_study(direction="maximize")

    def other_process(method: SnapKV) -> float:
        # It finishes the next point whenever this one is at a point.
        params = {"kernel_size": 64 - method.kernel_size, "pooling": method.pooling}
        study.add_trial(optuna.trial.create_trial(value=0.1, params=params, distributions=SNAPKV))
        return 0.5

    _, asked = run(SnapKV(), SNAPKV, other_process, 8, study=study)
    assert (len(asked), len(finished(study))) == (4, 8)
    _, rest = run(SnapKV(), SNAPKV, bumpy, 100, study=study)
    assert len({*asked, *rest}) == len(asked) + len(rest)
    assert len({tuple(trial.params.values()) for trial in finished(study)}) == 64
