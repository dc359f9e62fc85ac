"""SnapKV, top-k and StreamingLLM against their plain-loop references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from clusterprof.methods import ClusterAttn, Method, MethodConfig, SnapKV, StreamingLLM, TopK
from tests.methods.strategies import exact_importances, methods, observed, odd
from tests.reference.selection import select_snapkv, select_streaming_llm, select_topk

any_input = settings(max_examples=200, deadline=None)


@any_input
@given(importance=exact_importances(), kernel_size=odd(63), data=st.data())
def test_snapkv_pools_by_the_mean(importance: Tensor, kernel_size: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    kept = SnapKV(kernel_size=kernel_size).select(observed(importance), budget)[0, 0].tolist()
    assert kept == select_snapkv(importance[0, 0].tolist(), budget, kernel_size, "avg")


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


def test_defaults_are_those_of_the_papers() -> None:
    assert SnapKV().kernel_size == 5
    assert StreamingLLM().initial_tokens == 4


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (SnapKV, {"kernel_size": 4}),
        (SnapKV, {"kernel_size": 0}),
        (SnapKV, {"kernel_size": 1025}),
        (SnapKV, {"kernel_size": math.nan}),
        (StreamingLLM, {"initial_tokens": -1}),
        (StreamingLLM, {"initial_tokens": 10**9}),
        (TopK, {"theta": 0.1}),
    ],
    ids=str,
)
def test_refuses_parameters_out_of_range(method: type[Method], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        method.model_validate(wrong)


@any_input
@given(method=methods())
def test_a_method_survives_json(method: ClusterAttn | SnapKV | StreamingLLM | TopK) -> None:
    adapter: TypeAdapter[object] = TypeAdapter(MethodConfig)
    assert adapter.validate_json(adapter.dump_json(method)) == method
