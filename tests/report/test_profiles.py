import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clusterprof.methods import H2O, ClusterAttn, Full, MethodConfig, NGram, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Baseline, Compression, Difference, LayerOverride, Metrics, Profile, Score
from clusterprof.report.profiles import profile_lines, profile_summary
from tests.profile.examples import profile

METRICS = Metrics(
    cosine=0.9, cosine_padded=0.8, attention_output=0.85, kl=0.1, agreement=0.7, loss=1.5, log_kl=-2.0
)


def carrying(method: MethodConfig, space: dict[str, Any]) -> Profile:
    base = profile()
    compression = Compression(size=256, window=32, method=method)
    search = base.search.model_copy(update={"space": space})
    return base.model_copy(update={"compression": compression, "search": search})


def printed(renderable: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(renderable: Any) -> str:
    """What is printed, in one line without lines of the table."""
    return " ".join(printed(renderable, 200).split())


def with_results(**changes: Any) -> Profile:
    base = profile()
    return base.model_copy(update={"results": base.results.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("method", "space", "shown", "searched"),
    [
        (
            ClusterAttn(num_block=4, theta=0.003),
            {"num_block": (1, 32), "theta": (1e-5, 0.02)},
            "clusterattn: num_block 4, theta 0.003, gap_pool 15, gap_pooling avg, importance mean",
            "num_block 1 to 32, theta 1e-05 to 0.02; 30 trials",
        ),
        (
            SnapKV(kernel_size=15, pooling="max"),
            {"kernel_size": (1, 63), "pooling": ("avg", "max")},
            "snapkv: kernel_size 15, pooling max, importance mean",
            "kernel_size 1 to 63, pooling avg or max; 30 trials",
        ),
        (
            StreamingLLM(),
            {"initial_tokens": (0, 64)},
            "streaming_llm: initial_tokens 4",
            "initial_tokens 0 to 64",
        ),
        (H2O(recent_share=0.25), {"recent_share": (0.1, 0.9)}, "h2o: recent_share 0.25", "recent_share 0.1"),
        (NGram(n=3), {"n": (1, 4)}, "ngram: n 3", "n 1 to 4"),
        (TopK(), {}, "topk", "no parameters; 30 trials"),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_any_methods_profile_is_shown(
    method: MethodConfig, space: dict[str, Any], shown: str, searched: str
) -> None:
    made = carrying(method, space)
    summary, (_, _, line) = rendered(profile_summary(made)), profile_lines(Path("p.json"), made)
    assert f"method {shown} tuning" in summary
    assert f"search {searched}" in summary
    assert line.startswith(f"  {shown}; cosine 0.9800 on 2 tuning samples; ")


def test_the_tuned_method_and_its_baselines_are_shown_with_their_parameters() -> None:
    baselines = [Baseline(method=method, metrics=METRICS) for method in (SnapKV(), TopK(), H2O(), Full())]
    shown = rendered(profile_summary(with_results(baselines=tuple(baselines))))
    for row in (
        "tuned │ 0.9800 │ 0.1250 │ 0.8750 │ 0.6250 │ │",
        "snapkv: kernel_size 5, pooling avg, importance mean │ 0.9000",
        "topk │ 0.9000",
        "h2o: recent_share 0.5 │",
        "full │ 0.9000 │ 0.1000 │ 0.7000 │ 1.5000 │ │",
    ):
        assert row in shown


def test_the_held_out_score_stands_beside_the_tuning_one() -> None:
    shown = rendered(profile_summary(profile()))
    assert (
        "2 of 10 rows and 1 held out, seed 0; of those to tune on 0 cut to the model's context, 1 set aside, "
        "not longer than the size"
    ) in shown
    assert "tuning cosine 0.9800 on 2 samples (95 % interval 0.9700 to 0.9900) held out nothing" in shown
    assert "On the 2 tuning samples, too few to show a difference:" in shown
    score = Score(objective="cosine", value=0.975, interval_95=(0.96, 0.98), samples=7)
    shown = rendered(profile_summary(with_results(held_out=score)))
    assert "held out cosine 0.9750 on 7 samples (95 % interval 0.9600 to 0.9800)" in shown
    assert "On the 7 held-out samples:" in shown
    one = rendered(profile_summary(with_results(held_out=Score(objective="cosine", value=0.975, samples=1))))
    assert "held out cosine 0.9750 on 1 sample search" in one
    assert "On the 1 held-out sample, too few to show a difference:" in one


def test_a_list_shows_the_held_out_value_where_there_is_one() -> None:
    held_out = with_results(held_out=Score(objective="cosine", value=0.975, samples=7))
    assert "cosine 0.9800 on 2 tuning samples" in profile_lines(Path("seen.json"), profile())[2]
    assert "cosine 0.9750 on 7 held-out samples" in profile_lines(Path("unseen.json"), held_out)[2]


def test_each_baseline_has_its_difference_in_80_columns() -> None:
    long = ClusterAttn(num_block=32, theta=0.00123, gap_pool=63, importance="mean")
    sure = Difference(value=0.0123, interval_95=(0.0045, 0.0201))
    unsure = Difference(value=-0.0123)
    baselines = [
        Baseline(method=long, metrics=METRICS, difference=sure),
        Baseline(method=SnapKV(), metrics=METRICS, difference=unsure),
        Baseline(method=Full(), metrics=METRICS),
    ]
    lines = printed(profile_summary(with_results(baselines=tuple(baselines))), 80).splitlines()
    assert max(map(len, lines)) <= 80
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert "…" not in "".join(lines)
    first, second = (i for i, cells in enumerate(table) if cells[0] in ("clusterattn:", "snapkv:"))
    assert [cells[-1] for cells in table[first : first + 2]] == ["+0.0123", "+0.0045 to +0.0201"]
    assert [cells[-1] for cells in table[second : second + 2]] == ["-0.0123", ""]
    assert table[-1] == ["full", "0.9000", "0.1000", "0.7000", "1.5000", ""]
    words = " ".join(cells[0] for cells in table[first:second])
    assert words == "clusterattn: num_block 32, theta 0.00123, gap_pool 63, gap_pooling avg, importance mean"


def test_what_keeps_the_same_tokens_is_told() -> None:
    metrics = profile().results.metrics
    none = Difference(value=0.0, interval_95=(0.0, 0.0))
    baselines = [
        Baseline(method=SnapKV(), metrics=metrics, difference=none),
        # Equal on average only, or by chance.
        Baseline(method=TopK(), metrics=metrics, difference=Difference(value=0.0, interval_95=(-0.1, 0.1))),
        Baseline(method=H2O(), metrics=METRICS, difference=none),
    ]
    told = "On these samples it keeps the same tokens as snapkv: kernel_size 5, pooling avg, importance mean."
    assert told in rendered(profile_summary(with_results(baselines=tuple(baselines))))
    assert "same tokens" not in rendered(profile_summary(with_results(baselines=tuple(baselines[1:]))))


def test_what_was_left_out_is_told() -> None:
    assert "left out needle-7 (out of memory)" in rendered(profile_summary(profile()))


def test_values_per_layer_are_shown_of_the_profile_and_of_what_it_beat() -> None:
    method = ClusterAttn(num_block=4, theta=0.003)
    base = carrying(method, {"theta": (1e-5, 0.02)})
    override = LayerOverride(layers=(2, 3), method=ClusterAttn(num_block=4, theta=0.25))
    compression = base.compression.model_copy(update={"overrides": (override,)})
    baseline = Baseline(method=method, overrides=(override,), metrics=METRICS)
    results = base.results.model_copy(update={"baselines": (baseline,)})
    found = base.model_copy(update={"compression": compression, "results": results})
    values = "num_block 4, theta 0.003, gap_pool 15, gap_pooling avg, importance mean"
    shown = f"clusterattn: {values}; layers 2 to 3: theta 0.25"
    assert rendered(profile_summary(found)).count(shown) == 2
    assert "layers 2 to 3: theta 0.25" in profile_lines(Path("p.json"), found)[2]
