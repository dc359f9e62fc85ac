import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods import ClusterAttn, Observation, SnapKV, StreamingLLM, TopK
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
    observation = Observation(importance, window=window)
    kept = kept_positions(method, observation, budget + window)
    assert kept.shape == (ROWS, HEADS, budget + window)
    assert torch.equal(kept[..., :budget], method.select(observation, budget))
    assert bool((kept[..., budget:] == torch.arange(prefix_length, prefix_length + window)).all())
