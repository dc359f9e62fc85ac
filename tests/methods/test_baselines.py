"""SnapKV, top-k and StreamingLLM against kept sets made by hand and their plain-loop references."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from clusterprof.methods import Method, Observation, SnapKV, StreamingLLM, TopK
from tests.methods.strategies import UNIT, exact_importances, observed, odd
from tests.reference.selection import select_snapkv, select_streaming_llm, select_topk

any_input = settings(max_examples=200, deadline=None)


Pooling = Literal["avg", "max"]
poolings: st.SearchStrategy[Pooling] = st.sampled_from(["avg", "max"])


@any_input
@given(importance=exact_importances(), kernel_size=odd(63), pooling=poolings, data=st.data())
def test_snapkv_pools_and_takes_the_highest(
    importance: Tensor, kernel_size: int, pooling: Pooling, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    method = SnapKV(kernel_size=kernel_size, pooling=pooling)
    kept = method.select(observed(importance), budget)[0, 0].tolist()
    assert kept == select_snapkv(importance[0, 0].tolist(), budget, kernel_size, pooling)


@any_input
@given(peak=exact_importances(), kernel_size=odd(63), pooling=poolings, data=st.data())
def test_snapkv_may_go_by_the_highest_attention_alone(
    peak: Tensor, kernel_size: int, pooling: Pooling, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, peak.shape[-1]))
    method = SnapKV(kernel_size=kernel_size, pooling=pooling, importance="max")
    kept = method.select(Observation(peak.flip(-1), 4, peak=peak), budget)[0, 0].tolist()
    assert kept == select_snapkv(peak[0, 0].tolist(), budget, kernel_size, pooling)


@pytest.mark.parametrize(
    ("pooling", "budget", "expected"),
    [
        # Means of 3 tokens, of 2 at the ends: 6, 4, 8, 8, 8, 5, 7, 11, 9.
        ("avg", 1, [7]),
        ("avg", 2, [7, 8]),
        ("avg", 4, [2, 3, 7, 8]),
        ("avg", 6, [2, 3, 4, 6, 7, 8]),
        ("avg", 7, [0, 2, 3, 4, 6, 7, 8]),
        # Highest of 3: 12, 12, 24, 24, 24, 15, 15, 15, 12.
        ("max", 2, [2, 3]),
        ("max", 5, [2, 3, 4, 5, 6]),
        ("max", 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_snapkv_by_hand(pooling: Pooling, budget: int, expected: list[int]) -> None:
    importance = torch.tensor([12, 0, 0, 24, 0, 0, 15, 6, 12]) * UNIT
    method = SnapKV(kernel_size=3, pooling=pooling)
    assert method.select(observed(importance[None, None]), budget).tolist() == [[expected]]


@any_input
@given(importance=exact_importances(), data=st.data())
def test_topk_takes_the_highest(importance: Tensor, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    assert TopK().select(observed(importance), budget)[0, 0].tolist() == select_topk(
        importance[0, 0].tolist(), budget
    )


@any_input
@given(length=st.integers(1, 60), initial_tokens=st.integers(0, 70), data=st.data())
def test_streaming_llm_keeps_both_ends(length: int, initial_tokens: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, length))
    kept = StreamingLLM(initial_tokens=initial_tokens).select(observed(torch.rand(1, 1, length)), budget)
    assert kept[0, 0].tolist() == select_streaming_llm(length, budget, initial_tokens)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (2, [0, 1]),
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 11]),
        (8, [0, 1, 2, 3, 8, 9, 10, 11]),
        (12, list(range(12))),
    ],
)
@pytest.mark.parametrize("window", [0, 3])
def test_streaming_llm_by_hand(window: int, budget: int, expected: list[int]) -> None:
    observation = Observation(torch.rand(2, 3, 12), window)
    assert StreamingLLM().select(observation, budget).tolist() == [[expected] * 3] * 2


def test_defaults_are_those_of_the_papers() -> None:
    assert (SnapKV().kernel_size, SnapKV().pooling) == (5, "avg")
    assert StreamingLLM().initial_tokens == 4


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (SnapKV, {"kernel_size": 4}),
        (SnapKV, {"kernel_size": 0}),
        (SnapKV, {"kernel_size": 1025}),
        (SnapKV, {"kernel_size": math.nan}),
        (SnapKV, {"pooling": "sum"}),
        (StreamingLLM, {"initial_tokens": -1}),
        (StreamingLLM, {"initial_tokens": 10**9}),
        (TopK, {"theta": 0.1}),
    ],
    ids=str,
)
def test_refuses_parameters_out_of_range(method: type[Method], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        method.model_validate(wrong)
