import math

import numpy as np
import pytest
import torch
from torch import Tensor

from clusterprof.methods import ClusterAttn
from clusterprof.profiling.capture import Capture, LayerCapture
from clusterprof.profiling.spaces import theta_range

LENGTH = 600


def with_importance(importance: Tensor, window: int = 32, peak: Tensor | None = None) -> Capture:
    """A capture of which nothing but mean and highest importance ``(layers, kv_heads, length)`` is looked at."""
    none = torch.zeros(0)
    pairs = zip(importance, importance if peak is None else peak, strict=True)
    layers = {
        i: LayerCapture(none, none, *pair, none, none, none, none, none) for i, pair in enumerate(pairs)
    }
    length = importance.shape[-1] + window
    return Capture(layers, {}, length, window, tokens=none, log_probs=none, scaling=1.0)


def one_hot() -> Tensor:
    importance = torch.zeros(2, 2, LENGTH)
    importance[..., 17] = 1
    return importance


def attention_like(seed: int = 0) -> Tensor:
    scores = torch.randn(2, 2, LENGTH, generator=torch.Generator().manual_seed(seed)) * 2
    return scores.softmax(-1)


EXTREMES = {
    "zeros": torch.zeros(2, 2, LENGTH),
    "denormal": torch.full((2, 2, LENGTH), 1e-45),
    "uniform": torch.full((2, 2, LENGTH), 1 / LENGTH),
    "one-hot": one_hot(),
    "ones": torch.ones(2, 2, LENGTH),
    "a rounding error above one": torch.full((2, 2, LENGTH), 1 + 2**-23),
    "attention": attention_like(),
}


@pytest.mark.parametrize("size", [33, 64, 256, 500, 1024, 1500, 2048, 3000, 4096, 100_000])
@pytest.mark.parametrize("importance", EXTREMES.values(), ids=EXTREMES)
def test_is_ordered_valid_and_holds_the_default(importance: Tensor, size: int) -> None:
    low, high = theta_range([with_importance(importance)], size)
    assert 0 < low <= ClusterAttn.paper_default(size).theta <= high <= 1
    for theta in (low, high):
        # One digit.
        assert float(f"{theta:.0e}") == theta
        assert ClusterAttn(num_block=1, theta=theta).theta == theta


def test_ends_are_where_theta_stops_to_matter() -> None:
    importance = attention_like() / 50
    low, high = theta_range([with_importance(importance)], size=256)
    # 28 tokens per block: the peaks of the blocks, by hand.
    blocks = [importance[..., start : start + 28].amax(-1) for start in range(0, LENGTH, 28)]
    peaks = torch.stack(blocks).flatten().double().numpy()
    assert low <= np.quantile(peaks, 0.05) < low + 10 ** math.floor(math.log10(low))
    # Rounded up to one digit from the highest importance of all.
    highest = float(importance.max())
    assert highest <= high <= highest + 10 ** math.floor(math.log10(highest))


def test_the_highest_importance_raises_the_high_end_alone() -> None:
    importance = attention_like() / 50
    low, high = theta_range([with_importance(importance)], size=256)
    raised = theta_range([with_importance(importance, peak=importance * 4)], size=256)
    assert raised[0] == low
    assert raised[1] == pytest.approx(4 * high, rel=0.5)


def test_each_captures_own_window_counts() -> None:
    importance = attention_like() / 50
    # 7 and 28 tokens per block.
    blocks = {200: 7, 32: 28}
    peaks = [
        importance[..., start : start + width].amax(-1).flatten()
        for width in blocks.values()
        for start in range(0, LENGTH, width)
    ]
    low, _ = theta_range([with_importance(importance, window) for window in blocks], size=256)
    quantile = np.quantile(torch.cat(peaks).double().numpy(), 0.05)
    assert low <= quantile < low + 10 ** math.floor(math.log10(low))


def test_at_the_high_end_no_head_has_a_cluster() -> None:
    # Of 40 heads each looks at one token, with a share of its attention from 1.25 to 50 %.
    importance = torch.full((10, 4, LENGTH), 0.5 / LENGTH)
    importance[:, :, 17] = torch.arange(1, 41).view(10, 4) / 80
    capture = with_importance(importance)
    _, high = theta_range([capture], size=256)
    # The highest is one digit, and not below itself.
    assert high == pytest.approx(0.6)
    at_the_end = ClusterAttn(num_block=8, theta=high)
    assert not at_the_end.clusters(importance, 224).survives.any()


def test_all_captures_count_and_their_order_does_not() -> None:
    captures = [with_importance(attention_like(seed)) for seed in range(3)]
    captures.append(with_importance(one_hot()[..., :400]))
    assert theta_range(captures, 256) == theta_range(captures[::-1], 256)
    assert theta_range(captures, 256) != theta_range(captures[:3], 256)


def test_the_last_bits_of_a_capture_do_not_matter() -> None:
    importance = attention_like()
    captures = [with_importance(importance * (1 + error)) for error in (0, 1e-6, -1e-6)]
    assert len({theta_range([capture], 256) for capture in captures}) == 1


def test_more_numbers_than_torch_takes_quantiles_of() -> None:
    # 17 million blocks of one token, as from a few hundred long prompts.
    importance = torch.full((1, 1, 2**24 + 2**20), 0.25)
    low, high = theta_range([with_importance(importance)], size=33)
    assert (low, high) == (2e-3, 0.3)
