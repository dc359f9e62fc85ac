"""What every method promises, whatever the importance, the budget and its parameters are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods import ClusterAttn, Method, SnapKV, TopK
from tests.methods.strategies import importances, methods, observed

ROWS, HEADS = 3, 2
any_input = settings(max_examples=150, deadline=None)


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_keeps_exactly_the_budget_sorted_and_in_range(
    method: Method, importance: Tensor, data: st.DataObject
) -> None:
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    before = importance.clone()

    kept = method.select(observed(importance), budget)

    assert kept.dtype == torch.int64
    assert kept.shape == (ROWS, HEADS, budget)
    assert kept.min() >= 0
    assert kept.max() < length
    assert bool((kept.diff(dim=-1) > 0).all())
    assert torch.equal(kept, method.select(observed(importance), budget))
    assert torch.equal(importance, before)


@any_input
@given(method=methods(), importance=importances(rows=1, heads=HEADS))
def test_budget_of_the_whole_prefix_keeps_it(method: Method, importance: Tensor) -> None:
    length = importance.shape[-1]
    assert torch.equal(method.select(observed(importance), length)[0, 0], torch.arange(length))


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_rows_and_heads_do_not_see_each_other(
    method: Method, importance: Tensor, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    together = method.select(observed(importance), budget)
    for row in range(ROWS):
        for head in range(HEADS):
            alone = method.select(observed(importance[row : row + 1, head : head + 1]), budget)
            assert torch.equal(alone[0, 0], together[row, head])


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_strides_do_not_matter(method: Method, importance: Tensor, data: st.DataObject) -> None:
    # A row cut out of a padded batch is such a view.
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    padding = data.draw(st.integers(1, 9))
    cut = torch.nn.functional.pad(importance, (padding, 0), value=1)[..., padding:]
    assert torch.equal(method.select(observed(cut), budget), method.select(observed(importance), budget))


@pytest.mark.parametrize(
    "method",
    # Every centre is below theta in the last one; clusters would come first.
    [TopK(), SnapKV(kernel_size=1), SnapKV(kernel_size=7), ClusterAttn(num_block=2, theta=1)],
    ids=str,
)
@pytest.mark.parametrize("height", [0.0, 2.0**-149, 0.5])
def test_equal_importance_keeps_the_lowest_positions(method: Method, height: float) -> None:
    importance = torch.full((ROWS, HEADS, 40), height)
    for budget in range(1, 41):
        assert torch.equal(
            method.select(observed(importance), budget), torch.arange(budget).expand(ROWS, HEADS, -1)
        )
