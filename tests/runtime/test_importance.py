import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Cache

from clusterprof.runtime.attention import Observer, observe_attention
from clusterprof.runtime.importance import window_importance
from tests.runtime.models import full_attention
from tests.runtime.subjects import Subject, forward, random_stream
from tests.tiny import tiny_llama


def naive_importance(query: Tensor, key: Tensor, window: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Mean and peak of the whole (L x L) attention in float64, query by query, as the definition reads."""
    rows, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    total = torch.zeros(rows, kv_heads, length - window, dtype=torch.float64)
    peak = total.clone()
    for row in range(rows):
        for head in range(heads):
            kv_head = head * kv_heads // heads
            for position in range(length - window, length):
                visible = key[row, kv_head, : position + 1].double()
                weights = (visible @ query[row, head, position].double() * scaling).softmax(-1)
                weights = weights[: length - window]
                total[row, kv_head] += weights / window / (heads // kv_heads)
                peak[row, kv_head] = torch.maximum(peak[row, kv_head], weights)
    return total, peak


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.integers(1, 6),
    prefix=st.integers(1, 12),
    # From almost uniform attention to almost one-hot.
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    data=st.data(),
)
def test_is_mean_and_peak_of_the_windows_attention(
    rows: int, kv_heads: int, group: int, window: int, prefix: int, spread: float, data: st.DataObject
) -> None:
    length = prefix + window
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    query = torch.randn(rows, kv_heads * group, length, 8, generator=generator) * spread
    key = torch.randn(rows, kv_heads, length, 8, generator=generator) * spread

    found = window_importance(query[:, :, -window:], key, scaling=0.3)
    expected = naive_importance(query, key, window, 0.3)
    assert all(tensor.dtype == torch.float32 for tensor in found)
    for mine, naive in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), naive, atol=1e-6, rtol=1e-5)


def observed_importance(subject: Subject, prompt: Tensor) -> list[Tensor]:
    found = []

    def observe(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        window = subject.window
        found.append(window_importance(query[:, :, -window:], key, scaling=scaling)[0])

    def begin(cache: Cache | None, attention_mask: Tensor | None, tokens: Tensor) -> Observer:
        return observe

    with observe_attention(subject.model, begin):
        forward(subject.model, prompt)
    return found


@torch.no_grad()
def test_agrees_with_the_models_own_attention_weights(tiny: Subject) -> None:
    found = observed_importance(tiny, tiny.prompt(60))

    tiny.model.set_attn_implementation("eager")
    weights = tiny.model(tiny.prompt(60), output_attentions=True).attentions
    window, kv_heads = tiny.window, tiny.model.config.num_key_value_heads
    assert len(found) == len(weights) == tiny.model.config.num_hidden_layers
    for importance, layer, full in zip(found, weights, full_attention(tiny.model), strict=True):
        # A sliding layer's weights end with its window.
        if not full:
            continue
        own = layer[0, :, 60 - window :, : 60 - window].mean(dim=1)
        expected = own.view(kv_heads, -1, 60 - window).mean(dim=1)
        torch.testing.assert_close(importance[0], expected, atol=1e-6, rtol=1e-5)


def test_sums_to_what_the_window_spends_on_the_prefix() -> None:
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 10, 8)
    # All scores equal: the three queries see 8, 9 and 10 tokens.
    expected = torch.full((1, 2, 7), (1 / 8 + 1 / 9 + 1 / 10) / 3)
    torch.testing.assert_close(window_importance(query, key, scaling=1.0)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_do_not_overflow(dtype: torch.dtype) -> None:
    # 200 * 200 * 64 is far above what float16 can hold.
    query, key = torch.full((1, 1, 2, 64), 200.0, dtype=dtype), torch.full((1, 1, 6, 64), 200.0, dtype=dtype)
    importance, _ = window_importance(query, key, scaling=1.0)
    assert importance.dtype == torch.float32
    torch.testing.assert_close(importance, torch.full((1, 1, 4), (1 / 5 + 1 / 6) / 2))


def test_inputs_are_left_alone_and_gradients_may_be_on() -> None:
    query = torch.randn(2, 4, 3, 8, requires_grad=True)
    key = torch.randn(2, 2, 9, 8, requires_grad=True)
    before = query.detach().clone(), key.detach().clone()
    mean, peak = window_importance(query, key, scaling=8**-0.5)
    torch.autograd.grad((mean + peak).sum(), [query, key])
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_nan_is_not_hidden() -> None:
    key = torch.zeros(1, 1, 9, 8)
    key[0, 0, 4] = math.nan
    mean, _ = window_importance(torch.ones(1, 1, 3, 8), key, scaling=1.0)
    assert not bool(mean.isfinite().all())


def test_eager_and_sdpa_see_the_same(tiny: Subject) -> None:
    prompt = tiny.prompt(60)
    found = []
    for attention in ("sdpa", "eager"):
        tiny.model.set_attn_implementation(attention)
        found.append(torch.stack(observed_importance(tiny, prompt)))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_sees_queries_and_keys_after_rope_and_keys_not_repeated() -> None:
    model = tiny_llama()
    shapes = []

    def observe(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        shapes.append((layer_idx, tuple(query.shape), tuple(key.shape), scaling))

    with observe_attention(model, lambda cache, mask, tokens: observe):
        cache = forward(model, random_stream()[None, :30]).cache
        forward(model, random_stream()[None, :1], cache=cache)
    assert shapes == [
        (layer, (1, 4, new, 16), (1, 2, total, 16), 0.25)
        for new, total in ((30, 30), (1, 31))
        for layer in (0, 1)
    ]
