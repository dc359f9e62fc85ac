"""Words and their neighbours against kept sets made by hand and the plain-loop reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from clusterprof.methods import NGram, Observation, TopK
from tests.methods.strategies import UNIT, exact_importances, observed
from tests.reference.selection import select_ngram

# Words: 0 1 | 2 | 3 4 5 | 6 | 7 8 | 9; the first token continues one that began before the prompt.
STARTS = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 0, 1]]).bool()
IMPORTANCE = torch.tensor([[[1, 2, 7, 1, 90, 1, 5, 1, 40, 3]]]) * UNIT


@pytest.mark.parametrize(
    ("n", "budget", "expected"),
    [
        # By word: 2, 7, 90, 5, 40, 3.
        (1, 3, [3, 4, 5]),
        (1, 5, [3, 4, 5, 7, 8]),
        (1, 6, [2, 3, 4, 5, 7, 8]),
        (1, 4, [3, 4, 5, 7]),
        # The word after it comes along: 2, 7, 90, 90, 40, 40.
        (2, 4, [3, 4, 5, 6]),
        (2, 7, [3, 4, 5, 6, 7, 8, 9]),
        (2, 8, [2, 3, 4, 5, 6, 7, 8, 9]),
        # One on either side: 7, 90, 90, 90, 40, 40.
        (3, 5, [2, 3, 4, 5, 6]),
        (3, 8, [2, 3, 4, 5, 6, 7, 8, 9]),
        # One before it and two after it: 7, 90, 90, 90, 90, 40.
        (4, 7, [2, 3, 4, 5, 6, 7, 8]),
        (4, 9, [0, 2, 3, 4, 5, 6, 7, 8, 9]),
        # The budget ends inside the best group: its first tokens.
        (4, 3, [2, 3, 4]),
    ],
)
def test_by_hand(n: int, budget: int, expected: list[int]) -> None:
    kept = NGram(n=n).select(Observation(IMPORTANCE, 4, word_starts=STARTS), budget)
    assert kept.tolist() == [[expected]]


@settings(max_examples=150, deadline=None)
@given(importance=exact_importances(rows=2, heads=2, longest=40), n=st.integers(1, 4), data=st.data())
def test_follows_the_reference(importance: Tensor, n: int, data: st.DataObject) -> None:
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    word_starts = [data.draw(row), data.draw(row)]
    kept = NGram(n=n).select(Observation(importance, 4, word_starts=torch.tensor(word_starts)), budget)
    for batch in range(2):
        for head in range(2):
            expected = select_ngram(importance[batch, head].tolist(), word_starts[batch], budget, n)
            assert kept[batch, head].tolist() == expected


@settings(max_examples=50, deadline=None)
@given(importance=exact_importances(rows=1, heads=2, longest=40), data=st.data())
def test_words_of_one_token_are_plain_top_k(importance: Tensor, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    every = torch.ones(1, importance.shape[-1], dtype=torch.bool)
    kept = NGram(n=1).select(Observation(importance, 4, word_starts=every), budget)
    assert torch.equal(kept, TopK().select(observed(importance), budget))


def test_the_word_and_the_next_by_default() -> None:
    assert NGram().n == 2


@pytest.mark.parametrize("n", [0, 5, 1.5])
def test_refuses_other_n(n: float) -> None:
    with pytest.raises(ValidationError, match="n\n"):
        NGram.model_validate({"n": n})
