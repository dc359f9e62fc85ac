from collections.abc import Mapping

import pytest

from clusterprof.errors import DataError
from clusterprof.evaluation.groups import (
    Setting,
    comparable,
    label_of,
    methods_in,
    ordered,
    prompt_key,
    references,
    settings_of,
)
from clusterprof.evaluation.records import Record
from tests.evaluation.examples import ENVIRONMENT, record


def test_benchmarks_and_environments_are_apart_in_the_order_in_which_they_come() -> None:
    elsewhere = {**ENVIRONMENT, "model": "tiny/mistral"}
    newer = {**ENVIRONMENT, "torch": "2.14.0"}
    records = [
        record(bench="lines"),
        record(),
        record(environment=elsewhere),
        record(method="full"),
        record(environment=newer),
    ]
    groups = comparable(records)
    assert [(it.bench, it.environment["model"], it.environment["torch"]) for it in groups] == [
        ("lines", "tiny/llama", "2.13.0"),
        ("needle", "tiny/llama", "2.13.0"),
        ("needle", "tiny/mistral", "2.13.0"),
        ("needle", "tiny/llama", "2.14.0"),
    ]
    assert [it.method for it in groups[1].records] == ["snapkv", "full"]


def test_a_run_that_was_continued_on_another_day_is_one() -> None:
    days = [{**ENVIRONMENT, "created": day} for day in ("2026-01-02", "2026-01-03")]
    (group,) = comparable(record(prompt=day["created"], environment=day) for day in days)
    assert len(group.records) == 2


def test_the_same_record_in_two_files_counts_once() -> None:
    (group,) = comparable([record(), record(), record(method="full")])
    assert len(group.records) == 2


def test_two_results_of_a_method_for_a_prompt_are_refused_in_one_sentence() -> None:
    records = [record(scores={"accuracy": right}) for right in (0.0, 1.0)]
    with pytest.raises(
        DataError, match=r"two different needle results of snapkv at size 128 for the prompt needle-0"
    ):
        comparable(records)
    with pytest.raises(DataError, match="results of full for the prompt"):
        comparable([record(method="full", scores={"accuracy": right}) for right in (0.0, 1.0)])


def test_an_ablation_has_many_results_of_a_method_for_a_prompt() -> None:
    def point(text: str = "", **labels: float) -> Record:
        labels = {"tokens": 1000, **labels}
        return record(bench="ablation", method="clusterattn", labels=labels, text=text)

    (group,) = comparable([point(theta=0.1), point(theta=0.2), point(theta=0.1, num_block=2)])
    assert len(group.records) == 3
    with pytest.raises(DataError, match="two different ablation results of clusterattn"):
        comparable([point(theta=0.1), point("again", theta=0.1)])


def test_windows_become_methods_of_their_own() -> None:
    records = [
        record(window=32),
        record(window=64),
        record(window="query", prompt="b"),
        record(method="topk"),
    ]
    (group,) = comparable(records)
    assert [it.method for it in group.records] == [
        "snapkv, window 32",
        "snapkv, window 64",
        "snapkv, window query",
        "topk",
    ]


@pytest.mark.parametrize(
    ("method", "size", "name"),
    [
        ("snapkv (needle-128)", 128, "snapkv (needle)"),
        ("snapkv (needle-128-snapkv)", 128, "snapkv (needle)"),
        ("snapkv (needle-128)", 256, "snapkv (needle-128)"),
        ("snapkv (needle-1280)", 128, "snapkv (needle-1280)"),
        ("snapkv (a-128-b)", 128, "snapkv (a-128-b)"),
    ],
)
def test_profiles_that_differ_in_their_sizes_are_one_method(method: str, size: int, name: str) -> None:
    (group,) = comparable([record(method=method, size=size)])
    assert group.records[0].method == name


def test_methods_are_listed_as_the_package_lists_them_and_profiles_behind_their_papers_values() -> None:
    names = ("topk", "snapkv (needle)", "snapkv", "full", "h2o+decode", "clusterattn", "h2o")
    records = [record(method=name) for name in names]
    unknown = record(method="mine", parameters={"name": "mine"})
    assert methods_in([unknown, *records]) == [
        "full", "clusterattn", "snapkv", "snapkv (needle)", "topk", "h2o", "h2o+decode", "mine",
    ]  # fmt: skip
    assert references(records) == ["full", "snapkv", "snapkv (needle)"]


def test_labels_come_from_where_they_are() -> None:
    it = record(labels={"depth": 0.25}, parameters={"name": "clusterattn", "theta": 0.5, "num_block": 2})
    assert [label_of(it, name) for name in ("depth", "tokens", "dataset", "theta", "num_block", "n", "task")] == [
        0.25, 1000, "needle", 0.5, 2, "", "",
    ]  # fmt: skip
    assert label_of(record(labels={"tokens": 900, "theta": 0.1}), "tokens") == 900


def test_values_are_in_order_and_once() -> None:
    assert ordered([2, 0.5, 2, "b", "a", "b", 1]) == [0.5, 1, 2, "b", "a"]


def test_other_settings_and_other_weights_are_groups_of_their_own() -> None:
    short, long = ({"settings": {"decode_tokens": steps}} for steps in (4, 64))
    records = [record(bench="fit", key="1" * 64, **short), record(bench="fit", key="2" * 64, **long)]
    assert [len(group.records) for group in comparable(records)] == [1, 1]
    weights = [{**record().environment, "fingerprint": name} for name in "ab"]
    records = [record(key=f"{n}" * 64, environment=each) for n, each in enumerate(weights)]
    assert [len(group.records) for group in comparable(records)] == [1, 1]


def test_only_the_same_question_is_the_same_prompt() -> None:
    same, other = record(asked="a" * 64), record(asked="b" * 64)
    assert prompt_key(same) == prompt_key(record(asked="a" * 64, method="topk"))
    assert prompt_key(same) != prompt_key(other)


def test_two_profiles_of_one_size_keep_their_names() -> None:
    named = [("snapkv (needle-64)", "1"), ("snapkv (needle-64-snapkv)", "2")]
    records = [
        record(method=method, size=64, key=key * 64, parameters={"name": "snapkv"}) for method, key in named
    ]
    (group,) = comparable(records)
    assert [it.method for it in group.records] == [method for method, _ in named]


def tuned(*parameters: Mapping[str, object], **fields: object) -> list[Record]:
    """A result of one profile for each of these parameters of SnapKV."""
    fields = {"method": "snapkv (needle-128)", **fields}
    return [record(parameters={"name": "snapkv", **it}, **fields) for it in parameters]


def test_a_profile_that_was_tuned_again_is_another_method() -> None:
    both = [{"kernel_size": size, "pooling": "avg"} for size in (5, 7)]
    (group,) = comparable([*tuned(*both), *tuned(both[0], size=256, method="snapkv (needle-256)")])
    # At the other size there is nothing to be told apart.
    assert [it.method for it in group.records] == [
        "snapkv (needle), kernel_size 5",
        "snapkv (needle), kernel_size 7",
        "snapkv (needle)",
    ]


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ([{"theta": 0.002}, {"theta": 0.003}], ["theta 0.002", "theta 0.003"]),
        ([{"theta": 0.002}, {"theta": 0.0020001}], ["theta 0.002", "theta 0.0020001"]),
        ([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "y"}], ["a 1, b x", "a 1, b y", "a 2, b y"]),
        ([{}, {"gap_pool": 15}], ["", "gap_pool 15"]),
        ([{"x": 0.1, "n": 1}, {"x": 0.1, "n": 2}], ["n 1", "n 2"]),
        ([{"flag": True}, {"flag": False}], ["flag True", "flag False"]),
    ],
)
def test_as_much_is_said_as_tells_parameters_apart(
    parameters: list[Mapping[str, object]], names: list[str]
) -> None:
    (group,) = comparable(tuned(*parameters, method="snapkv"))
    assert [it.method for it in group.records] == [", ".join(filter(None, ("snapkv", it))) for it in names]


def test_a_methods_values_may_differ_from_size_to_size() -> None:
    records = [record(method="clusterattn", size=size) for size in (1024, 4096)]
    assert records[0].parameters != records[1].parameters
    (group,) = comparable(records)
    assert {it.method for it in group.records} == {"clusterattn"}


def test_what_an_ablation_does_not_vary_tells_its_points_apart() -> None:
    def point(theta: float, gap_pool: int, prompt: str) -> Record:
        parameters = {"name": "clusterattn", "num_block": 8, "theta": theta, "gap_pool": gap_pool}
        return record(bench="ablation", method="clusterattn", labels={}, parameters=parameters, prompt=prompt)

    (group,) = comparable([point(0.1, 1, "a"), point(0.2, 1, "a"), point(0.1, 15, "b")])
    assert [it.method for it in group.records] == [
        "clusterattn, gap_pool 1",
        "clusterattn, gap_pool 1",
        "clusterattn, gap_pool 15",
    ]


def test_settings_are_what_each_method_was_run_with() -> None:
    records = [record(method="clusterattn", size=size) for size in (1024, 512, 4096)]
    full, few, many = settings_of([*records, record(method="full")])
    assert full == Setting("full", (), {"name": "full"}, None, "nothing is evicted")
    assert (few.sizes, few.parameters) == ((512, 1024), records[0].parameters)
    assert (many.sizes, many.parameters) == ((4096,), records[2].parameters)
