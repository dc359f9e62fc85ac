import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.methods.ranking import keep_highest, pooled
from tests.methods.strategies import exact_importances, odd

SMALLEST = 2.0**-149

# Close neighbours everywhere: one float32 step apart near 1, and among the denormals.
close_scores = st.sampled_from(
    [
        0.0,
        -0.0,
        SMALLEST,
        2 * SMALLEST,
        3 * SMALLEST,
        2.0**-126,
        0.5,
        1 - 2**-24,
        1.0,
        1 + 2**-23,
        3e38,
        math.inf,
    ]
)
scores = st.lists(close_scores | st.floats(0, width=32), min_size=1, max_size=40)


def head(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[None, None]


def sorted_in_python(values: list[float], budget: int, first: list[bool]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: (not first[i], -values[i], i))
    return sorted(order[:budget])


@settings(max_examples=300, deadline=None)
@given(values=scores, data=st.data())
def test_order_is_exact_and_ties_go_to_the_lower_position(values: list[float], data: st.DataObject) -> None:
    first = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    budget = data.draw(st.integers(1, len(values)))

    plain = keep_highest(head(values), budget)
    assert plain[0, 0].tolist() == sorted_in_python(values, budget, [True] * len(values))
    flagged = keep_highest(head(values), budget, first=torch.tensor(first))
    assert flagged[0, 0].tolist() == sorted_in_python(values, budget, first)


def test_denormal_scores_are_not_flushed_to_zero() -> None:
    assert keep_highest(head([0.0, SMALLEST, 0.0, 2 * SMALLEST]), 2)[0, 0].tolist() == [1, 3]


def test_last_positions_of_a_long_prompt_are_told_apart() -> None:
    # Beyond 2**24 float32 could not count them.
    score = torch.zeros(1, 1, 2**24 + 9)
    score[..., -3:] = 1
    assert keep_highest(score, 4)[0, 0].tolist() == [0, 2**24 + 6, 2**24 + 7, 2**24 + 8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_are_ranked_by_value(dtype: torch.dtype) -> None:
    score = torch.tensor([[0.5, 0.25], [0.75, 0.125], [0.0, 1.0]], dtype=dtype).T[None]
    assert not score.is_contiguous()
    assert keep_highest(score, 1).flatten().tolist() == [1, 2]


@settings(max_examples=150, deadline=None)
@given(score=exact_importances(rows=2, heads=2, longest=40), width=odd(63))
def test_pooling_counts_existing_tokens_only(score: Tensor, width: int) -> None:
    means, highest = pooled(score, width, "avg"), pooled(score, width, "max")
    assert means.shape == highest.shape == score.shape
    half = width // 2
    for position in range(score.shape[-1]):
        near = score[..., max(0, position - half) : position + half + 1].double()
        assert torch.equal(means[..., position], (near.sum(dim=-1) / near.shape[-1]).float())
        assert torch.equal(highest[..., position], near.amax(dim=-1).float())
