"""What every method promises, whatever the importance, the budget and its parameters are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods import Method
from tests.methods.strategies import importances, methods

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

    kept = method.select(importance, budget)

    assert kept.dtype == torch.int64
    assert kept.shape == (ROWS, HEADS, budget)
    assert kept.min() >= 0
    assert kept.max() < length
    assert bool((kept.diff(dim=-1) > 0).all())
    assert torch.equal(kept, method.select(importance, budget))
    assert torch.equal(importance, before)


@any_input
@given(method=methods(), importance=importances(rows=1, heads=HEADS))
def test_budget_of_the_whole_prefix_keeps_it(method: Method, importance: Tensor) -> None:
    length = importance.shape[-1]
    assert torch.equal(method.select(importance, length)[0, 0], torch.arange(length))


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_rows_and_heads_do_not_see_each_other(
    method: Method, importance: Tensor, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    together = method.select(importance, budget)
    for row in range(ROWS):
        for head in range(HEADS):
            alone = method.select(importance[row : row + 1, head : head + 1], budget)
            assert torch.equal(alone[0, 0], together[row, head])


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_a_padded_row_is_its_own_single_run(method: Method, importance: Tensor, data: st.DataObject) -> None:
    # What stands in the padding is arbitrary here and must not matter.
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    lengths = data.draw(st.lists(st.integers(0, length), min_size=ROWS, max_size=ROWS))

    kept = method.select(importance, budget, torch.tensor(lengths))

    assert kept.shape == (ROWS, HEADS, budget)
    assert bool((kept.diff(dim=-1) > 0).all())
    assert kept.max() < length
    for row, tokens in enumerate(lengths):
        if tokens > budget:
            alone = method.select(importance[row : row + 1, :, :tokens], budget)[0]
        else:
            alone = torch.arange(tokens).expand(HEADS, -1)
        assert torch.equal(kept[row, :, : alone.shape[-1]], alone)
        assert bool((kept[row, :, alone.shape[-1] :] >= tokens).all())


@any_input
@given(method=methods(), importance=importances(rows=ROWS, heads=HEADS), data=st.data())
def test_full_lengths_are_no_padding(method: Method, importance: Tensor, data: st.DataObject) -> None:
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    lengths = torch.full((ROWS,), length)
    assert torch.equal(method.select(importance, budget, lengths), method.select(importance, budget))
