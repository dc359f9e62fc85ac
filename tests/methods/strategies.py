"""Hypothesis strategies: what can be observed of a prefix, and methods with any valid parameters."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from clusterprof.methods import (
    H2O,
    ClusterAttn,
    DBSCANClusters,
    KMeansClusters,
    MethodConfig,
    NGram,
    Observation,
    Pooling,
    Reduction,
    SnapKV,
    StreamingLLM,
    TopK,
)

# Multiples of 1/1024, so that sums and comparisons are exact in float32; see tests/reference/selection.py.
UNIT = 1 / 1024


def exact_importances(*, rows: int = 1, heads: int = 1, longest: int = 70) -> st.SearchStrategy[Tensor]:
    """Float32 ``(rows, heads, length)``: anything from all zeros over one peak and many ties to all different."""
    shapes = st.integers(1, longest).map(lambda length: (rows, heads, length))
    highest = st.sampled_from([0, 1, 3, 1024])
    counts = st.tuples(shapes, highest).flatmap(
        lambda chosen: hnp.arrays(np.int64, chosen[0], elements=st.integers(0, chosen[1]))
    )
    return counts.map(lambda array: torch.from_numpy(array).float() * UNIT)


def importances(*, rows: int, heads: int, longest: int = 50) -> st.SearchStrategy[Tensor]:
    """Float32 ``(rows, heads, length)``: any non-negative numbers, denormal and equal ones among them.

    Half of them are skewed like attention, with hardly two equal numbers.
    """
    elements = st.floats(0, 1, width=32) | st.sampled_from([0.0, 1e-45, 2**-126, 0.5, 1.0])
    lengths = st.integers(1, longest)
    arrays = lengths.flatmap(lambda length: hnp.arrays(np.float32, (rows, heads, length), elements=elements))

    def skewed(length: int, seed: int) -> Tensor:
        return torch.rand(rows, heads, length, generator=torch.Generator().manual_seed(seed)) ** 4

    return arrays.map(torch.from_numpy) | st.builds(skewed, lengths, st.integers(0, 2**32))


def observed(importance: Tensor) -> Observation:
    """For methods that need nothing else."""
    return Observation(importance, window=4, peak=importance)


@st.composite
def observations(draw: st.DrawFn, *, rows: int, heads: int) -> Observation:
    """All that any method may need; the accumulated attention ranks the tokens unlike the window's."""
    importance = draw(importances(rows=rows, heads=heads))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    accumulated = torch.rand(importance.shape, generator=generator) ** 4 * 100
    words = draw(st.sampled_from([0, 0.3, 0.8, 1]))
    word_starts = torch.rand(rows, importance.shape[-1], generator=generator) < words
    # The highest of several attentions is not below their mean, and need not rank as it does.
    peak = importance + (1 - importance) * torch.rand(importance.shape, generator=generator) ** 4
    return Observation(importance, draw(st.integers(0, 9)), accumulated, word_starts, peak)


def odd(highest: int) -> st.SearchStrategy[int]:
    return st.integers(0, (highest - 1) // 2).map(lambda half: 2 * half + 1)


poolings: st.SearchStrategy[Pooling] = st.sampled_from(["avg", "max"])
reductions: st.SearchStrategy[Reduction] = st.sampled_from(["mean", "max"])


def clusterattns() -> st.SearchStrategy[ClusterAttn]:
    return st.builds(
        ClusterAttn,
        num_block=st.integers(1, 4) | st.integers(1, 40) | st.just(1_000_000),
        theta=st.just(0.0) | st.integers(0, 1024).map(lambda count: count * UNIT) | st.floats(0, 1),
        gap_pool=odd(63),
        gap_pooling=poolings,
        importance=reductions,
    )


def methods() -> st.SearchStrategy[MethodConfig]:
    return st.one_of(
        clusterattns(),
        st.builds(SnapKV, kernel_size=odd(63), pooling=poolings, importance=reductions),
        st.builds(StreamingLLM, initial_tokens=st.integers(0, 80), evict_while_decoding=st.booleans()),
        st.just(TopK()),
        st.builds(H2O, recent_share=st.floats(0, 1), evict_while_decoding=st.booleans()),
        st.builds(KMeansClusters, clusters=st.integers(1, 8) | st.just(1_000_000)),
        st.builds(DBSCANClusters, eps=st.floats(0, 1, exclude_min=True), min_samples=st.integers(1, 9)),
        st.builds(NGram, n=st.integers(1, 4)),
    )
