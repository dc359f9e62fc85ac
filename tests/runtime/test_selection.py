import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.methods import Method, Observation
from clusterprof.runtime.selection import kept_positions
from tests.methods.strategies import methods, observations

ROWS, HEADS = 3, 2


@settings(max_examples=150, deadline=None)
@given(observation=observations(rows=ROWS, heads=HEADS), method=methods(), data=st.data())
def test_window_is_kept_and_the_size_exact(
    observation: Observation, method: Method, data: st.DataObject
) -> None:
    prefix_length, window = observation.importance.shape[-1], observation.window
    budget = data.draw(st.integers(1, prefix_length))
    kept = kept_positions(method, observation, budget + window)
    assert kept.shape == (ROWS, HEADS, budget + window)
    assert torch.equal(kept[..., :budget], method.select(observation, budget))
    assert bool((kept[..., budget:] == torch.arange(prefix_length, prefix_length + window)).all())
