import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods import ClusterAttn, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Compression
from clusterprof.runtime.selection import kept_positions
from tests.methods.strategies import importances, methods

ROWS, HEADS = 3, 2
AnyMethod = ClusterAttn | SnapKV | StreamingLLM | TopK


@settings(max_examples=150, deadline=None)
@given(
    importance=importances(rows=ROWS, heads=HEADS), method=methods(), window=st.integers(1, 9), data=st.data()
)
def test_window_is_kept_and_the_size_exact(
    importance: Tensor, method: AnyMethod, window: int, data: st.DataObject
) -> None:
    prefix_length = importance.shape[-1]
    budget = data.draw(st.integers(1, prefix_length))
    compression = Compression(size=budget + window, window=window, method=method)
    kept = kept_positions(compression, importance)
    assert kept.shape == (ROWS, HEADS, budget + window)
    assert torch.equal(kept[..., :budget], method.select(importance, budget))
    assert bool((kept[..., budget:] == torch.arange(prefix_length, prefix_length + window)).all())


@settings(max_examples=250, deadline=None)
@given(
    importance=importances(rows=ROWS, heads=HEADS), method=methods(), window=st.integers(1, 9), data=st.data()
)
def test_a_left_padded_row_keeps_what_it_keeps_alone(
    importance: Tensor, method: AnyMethod, window: int, data: st.DataObject
) -> None:
    prefix_length = importance.shape[-1]
    length = prefix_length + window
    budget = data.draw(st.integers(1, prefix_length))
    size = budget + window
    padding = data.draw(st.lists(st.integers(0, length - 1), min_size=ROWS, max_size=ROWS))
    compression = Compression(size=size, window=window, method=method)

    kept = kept_positions(compression, importance, torch.tensor(padding))

    assert kept.shape == (ROWS, HEADS, size)
    assert bool((kept.diff(dim=-1) > 0).all())
    for row, padded in enumerate(padding):
        if length - padded > size:
            alone = kept_positions(compression, importance[row : row + 1, :, padded:])[0]
            assert torch.equal(kept[row] - padded, alone)
        else:
            # All of its tokens, behind as much padding as fills up to the size.
            assert bool((kept[row, :, size - (length - padded) :] == torch.arange(padded, length)).all())
            assert bool((kept[row, :, : size - (length - padded)] < padded).all())
