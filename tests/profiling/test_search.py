import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from clusterprof.errors import ClusterprofError, CompressionError
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores
from clusterprof.profiling.samplers import finished
from clusterprof.profiling.search import open_study, search, what_differs
from clusterprof.profiling.settings import SamplerName
from clusterprof.profiling.spaces import SearchSpace

Point = tuple[int, float]
SPACE = SearchSpace(
    ClusterAttn.paper_default(256),
    size=256,
    window=32,
    distributions={
        "num_block": IntDistribution(1, 32),
        "theta": FloatDistribution(1e-4, 0.5, log=True),
    },
)
DEFAULT = (8, 2e-3)


class Scripted(Evaluator):
    """Scores a point by a function, plus what each sample adds to it."""

    def __init__(
        self, value: Callable[[int, float], float], *, samples: Sequence[float] = (-0.125, 0.125)
    ) -> None:
        self.value, self.samples = value, samples
        self.captures: Any = samples
        self.asked: list[Point] = []
        self.evaluated: list[tuple[int, Point]] = []
        self.values: dict[Point, float] = {}

    def sample_scores(self, i: int, compressions: Sequence[Compression]) -> list[Scores | CompressionError]:
        results: list[Scores | CompressionError] = []
        for compression in compressions:
            try:
                results.append(self.one(i, compression))
            except CompressionError as error:
                results.append(error)
        return results

    def one(self, i: int, compression: Compression) -> Scores:
        method = compression.method
        assert isinstance(method, ClusterAttn)
        assert (compression.size, compression.window) == (256, 32)
        point = (method.num_block, method.theta)
        if i == 0:
            self.asked.append(point)
            self.values[point] = self.value(*point)
        self.evaluated.append((i, point))
        value = self.values[point] + self.samples[i]
        return Scores(value, 0.2, 0.3, value, 0.4, 0.5, 0.6)


def smooth(num_block: int, theta: float) -> float:
    """Highest at (20, 0.05)."""
    return -(((num_block - 20) / 32) ** 2) - (math.log(theta / 0.05) / 10) ** 2


def in_memory(objective: ObjectiveName = "cosine") -> optuna.Study:
    return optuna.create_study(direction=DIRECTIONS[objective])


def run(
    study: optuna.Study,
    evaluator: Evaluator,
    trials: int,
    *,
    objective: ObjectiveName = "cosine",
    timeout: float | None = None,
    seed: int = 0,
    sampler: SamplerName = "tpe",
    **options: Any,
) -> list[FrozenTrial]:
    told: list[FrozenTrial] = []
    search(
        study,
        evaluator,
        SPACE,
        sampler=sampler,
        objective=objective,
        trials=trials,
        timeout=timeout,
        seed=seed,
        on_round=told.extend,
        on_interrupt=lambda: None,
        **options,
    )
    return told


def points(trials: Sequence[FrozenTrial]) -> list[Point]:
    return [(trial.params["num_block"], trial.params["theta"]) for trial in trials]


def approximately_default(point: Point) -> bool:
    return point[0] == DEFAULT[0] and math.isclose(point[1], DEFAULT[1], rel_tol=1e-9)


def test_the_paper_default_comes_first_and_the_best_is_no_worse() -> None:
    study, evaluator = in_memory(), Scripted(smooth)
    told = run(study, evaluator, 25)
    assert len(told) == len(finished(study)) == len(evaluator.asked) == 25
    assert points(told) == points(finished(study)) == evaluator.asked
    assert approximately_default(evaluator.asked[0])
    assert sum(map(approximately_default, evaluator.asked)) == 1
    assert evaluator.asked[0][1] == ClusterAttn.paper_default(256).theta
    for num_block, theta in evaluator.asked:
        assert 1 <= num_block <= 32
        assert 1e-4 <= theta <= 0.5
    assert study.best_value == pytest.approx(max(smooth(*point) for point in evaluator.asked))
    assert study.best_value > smooth(*DEFAULT)


def test_all_scores_of_a_trial_are_recorded() -> None:
    study = in_memory()
    (trial,) = run(study, Scripted(lambda num_block, theta: 0.75), 1)
    expected = {
        "cosine": 0.75,
        "cosine_padded": 0.2,
        "attention_output": 0.3,
        "kl": 0.75,
        "agreement": 0.4,
        "loss": 0.5,
        "log_kl": 0.6,
    }
    assert trial.value == 0.75
    assert trial.user_attrs == expected


def test_a_distance_is_minimised() -> None:
    study = in_memory("kl")
    run(study, Scripted(lambda *point: -smooth(*point)), 25, objective="kl")
    assert study.best_value == min(trial.values[0] for trial in finished(study))
    assert study.best_value < -smooth(*DEFAULT)


def test_a_seed_says_which_points_are_tried() -> None:
    asked = []
    for seed in (0, 0, 1):
        evaluator = Scripted(smooth)
        run(in_memory(), evaluator, 6, seed=seed)
        asked.append(evaluator.asked)
    assert asked[0] == asked[1]
    assert set(asked[0][1:]).isdisjoint(asked[2][1:])


def test_resuming_tries_new_points_until_the_study_has_enough() -> None:
    study, evaluator = in_memory(), Scripted(smooth)
    for trials, expected in ((3, 3), (6, 6), (6, 6), (9, 9), (4, 9)):
        run(study, evaluator, trials)
        assert len(finished(study)) == expected
    assert len(evaluator.asked) == 9
    # Start-up draws are random: the same seed would give the same ones again.
    assert len(set(evaluator.asked)) == 9
    assert sum(map(approximately_default, evaluator.asked)) == 1


def test_a_timeout_starts_no_new_trial_and_the_default_still_comes_first() -> None:
    study, evaluator = in_memory(), Scripted(smooth)
    assert run(study, evaluator, 5, timeout=0) == []
    assert run(study, evaluator, 5, timeout=0) == []
    run(study, evaluator, 5)
    assert approximately_default(evaluator.asked[0])
    assert sum(map(approximately_default, evaluator.asked)) == 1


def test_the_default_is_tried_again_after_a_kill_in_the_middle_of_it() -> None:
    study = in_memory()
    default = ClusterAttn.paper_default(256)
    study.enqueue_trial({"num_block": default.num_block, "theta": default.theta})
    killed = study.ask()
    killed.suggest_int("num_block", 1, 32)
    killed.suggest_float("theta", 1e-4, 0.5, log=True)
    assert killed.params["num_block"] == 8

    evaluator = Scripted(smooth)
    run(study, evaluator, 3)
    assert approximately_default(evaluator.asked[0])
    assert len(finished(study)) == 3


def fail_if(condition: Callable[[int], bool], error: BaseException) -> Callable[[int, float], float]:
    calls = iter(range(10_000))

    def value(num_block: int, theta: float) -> float:
        if condition(next(calls)):
            raise error
        return smooth(num_block, theta)

    return value


def test_a_failed_trial_is_told_and_the_search_goes_on() -> None:
    study, error = in_memory(), CompressionError("layer 7 is bad")
    # Two failures in a row, again and again, are not three.
    told = run(study, Scripted(fail_if(lambda call: call % 3 < 2, error)), 4)
    assert [trial.state for trial in told] == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE] * 4
    failed = [trial for trial in told if trial.state == TrialState.FAIL]
    assert {trial.user_attrs["error"] for trial in failed} == {str(error)}
    assert study.best_trial in finished(study)


def test_too_little_memory_fails_a_round() -> None:
    study = in_memory()
    error = torch.OutOfMemoryError("no memory")
    with pytest.raises(ClusterprofError, match="4 trials in a row failed, the last one with: no memory"):
        run(study, Scripted(fail_if(lambda call: call >= 4, error)), 20)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4 + ["FAIL"] * 4


def test_failures_in_a_row_stop_the_search() -> None:
    study = in_memory()
    evaluator = Scripted(fail_if(lambda call: call >= 2, CompressionError("layer 7 is bad.")))
    with pytest.raises(
        ClusterprofError, match=r"6 trials in a row failed, the last one with: layer 7 is bad"
    ):
        run(study, evaluator, 10)
    # Two rounds of four.
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2 + ["FAIL"] * 6


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_a_value_that_is_not_finite_never_becomes_the_best(value: float, objective: ObjectiveName) -> None:
    study = in_memory(objective)
    calls = iter(range(100))
    told = run(
        study, Scripted(lambda num_block, theta: value if next(calls) % 2 else 0.5), 3, objective=objective
    )
    assert [trial.state.name for trial in told] == ["COMPLETE", "FAIL"] * 2 + ["COMPLETE"]
    assert study.best_value == 0.5
    assert f"The objective {objective} is" in told[1].user_attrs["error"]


def test_ctrl_c_keeps_what_was_finished() -> None:
    study = in_memory()
    with pytest.raises(KeyboardInterrupt):
        run(study, Scripted(fail_if(lambda call: call == 6, KeyboardInterrupt())), 10)
    assert len(finished(study)) == 4
    run(study, Scripted(smooth), 6)
    assert len(finished(study)) == 6


def test_ctrl_c_waits_for_the_round_under_way() -> None:
    calls = iter(range(100))

    def press_in_the_sixth(num_block: int, theta: float) -> float:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return smooth(num_block, theta)

    study = in_memory()
    with pytest.raises(KeyboardInterrupt):
        run(study, Scripted(press_in_the_sixth), 20)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 8


MADE: dict[str, str | int] = {
    "method": "clusterattn",
    "window": 32,
    "prompts": "sha256:aaaa",
    "model": "org/tiny",
    "revision": "1234",
    "weights": "sha256:aaaa",
}


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'studies.db'}"


def test_a_study_goes_on_in_another_process(tmp_path: Path) -> None:
    asked = []
    for trials in (4, 8):
        evaluator = Scripted(smooth)
        run(open_study("mine", url(tmp_path), "cosine", MADE), evaluator, trials)
        asked.append(evaluator.asked)
    assert [len(each) for each in asked] == [4, 4]
    assert len({*asked[0], *asked[1]}) == 8


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_a_resumed_study_repeats_no_draw(tmp_path: Path, seed: int) -> None:
    whole = Scripted(smooth)
    run(in_memory(), whole, 14, seed=seed)
    parts = []
    # The first ten are drawn at random, the others by TPE; each run is another process.
    for trials in (5, 10, 14):
        evaluator = Scripted(smooth)
        run(open_study("mine", url(tmp_path), "cosine", MADE), evaluator, trials, seed=seed)
        parts.append(evaluator.asked)
    assert [len(part) for part in parts] == [5, 5, 4]
    assert len({*parts[0], *parts[1], *parts[2]}) == 14
    # Those at random are the same ones; TPE's depend on what it knew by then.
    assert [*parts[0], *parts[1]] == whole.asked[:10]


def test_two_searches_at_once_draw_other_points() -> None:
    study, second = in_memory(), Scripted(smooth)
    calls = iter(range(100))

    def joined(num_block: int, theta: float) -> float:
        # While the first is at its second round, another process comes with the same seed, and stays for one.
        if next(calls) == 4:
            run(study, second, 8)
        return smooth(num_block, theta)

    first = Scripted(joined)
    run(study, first, 12)
    asked = [*first.asked, *second.asked]
    assert (len(first.asked), len(second.asked)) == (8, 4)
    assert len(set(asked)) == len(asked)


def test_two_processes_may_have_a_study_open(tmp_path: Path) -> None:
    first = open_study("mine", url(tmp_path), "cosine", MADE)
    second = open_study("mine", url(tmp_path), "cosine", MADE)
    run(first, Scripted(smooth), 2)
    run(second, Scripted(smooth), 3)
    assert len(finished(first)) == len(finished(second)) == 3


def test_a_study_of_something_else_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    assert open_study("mine", url(tmp_path), "cosine", MADE).user_attrs == {"made_with": MADE}
    now = {**MADE, "window": 64, "prompts": "sha256:bbbb"}
    with pytest.raises(ClusterprofError) as caught:
        open_study("mine", url(tmp_path), "cosine", now)
    assert str(caught.value) == (
        f"The study 'mine' in {url(tmp_path)} was made with window 32, now 64; other prompts, so its trials cannot "
        "be continued; choose another name with --study."
    )
    assert open_study("yours", url(tmp_path), "cosine", now).study_name == "yours"
    assert open_study("mine", url(tmp_path), "cosine", MADE).user_attrs == {"made_with": MADE}


def test_an_objective_of_the_other_direction_is_named(tmp_path: Path) -> None:
    open_study("mine", url(tmp_path), "cosine", {**MADE, "objective": "cosine"})
    with pytest.raises(ClusterprofError, match="made with objective cosine, now kl, so"):
        open_study("mine", url(tmp_path), "kl", {**MADE, "objective": "kl"})


def test_a_copy_of_a_model_is_the_same_and_another_is_named(tmp_path: Path) -> None:
    moved = {**MADE, "model": "/models/tiny", "revision": "not known"}
    assert what_differs(MADE, moved) == []
    open_study("mine", url(tmp_path), "cosine", MADE)
    assert open_study("mine", url(tmp_path), "cosine", moved).study_name == "mine"
    retrained = {**moved, "weights": "sha256:cccc"}
    expected = ["model org/tiny, now /models/tiny", "revision 1234, now not known", "other weights"]
    assert what_differs(MADE, retrained) == expected


def test_a_part_that_only_one_has_differs() -> None:
    now: dict[str, str | int] = {"seed": 0, "prompts": "sha256:aaaa"}
    assert what_differs({}, now) == ["seed none, now 0", "other prompts"]
    assert what_differs({**now, "range_of_n": "[1, 4]"}, now) == ["range of n [1, 4], now none"]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_study_made_by_hand_is_refused_unless_it_fits(
    tmp_path: Path, direction: Literal["minimize", "maximize"]
) -> None:
    study = optuna.create_study(study_name="theirs", storage=url(tmp_path), direction=direction)
    if direction == "maximize":
        assert open_study("theirs", url(tmp_path), "cosine", MADE).user_attrs == {"made_with": MADE}
        study = optuna.create_study(study_name="others", storage=url(tmp_path), direction=direction)
        study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 1.0)
    with pytest.raises(ClusterprofError, match=r"does not say what it was made with .*--study"):
        open_study(study.study_name, url(tmp_path), "cosine", MADE)


def garbage_file(folder: Path) -> str:
    (folder / "studies.db").write_bytes(b"this is no database" * 100)
    return url(folder)


def missing_folder(folder: Path) -> str:
    return url(folder / "missing")


@pytest.mark.parametrize(
    "storage",
    [
        lambda folder: "garbage",
        lambda folder: "",
        lambda folder: "nosuchdb://host/name",
        lambda folder: "postgresql://user@localhost:1/db",
        garbage_file,
        missing_folder,
    ],
    ids=["no-url", "empty", "unknown", "driver", "garbage-file", "missing-folder"],
)
def test_a_storage_that_cannot_be_opened_is_one_sentence(
    tmp_path: Path, storage: Callable[[Path], str]
) -> None:
    with pytest.raises(ClusterprofError, match="cannot be opened") as caught:
        open_study("mine", storage(tmp_path), "cosine", MADE)
    assert "\n" not in str(caught.value)
    assert "--storage" in str(caught.value)


# As prompts are: far apart from each other, and the easy ones first.
SAMPLES = (-0.4, -0.3, -0.1, 0.1, 0.2, 0.5)


def test_a_candidate_is_given_up_once_the_samples_show_that_it_is_behind() -> None:
    study, evaluator = in_memory(), Scripted(smooth, samples=SAMPLES)
    run(study, evaluator, 40)
    whole = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    pruned = [trial for trial in study.trials if trial.state == TrialState.PRUNED]
    assert len(whole) + len(pruned) == len(finished(study)) == 40
    # The least number of samples, all worse, whose probability by chance is 1/8: 1/2 ** 3.
    assert {len(trial.intermediate_values) for trial in pruned} == {3}
    assert {len(trial.intermediate_values) for trial in whole} == {6}
    assert len(evaluator.evaluated) == 6 * len(whole) + 3 * len(pruned)
    assert len(pruned) > 10
    # Every one of them is worse than what was the best by then, and the best is among the whole ones.
    best = max(smooth(*point) for point in evaluator.asked)
    assert study.best_value == pytest.approx(best)
    assert all(smooth(*point) < best for point in points(pruned))


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_a_candidate_that_is_better_on_some_samples_is_evaluated_on_all(objective: ObjectiveName) -> None:
    class Uneven(Scripted):
        def one(self, i: int, compression: Compression) -> Scores:
            scores = super().one(i, compression)
            value = scores.cosine * (1 if i % 2 else -1)
            return Scores(value, 0.2, 0.3, value, 0.4, 0.5, 0.6)

    study = in_memory(objective)
    run(study, Uneven(smooth, samples=SAMPLES), 20, objective=objective)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 20


def test_equal_candidates_are_not_given_up() -> None:
    study = in_memory()
    run(study, Scripted(lambda *point: 0.5, samples=SAMPLES), 12)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 12


def test_a_resumed_search_gives_up_by_the_best_of_the_earlier_run(tmp_path: Path) -> None:
    best = Scripted(lambda num_block, theta: 1.0, samples=SAMPLES)
    run(open_study("mine", url(tmp_path), "cosine", MADE), best, 4)
    study = open_study("mine", url(tmp_path), "cosine", MADE)
    run(study, Scripted(lambda num_block, theta: 0.9, samples=SAMPLES), 8)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4 + ["PRUNED"] * 4


def test_a_round_goes_through_the_samples_together() -> None:
    evaluator = Scripted(smooth, samples=SAMPLES)
    run(in_memory(), evaluator, 4)
    first = [i for i, _ in evaluator.evaluated]
    assert first == sorted(first)


def test_a_second_start_comes_second() -> None:
    start = {"num_block": 20, "theta": 0.05}
    study, evaluator = in_memory(), Scripted(smooth)
    run(study, evaluator, 6, start=start)
    run(study, evaluator, 8, start=start)
    assert approximately_default(evaluator.asked[0])
    assert evaluator.asked[1] == (20, 0.05)
    assert evaluator.asked.count((20, 0.05)) == 1
    assert study.best_params == start


@pytest.mark.parametrize("sampler", ["tpe", "gp", "grid"])
def test_another_start_is_tried_even_if_the_study_has_all_its_trials(sampler: SamplerName) -> None:
    study, evaluator = in_memory(), Scripted(smooth)
    run(study, evaluator, 6, sampler=sampler, start={"num_block": 2, "theta": 0.25})
    best = {"num_block": 20, "theta": 0.05}
    told = run(study, evaluator, 6, sampler=sampler, start=best)
    assert [trial.params for trial in told] == [best]
    assert study.best_params == best
    assert run(study, evaluator, 6, sampler=sampler, start=best) == []


def test_a_start_that_is_the_default_is_one_trial() -> None:
    study = in_memory()
    run(study, Scripted(smooth), 1, start={"num_block": 8, "theta": 2e-3})
    assert points(study.trials) == [DEFAULT]


def test_what_the_result_is_held_against_is_not_given_up() -> None:
    study = in_memory()
    run(study, Scripted(smooth, samples=SAMPLES), 6)
    start = {"num_block": 1, "theta": 1e-4}
    told = run(study, Scripted(lambda num_block, theta: -99.0, samples=SAMPLES), 6, start=start)
    assert [(trial.params, trial.state.name) for trial in told] == [(start, "COMPLETE")]


def test_a_start_that_failed_is_tried_again_by_the_next_run() -> None:
    start = {"num_block": 20, "theta": 0.05}

    def fails(num_block: int, theta: float) -> float:
        if num_block == 20:
            raise CompressionError("it is not finite")
        return smooth(num_block, theta)

    study = in_memory()
    run(study, Scripted(fails), 6, start=start)
    assert len(finished(study)) == 6
    assert [trial.params for trial in run(study, Scripted(smooth), 6, start=start)] == [start]


def test_the_start_is_tried_however_few_trials_there_are() -> None:
    start = {"num_block": 20, "theta": 0.05}
    study = in_memory()
    run(study, Scripted(smooth), 1, start=start)
    assert [trial.params for trial in study.trials] == [{"num_block": 8, "theta": 2e-3}, start]


def test_gp_needs_few_trials_where_values_are_smooth() -> None:
    study, evaluator = in_memory(), Scripted(smooth, samples=SAMPLES)
    run(study, evaluator, 20, sampler="gp")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 20
    run(in_memory(), second := Scripted(smooth, samples=SAMPLES), 20, sampler="gp")
    assert evaluator.asked == second.asked
    assert max(smooth(*point) for point in evaluator.asked) > -0.01


def test_a_grid_is_gone_through_once_in_any_order_after_the_default() -> None:
    study, evaluator = in_memory(), Scripted(smooth)
    run(study, evaluator, 5, sampler="grid")
    run(study, evaluator, 26, sampler="grid")
    run(study, evaluator, 26, sampler="grid")
    assert approximately_default(evaluator.asked[0])
    on_grid = evaluator.asked[1:]
    assert len(on_grid) == len(set(on_grid)) == 25
    blocks, thetas = (sorted({point[axis] for point in on_grid}) for axis in (0, 1))
    assert blocks == [1, 9, 17, 24, 32]
    assert thetas == pytest.approx([1e-4, 8.4e-4, 7.1e-3, 5.95e-2, 0.5], rel=0.01)
