"""What held-out prompts show of a goal, against what binomial probabilities say by themselves."""

from dataclasses import asdict
from math import comb, inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.errors import ClusterprofError, DataError
from clusterprof.profiling import collect, tune
from clusterprof.profiling.capture import capture_prompt
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores
from clusterprof.profiling.target import RANGES, Target, TargetResult, smallest_met
from clusterprof.profiling.tune import TuneResult
from tests.profiling.test_query_window import questions
from tests.profiling.test_tune import Listener, Loaded, dataset, loaded, run_sizes

__all__ = ["loaded"]


def scores(values: list[float], objective: ObjectiveName = "agreement") -> list[Scores]:
    names = ("cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl")
    return [Scores(**{**dict.fromkeys(names, 0.5), objective: value}) for value in values]


def chance(prompts: int, meeting: int, share: float) -> float:
    """That so many or more meet a goal which exactly this share of all meets."""
    counts = range(meeting, prompts + 1)
    return sum(comb(prompts, k) * share**k * (1 - share) ** (prompts - k) for k in counts)


@pytest.mark.parametrize(
    ("prompts", "meeting", "met"),
    [
        # 0.8 ** 14 = 0.044 and 0.8 ** 13 = 0.055
        (14, 14, True),
        (13, 13, False),
        (14, 13, False),
        # 0.8 ** 22 + 22 * 0.8 ** 21 * 0.2 = 0.048; of 21 it is 0.058.
        (22, 21, True),
        (21, 20, False),
        (22, 20, False),
        (100, 87, True),
        (100, 86, False),
    ],
)
def test_what_is_met_is_unlikely_if_fewer_of_all_prompts_met_it(
    prompts: int, meeting: int, met: bool
) -> None:
    assert (chance(prompts, meeting, 0.8) <= 0.05) is met
    result = Target("agreement", 0.95).check(scores([0.96] * meeting + [0.9] * (prompts - meeting)))
    assert (result.prompts, result.meeting, result.met) == (prompts, meeting, met)
    # At its lower bound as many would meet the goal with a chance of just 5 %.
    assert chance(prompts, meeting, result.lower_bound) == pytest.approx(0.05)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_so_many_prompts_are_needed(share: float) -> None:
    target = Target("agreement", 0.95, share)
    needed = target.prompts_needed
    assert share**needed <= 0.05 + 1e-12
    assert needed == 1 or share ** (needed - 1) > 0.05
    assert target.check(scores([1.0] * needed)).met
    assert not target.check(scores([1.0] * (needed - 1))).met


def test_the_default_needs_fourteen() -> None:
    assert Target("agreement", 0.95).prompts_needed == 14


@pytest.mark.parametrize("objective", list(DIRECTIONS))
@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_what_is_reached_is_the_hardest_goal_that_would_be_met(
    objective: ObjectiveName, share: float
) -> None:
    values = [float(value) for value in np.random.default_rng(3).uniform(0, 1, 40)]
    met = [value for value in values if Target(objective, value, share).check(scores(values, objective)).met]
    hardest = min(met) if DIRECTIONS[objective] == "minimize" else max(met)
    assert Target(objective, 0.5, share).check(scores(values, objective)).reached == pytest.approx(hardest)


def test_too_few_prompts_reach_nothing() -> None:
    target = Target("agreement", 0.95)
    assert target.check(scores([1.0] * 13)).reached is None
    assert target.check([]) == TargetResult(0, 0, 0.0, None, met=False)


@pytest.mark.parametrize(
    ("objective", "value", "meeting", "failing"),
    [
        ("agreement", 0.95, 0.95, 0.9499),
        # As torch has the mean of 19 ones and a zero.
        ("agreement", 0.95, float(np.float32(0.95)), 0.94),
        ("cosine", 0.99, 0.995, 0.985),
        ("kl", 0.05, 0.05, 0.0501),
        ("loss", 1.0, 0.2, 1.1),
    ],
)
def test_a_prompt_meets_a_goal(
    objective: ObjectiveName, value: float, meeting: float, failing: float
) -> None:
    target = Target(objective, value)
    assert target.met_by(meeting)
    assert not target.met_by(failing)


@pytest.mark.parametrize("true_share", [0.7, 0.8])
def test_a_goal_that_is_not_met_is_seldom_said_to_be(true_share: float) -> None:
    rng = np.random.default_rng(0)
    target = Target("kl", 0.05)
    # Of whatever shape: here exponential, with the goal at the true share's quantile.
    scale = -0.05 / np.log(1 - true_share)
    wrong = sum(target.check(scores(rng.exponential(scale, 30).tolist(), "kl")).met for _ in range(400))
    # The most that a binomial count of 400 with 5 % each exceeds once in a thousand.
    assert wrong <= 34
    # And at the border it is not never: 30 prompts are met by 28 or more with a chance of 4.4 %.
    assert (wrong > 5) is (true_share == 0.8)


@pytest.mark.parametrize(
    ("objective", "value", "allowed"),
    [
        ("agreement", 1.1, "in the range 0<=x<=1"),
        ("cosine", -1.5, "in the range -1<=x<=1"),
        ("kl", -0.1, "at least 0"),
        ("loss", inf, "at least 0"),
        ("kl", nan, "at least 0"),
    ],
)
def test_a_value_out_of_its_range(objective: ObjectiveName, value: float, allowed: str) -> None:
    with pytest.raises(ClusterprofError, match=rf"for {objective} cannot be; it must be {allowed}\.$"):
        Target(objective, value)


@pytest.mark.parametrize("share", [0, 1, -0.2, 1.5, nan, 1e-300, 1 - 1e-16])
def test_a_share_out_of_its_range(share: float) -> None:
    with pytest.raises(ClusterprofError, match=r"must be in the range 0\.01<=x<=0\.9999"):
        Target("kl", 0.1, share)


def test_every_objective_can_be_a_goal_and_nothing_else() -> None:
    assert RANGES.keys() == DIRECTIONS.keys()
    wrong: Any = "accuracy"
    with pytest.raises(ClusterprofError, match="'accuracy'; choose one of cosine, "):
        Target(wrong, 0.5)


def test_the_smallest_size_that_meets_the_goal() -> None:
    met, failed = TargetResult(14, 14, 0.81, 1.0, met=True), TargetResult(14, 2, 0.03, 0.1, met=False)
    assert smallest_met({512: met, 256: met, 128: failed}) == 256
    assert smallest_met({512: failed}) is None


EASY, HARD = Target("kl", 1000, share=0.5), Target("cosine", 1, share=0.5)
ROWS = dataset(range(60, 72))
OPTIONS: dict[str, Any] = {"data": ROWS, "samples": 4, "holdout": 6, "trials": 2, "sizes": (40, 50, 45)}


def sizes_of(results: list[TuneResult]) -> list[int]:
    return [result.profile.compression.size for result in results]


def test_a_goal_that_every_size_meets_is_tested_from_the_largest_down(loaded: Loaded, tmp_path: Path) -> None:
    listener = Listener()
    results = run_sizes(loaded, tmp_path, listener=listener, target=EASY, **OPTIONS)
    assert sizes_of(results) == [50, 45, 40]
    assert [event[1] for event in listener.events if event[0] == "searching"] == [50, 50, 45, 45, 40, 40]
    for result in results:
        assert result.target == EASY.check(result.judgement.tuned)
        assert result.target.met
        assert result.target.prompts == 6
    without = run_sizes(loaded, tmp_path / "without", **OPTIONS)
    assert sizes_of(without) == [40, 45, 50]
    assert {result.target for result in without} == {None}
    # A goal changes nothing in what is found.
    assert [it.judgement for it in without] == [it.judgement for it in results[::-1]]


def test_nothing_below_a_size_that_fails_is_tuned(loaded: Loaded, tmp_path: Path) -> None:
    listener = Listener()
    [result] = run_sizes(loaded, tmp_path, listener=listener, target=HARD, **OPTIONS)
    assert result.profile.compression.size == 50
    assert result.target is not None
    assert (result.target.met, result.target.prompts) == (False, 6)
    assert {event[1] for event in listener.events if event[0] == "searching"} == {50}


def test_the_search_stops_between_sizes(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three sizes fails."""
    found = run_sizes(loaded, tmp_path, target=EASY, **OPTIONS)
    means = [result.judgement.methods[0].scores.cosine_padded for result in found]
    assert means == sorted(means, reverse=True)
    reached = [Target("cosine_padded", 0, 0.5).check(it.judgement.tuned).reached for it in found[:2]]
    assert None not in reached
    between = Target("cosine_padded", sum(filter(None, reached)) / 2, 0.5)
    assert sizes_of(run_sizes(loaded, tmp_path, target=between, **OPTIONS)) == [50, 45]


@pytest.fixture
def nothing_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it was captured")

    monkeypatch.setattr(tune, "capture_all", fail)


@pytest.mark.usefixtures("nothing_captured")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"data": dataset(range(60, 90)), "holdout": 0},
            "takes at least 14 held-out prompts to show at --size 50, and 0 can be used there; "
            "raise --holdout from 0 to 14.",
        ),
        *(
            (
                {"data": dataset(range(60, 72)), "holdout": holdout},
                "texts has 8 rows besides the 4 that are tuned on: give more data, tune on fewer rows (--samples), or "
                "lower --target-share.",
            )
            for holdout in (None, 14)
        ),
        # Rows of up to 50 tokens are no prompts at that size.
        ({"data": dataset(range(45, 95)), "holdout": 14, "seed": 2}, "or more."),
    ],
)
def test_too_few_prompts_are_refused_before_they_are_captured(
    loaded: Loaded, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    target = Target("agreement", 0.95)
    with pytest.raises(
        DataError, match=r"^That 80 % of prompts meet --target agreement=0\.95 takes"
    ) as error:
        run_sizes(loaded, tmp_path, **{**OPTIONS, **options, "target": target})
    assert str(error.value).endswith(told)


@pytest.mark.usefixtures("nothing_captured")
def test_prompts_that_choose_values_per_layer_show_no_goal(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^--per-layer decides by the held-out prompts.* give one of the two\.$"
    ):
        run_sizes(loaded, tmp_path, target=EASY, per_layer=True, **OPTIONS)


@pytest.mark.usefixtures("nothing_captured")
def test_a_prompt_whose_question_takes_all_of_a_size_does_not_count(loaded: Loaded, tmp_path: Path) -> None:
    data = questions(7, 8, 9, 45, 46, 47, context=60)
    options: dict[str, Any] = {
        "data": data,
        "sizes": (40, 50),
        "window": "query",
        "samples": 1,
        "holdout": 5,
        "trials": 1,
    }
    with pytest.raises(DataError, match="at least 5 held-out prompts to show at --size 40, and"):
        run_sizes(loaded, tmp_path, target=Target("kl", 1, share=0.5), **options)


def test_prompts_that_drop_out_leave_too_few(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six held-out prompts cannot be captured, and five are needed."""
    held_out = run_sizes(loaded, tmp_path, **{**OPTIONS, "sizes": (50,)})[0].profile.dataset.held_out_ids
    unlucky = {int(name.removeprefix("row-")) for name in held_out[:2]}

    def failing(model: Any, input_ids: Any, **options: Any) -> Any:
        if input_ids.shape[1] in unlucky:
            raise MemoryError("too little")
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", failing)
    [result] = run_sizes(loaded, tmp_path / "again", target=EASY, **OPTIONS)
    assert result.target is not None
    assert asdict(result.target) == {
        "prompts": 4, "meeting": 4, "lower_bound": pytest.approx(0.05**0.25), "reached": None, "met": False,
    }  # fmt: skip


def test_the_prompts_tuned_on_show_nothing(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that were held out drop out, so the judgement is on the others."""
    tuned = run_sizes(loaded, tmp_path, **{**OPTIONS, "sizes": (50,)})[0].profile.dataset.sampled_ids

    def failing(model: Any, input_ids: Any, **options: Any) -> Any:
        if f"row-{input_ids.shape[1]}" not in tuned:
            raise MemoryError("too little")
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", failing)
    [result] = run_sizes(loaded, tmp_path / "again", target=EASY, **OPTIONS)
    assert not result.judgement.held_out
    assert len(result.judgement.tuned) == 4
    assert result.target == TargetResult(0, 0, 0.0, None, met=False)
