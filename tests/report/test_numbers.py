import pytest

from clusterprof.methods import ClusterAttn
from clusterprof.profile import LayerOverride
from clusterprof.report.numbers import duration_text, overrides_text, parameters_text, size_text, window_text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (11_796_480, "11.8 MB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_size(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (185, "3:05"), (3723, "1:02:03")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_window() -> None:
    assert window_text(32) == "last 32 tokens"
    assert window_text("query") == "question"


def test_parameters() -> None:
    assert parameters_text({"name": "clusterattn", "num_block": 8, "theta": 0.0020000000000000005}) == (
        "num_block 8, theta 0.002"
    )


def test_overrides() -> None:
    method = ClusterAttn(num_block=8, theta=0.002)
    overrides = [
        LayerOverride(layers=(0, 1, 2), method=ClusterAttn(num_block=4, theta=0.0123456)),
        LayerOverride(layers=(5,), method=ClusterAttn(num_block=8, theta=0.002, gap_pool=3)),
        LayerOverride(layers=(6,), method=method),
    ]
    assert overrides_text(overrides, method) == [
        "layers 0 to 2: num_block 4, theta 0.0123",
        "layer 5: gap_pool 3",
        "layer 6: the same",
    ]
    assert overrides_text([], method) == []
