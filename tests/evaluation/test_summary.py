import random
from statistics import fmean

import pytest

from clusterprof.evaluation.groups import comparable
from clusterprof.evaluation.records import Record
from clusterprof.evaluation.summary import Cell, summarise, winner
from clusterprof.statistics import Estimate, mean_estimate, paired_difference
from tests.evaluation.examples import longbench_run, needle_run, record


def scored(values: dict[str, list[float]], *, metric: str = "accuracy", **fields: object) -> list[Record]:
    """A record per method and prompt, with these scores."""
    return [
        record(method=method, prompt=f"p{number}", scores={metric: value}, **fields)
        for method, scores in values.items()
        for number, value in enumerate(scores)
    ]


def test_means_intervals_and_paired_differences() -> None:
    full, snapkv, topk = [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]
    rows = summarise(scored({"snapkv": snapkv, "topk": topk, "full": full}), "accuracy")
    assert [row.cell for row in rows] == [Cell("full", None), Cell("snapkv", 128), Cell("topk", 128)]
    assert [row.mean for row in rows] == [mean_estimate(values) for values in (full, snapkv, topk)]
    assert rows[0].differences == {}
    assert rows[1].differences == {"full": paired_difference(snapkv, full)}
    assert rows[2].differences == {
        "full": paired_difference(topk, full),
        "snapkv": paired_difference(topk, snapkv),
    }


def test_differences_are_over_the_prompts_that_both_have() -> None:
    records = scored({"full": [1.0, 0.0, 0.0, 1.0], "topk": [0.0, 0.0, 1.0]})
    # The same prompt id in another dataset is another prompt.
    records += scored({"topk": [1.0, 1.0]}, dataset="elsewhere")
    topk = summarise(records, "accuracy")[1]
    assert topk.mean.samples == 5
    assert topk.differences == {"full": paired_difference([0.0, 0.0, 1.0], [1.0, 0.0, 0.0])}


def test_differences_are_at_the_same_size_and_labels() -> None:
    records = [
        record(
            method=method,
            size=size,
            prompt=f"{tokens}",
            labels={"tokens": tokens},
            scores={"accuracy": 0.1 * number},
        )
        for number, (method, size, tokens) in enumerate(
            [("snapkv", 128, 1), ("snapkv", 256, 1), ("snapkv", 256, 2), ("topk", 256, 1), ("topk", 512, 1)]
        )
    ]
    rows = {row.cell: row for row in summarise(records, "accuracy", ("tokens",))}
    assert list(rows) == [
        Cell("snapkv", 128, (1,)),
        Cell("snapkv", 256, (1,)),
        Cell("topk", 256, (1,)),
        Cell("topk", 512, (1,)),
        Cell("snapkv", 256, (2,)),
    ]
    assert rows[Cell("topk", 256, (1,))].differences["snapkv"].mean == pytest.approx(0.2)
    assert rows[Cell("topk", 512, (1,))].differences == {}


def test_a_prompt_that_fits_is_the_same_prompt() -> None:
    fits = record(labels={"tokens": 1000, "depth": 0.5, "fits": 1}, prompt="p0")
    rows = summarise([record(method="full", prompt="p0"), fits], "accuracy")
    assert rows[1].differences["full"].samples == 1


def test_a_prompt_that_was_cut_is_the_same_prompt() -> None:
    # What was measured by an older release has no such label.
    cut = record(labels={"tokens": 1000, "depth": 0.5, "cut": 9}, prompt="p0")
    rows = summarise([record(method="full", prompt="p0"), cut], "accuracy")
    assert rows[1].differences["full"].samples == 1


def test_the_order_of_records_changes_nothing() -> None:
    records = list(needle_run(("snapkv", "topk"), repeats=2))
    shuffled = random.Random(0).sample(records, len(records))
    assert summarise(shuffled, "accuracy", ("tokens",)) == summarise(records, "accuracy", ("tokens",))


def test_tasks_count_the_same_however_many_prompts_they_have() -> None:
    tasks = {"a": [0.0, 10.0, 20.0], "b": [100.0] * 9}
    records = [
        record(method=method, dataset=task, prompt=f"{number}", labels={"task": task}, scores={"score": value + extra})
        for method, extra in (("full", 0.0), ("snapkv", -5.0))
        for task, values in tasks.items()
        for number, value in enumerate(values)
    ]  # fmt: skip
    full, snapkv = summarise(records, "score", over="task")
    assert full.mean.mean == pytest.approx(55)
    assert full.mean.samples == 12
    # Only the first task varies, and with half the weight: its own interval, halved, around 50.
    alone = mean_estimate(tasks["a"])
    assert full.mean.low == pytest.approx(50 + alone.low / 2, abs=0.4)  # type: ignore[operator]
    assert full.mean.high == pytest.approx(50 + alone.high / 2, abs=0.4)  # type: ignore[operator]
    difference = snapkv.differences["full"]
    assert (difference.mean, difference.low, difference.high) == pytest.approx((-5, -5, -5))
    assert difference.samples == 12


def test_the_interval_over_tasks_is_as_wide_as_theory_says() -> None:
    rng = random.Random(1)
    groups = {task: [rng.gauss(50, 10) for _ in range(200)] for task in "abcd"}
    records = [
        record(dataset=task, prompt=f"{number}", labels={"task": task}, scores={"score": value})
        for task, values in groups.items()
        for number, value in enumerate(values)
    ]
    (row,) = summarise(records, "score", over="task")
    assert row.mean.mean == pytest.approx(fmean(fmean(values) for values in groups.values()))
    # The mean of 4 means of 200 normal values with deviation 10.
    error = 1.96 * 10 / (4 * 200) ** 0.5
    assert row.mean.high == pytest.approx(row.mean.mean + error, rel=0.02)
    assert row.mean.low == pytest.approx(row.mean.mean - error, rel=0.02)


def test_too_few_prompts_in_a_task_leave_no_interval() -> None:
    records = [
        record(dataset=task, prompt=f"{number}", labels={"task": task}, scores={"score": 1.0 * number})
        for task, count in (("a", 9), ("b", 2))
        for number in range(count)
    ]
    (row,) = summarise(records, "score", over="task")
    assert row.mean == Estimate(2.25, None, None, 11)


def test_groups_of_one_task_are_that_task() -> None:
    records = list(longbench_run(("snapkv",), sizes=(256,)))
    by_group = summarise(records, "score", ("group",), over="task")
    by_task = summarise(records, "score", ("task",))
    assert [row.mean for row in by_group] == [row.mean for row in by_task]


def test_records_without_the_score_are_left_out() -> None:
    (row,) = summarise([record(), record(prompt="b", scores={"rouge1": 0.5})], "accuracy")
    assert row.mean.samples == 1
    assert summarise([record()], "no such score") == []


@pytest.mark.parametrize(("lower", "expected"), [(False, "topk"), (True, "h2o")])
def test_a_winner_is_ahead_of_everybody(lower: bool, expected: str) -> None:
    few = {"topk": [0.9, 0.8, 0.95, 0.9], "snapkv": [0.5, 0.6, 0.5, 0.55], "h2o": [0.1, 0.2, 0.15, 0.1]}
    values = {method: scores * 2 for method, scores in few.items()}
    assert winner(scored(few), "accuracy", 128, lower=lower) is None
    assert winner(scored(values), "accuracy", 128, lower=lower) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"topk": [0.9, 0.2, 0.9, 0.2], "snapkv": [0.5, 0.5, 0.5, 0.5]},
        {"topk": [0.9, 0.9], "snapkv": [0.1, 0.1]},
        {"topk": [0.9, 0.9, 0.9]},
        {"topk": [1.0, 1.0, 1.0], "snapkv": [1.0, 1.0, 1.0]},
    ],
    ids=["undecided", "too few", "alone", "equal"],
)
def test_otherwise_nobody_wins(values: dict[str, list[float]]) -> None:
    assert winner(scored(values), "accuracy", 128, lower=False) is None


def test_who_has_no_prompt_in_common_with_another_has_not_won() -> None:
    records = scored({"topk": [0.9] * 3}) + scored({"snapkv": [0.1] * 3}, dataset="elsewhere")
    assert winner(records, "accuracy", 128, lower=False) is None


def test_the_full_cache_takes_no_part_in_winning() -> None:
    values = {"full": [1.0] * 6, "topk": [0.9, 0.8, 0.9] * 2, "snapkv": [0.1] * 6}
    assert winner(scored(values), "accuracy", 128, lower=False) == "topk"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.1, 0.2), True),
        ((-0.2, -0.1), True),
        ((-0.1, 0.1), False),
        ((0.0, 0.1), False),
        ((None, None), False),
    ],
)
def test_an_interval_excludes_zero(ends: tuple[float | None, float | None], expected: bool) -> None:
    assert Estimate(0.0, *ends, 6).excludes_zero is expected
    assert not Estimate(0.0, *ends, 5).excludes_zero


def test_summaries_of_groups_with_profiles_have_them_as_references() -> None:
    records = scored({"snapkv": [0.1] * 3, "topk": [0.5] * 3}) + scored({"snapkv (needle-128)": [0.4] * 3})
    (group,) = comparable(records)
    rows = {row.cell.method: row for row in summarise(group.records, "accuracy")}
    assert list(rows["topk"].differences) == ["snapkv", "snapkv (needle)"]
    assert rows["snapkv (needle)"].differences["snapkv"].mean == pytest.approx(0.3)
