import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clusterprof.methods import H2O, ClusterAttn, Full, MethodConfig, NGram, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Baseline, Compression, Metrics, Profile
from clusterprof.report.profiles import profile_summary, profiles_table
from tests.profile.examples import profile

METRICS = Metrics(cosine=0.9, cosine_padded=0.8, attention_output=0.85, kl=0.1, agreement=0.7, loss=1.5)


def carrying(method: MethodConfig, space: dict[str, Any]) -> Profile:
    base = profile()
    compression = Compression(size=256, window=32, method=method)
    search = base.search.model_copy(update={"space": space})
    return base.model_copy(update={"compression": compression, "search": search})


def rendered(renderable: Any) -> str:
    """What is printed, in one line without lines of the table."""
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("method", "space", "shown", "searched"),
    [
        (
            ClusterAttn(num_block=4, theta=0.003),
            {"num_block": (1, 32), "theta": (1e-5, 0.02)},
            "clusterattn: num_block 4, theta 0.003, gap_pool 15, importance mean",
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
    summary, table = rendered(profile_summary(made)), rendered(profiles_table({Path("p.json"): made}))
    assert f"method {shown} result" in summary
    assert f"search {searched}" in summary
    assert f"│ {shown} │ cosine 0.9800" in table


def test_baselines_are_shown_with_their_parameters() -> None:
    base = profile()
    baselines = [Baseline(method=method, metrics=METRICS) for method in (SnapKV(), TopK(), H2O(), Full())]
    results = base.results.model_copy(update={"baselines": tuple(baselines)})
    shown = rendered(profile_summary(base.model_copy(update={"results": results})))
    for row in (
        "snapkv │ kernel_size 5, pooling avg, importance mean │ 0.9000",
        "topk │ │ 0.9000",
        "h2o │ recent_share 0.5 │",
    ):
        assert row in shown
    assert "full │ │ 0.9000 │ 0.8000 │ 0.8500 │ 0.1000 │ 0.7000 │ 1.5000" in shown


def test_what_was_left_out_is_told() -> None:
    assert "left out needle-7 (out of memory)" in rendered(profile_summary(profile()))
