"""What every method promises, whatever the importance, the budget and its parameters are."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods import H2O, ClusterAttn, Method, NGram, Observation, SnapKV, TopK
from tests.methods.strategies import methods, observations

ROWS, HEADS = 3, 2
any_input = settings(max_examples=120, deadline=None)


def tensors(observation: Observation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert observation.accumulated is not None
    assert observation.word_starts is not None
    assert observation.peak is not None
    return observation.importance, observation.accumulated, observation.word_starts, observation.peak


@any_input
@given(method=methods(), observation=observations(rows=ROWS, heads=HEADS), data=st.data())
def test_keeps_exactly_the_budget_sorted_and_in_range(
    method: Method, observation: Observation, data: st.DataObject
) -> None:
    length = observation.importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    before = [tensor.clone() for tensor in tensors(observation)]

    kept = method.select(observation, budget)

    assert kept.dtype == torch.int64
    assert kept.shape == (ROWS, HEADS, budget)
    assert kept.min() >= 0
    assert kept.max() < length
    assert bool((kept.diff(dim=-1) > 0).all())
    assert torch.equal(kept, method.select(observation, budget))
    assert all(map(torch.equal, tensors(observation), before))


@any_input
@given(method=methods(), observation=observations(rows=1, heads=HEADS))
def test_budget_of_the_whole_prefix_keeps_it(method: Method, observation: Observation) -> None:
    length = observation.importance.shape[-1]
    assert torch.equal(method.select(observation, length)[0, 0], torch.arange(length))


@settings(max_examples=80, deadline=None)
@given(method=methods(), observation=observations(rows=ROWS, heads=HEADS), data=st.data())
def test_rows_and_heads_do_not_see_each_other(
    method: Method, observation: Observation, data: st.DataObject
) -> None:
    importance, accumulated, word_starts, peak = tensors(observation)
    budget = data.draw(st.integers(1, importance.shape[-1]))
    together = method.select(observation, budget)
    for row in range(ROWS):
        for head in range(HEADS):
            one = slice(row, row + 1), slice(head, head + 1)
            alone = Observation(
                importance[one], observation.window, accumulated[one], word_starts[row : row + 1], peak[one]
            )
            assert torch.equal(method.select(alone, budget)[0, 0], together[row, head])


@any_input
@given(method=methods(), observation=observations(rows=ROWS, heads=HEADS), data=st.data())
def test_strides_do_not_matter(method: Method, observation: Observation, data: st.DataObject) -> None:
    # A row cut out of a padded batch is such a view.
    budget = data.draw(st.integers(1, observation.importance.shape[-1]))
    padding = data.draw(st.integers(1, 9))
    views = [
        torch.nn.functional.pad(tensor, (padding, 0), value=1)[..., padding:]
        for tensor in tensors(observation)
    ]
    cut = Observation(views[0], observation.window, *views[1:])
    assert torch.equal(method.select(cut, budget), method.select(observation, budget))


@any_input
@given(method=methods(), observation=observations(rows=2, heads=1), data=st.data())
def test_looks_at_nothing_but_what_it_needs(
    method: Method, observation: Observation, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, observation.importance.shape[-1]))
    needed = replace(
        observation,
        accumulated=observation.accumulated if "accumulated" in method.needs else None,
        word_starts=observation.word_starts if "words" in method.needs else None,
    )
    assert torch.equal(method.select(needed, budget), method.select(observation, budget))


@pytest.mark.parametrize(
    "method",
    [
        TopK(),
        SnapKV(kernel_size=1),
        SnapKV(kernel_size=7),
        SnapKV(kernel_size=7, pooling="max"),
        SnapKV(importance="max"),
        # Every centre is below theta; clusters would come first.
        ClusterAttn(num_block=2, theta=1),
        H2O(recent_share=0),
        NGram(n=1),
        NGram(n=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("height", [0.0, 2.0**-149, 0.5])
def test_equal_importance_keeps_the_lowest_positions(method: Method, height: float) -> None:
    importance = torch.full((ROWS, HEADS, 40), height)
    word_starts = torch.arange(40).expand(ROWS, -1) % 3 == 0
    observation = Observation(importance, 4, accumulated=importance, word_starts=word_starts, peak=importance)
    for budget in range(1, 41):
        assert torch.equal(method.select(observation, budget), torch.arange(budget).expand(ROWS, HEADS, -1))
