"""H2O against kept sets made by hand and its plain-loop reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from clusterprof.methods import H2O, Observation
from tests.methods.strategies import UNIT, exact_importances
from tests.reference.selection import select_h2o


def accumulating(accumulated: Tensor, window: int) -> Observation:
    # An importance that would keep the opposite.
    return Observation(1 / (1 + accumulated), window, accumulated)


@pytest.mark.parametrize(
    ("recent_share", "window", "budget", "expected"),
    [
        # Size 6: 3 recent tokens, of which the window is 2, so the prefix's last; 3 heavy hitters before it.
        (0.5, 2, 4, [0, 3, 5, 9]),
        # The last token is a heavy hitter, too; it counts once.
        (0.5, 2, 6, [0, 2, 3, 5, 8, 9]),
        # The window alone is more than the recent share: all of the budget goes to heavy hitters.
        (0.5, 8, 4, [0, 3, 5, 9]),
        (0.5, 8, 2, [3, 9]),
        (0, 2, 3, [3, 5, 9]),
        (1, 2, 4, [6, 7, 8, 9]),
        # While decoding there is no window: of size 4 the last 2 and 2 heavy hitters before them.
        (0.5, 0, 4, [3, 5, 8, 9]),
        (0.25, 0, 4, [0, 3, 5, 9]),
        (0.75, 0, 4, [3, 7, 8, 9]),
        (1, 0, 3, [7, 8, 9]),
        (0.5, 0, 10, list(range(10))),
    ],
)
def test_by_hand(recent_share: float, window: int, budget: int, expected: list[int]) -> None:
    accumulated = torch.tensor([[[50, 4, 5, 90, 1, 60, 2, 3, 0, 70]]]) * UNIT
    kept = H2O(recent_share=recent_share).select(accumulating(accumulated, window), budget)
    assert kept.tolist() == [[expected]]


@settings(max_examples=150, deadline=None)
@given(
    accumulated=exact_importances(rows=2, heads=2, longest=40),
    window=st.integers(0, 9) | st.integers(0, 99),
    recent_share=st.sampled_from([0, 0.25, 0.5, 1]) | st.floats(0, 1),
    data=st.data(),
)
def test_follows_the_reference(
    accumulated: Tensor, window: int, recent_share: float, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, accumulated.shape[-1]))
    kept = H2O(recent_share=recent_share).select(accumulating(accumulated, window), budget)
    for row in range(2):
        for head in range(2):
            expected = select_h2o(accumulated[row, head].tolist(), budget, window, recent_share)
            assert kept[row, head].tolist() == expected


def test_half_of_the_size_is_recent_by_default() -> None:
    assert H2O().recent_share == 0.5
    assert not H2O().evict_while_decoding


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValidationError, match="recent_share"):
        H2O(recent_share=share)
