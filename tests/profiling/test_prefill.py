"""One pass over a prompt serves every window and every need of a method."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profiling.prefill import prefill_prompt
from tests.profiling.subjects import random_prompt
from tests.runtime.models import full_attention
from tests.runtime.subjects import model_state
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen3

PROMPT, LENGTH = random_prompt(), 60
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])

Build = Callable[..., PreTrainedModel]


@torch.no_grad()
def eager_attention(model: PreTrainedModel) -> Tensor:
    """Of the full layers, a mean over the query heads of a group: ``(layers, kv_heads, length, length)``."""
    model.set_attn_implementation("eager")
    weights = model(PROMPT, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    full = [layer for layer, whole in zip(weights, full_attention(model), strict=True) if whole]
    kv_heads = model.config.num_key_value_heads
    return torch.cat(full).view(len(full), kv_heads, -1, LENGTH, LENGTH).mean(dim=2)


@MODELS
def test_observes_with_any_window(build: Build) -> None:
    model = build()
    before = model_state(model)
    prefill = prefill_prompt(model, PROMPT, observed=20)
    assert model_state(model) == before
    attention = eager_attention(model)
    for window in (1, 8, 20):
        prefix = LENGTH - window
        observation = prefill.observation(window)
        expected = attention[:, :, prefix:, :prefix].mean(dim=2)
        torch.testing.assert_close(observation.importance, expected, atol=1e-6, rtol=1e-4)
        assert observation.window == window
        assert observation.accumulated is None
        assert observation.word_starts is None


@MODELS
def test_sums_the_attention_of_all_queries_where_it_is_asked_to(build: Build) -> None:
    model = build()
    prefill = prefill_prompt(model, PROMPT, observed=8, accumulate=True)
    sums = eager_attention(model).sum(dim=2)
    for window in (1, 8):
        found = prefill.observation(window).accumulated
        assert found is not None
        torch.testing.assert_close(found, sums[..., : LENGTH - window], atol=1e-5, rtol=1e-5)


def test_words_are_those_of_the_prefix_in_every_layer() -> None:
    words = torch.arange(LENGTH) % 3 == 0
    prefill = prefill_prompt(tiny_llama(), PROMPT, observed=8, word_starts=words)
    found = prefill.observation(8).word_starts
    assert found is not None
    assert torch.equal(found, words[: LENGTH - 8].expand(2, -1))


@torch.no_grad()
def test_leaves_the_whole_cache_and_says_what_comes_next() -> None:
    model = tiny_gemma3()
    prefill = prefill_prompt(model, PROMPT, observed=8)
    expected = model(PROMPT).logits[0, -1].log_softmax(dim=-1)
    torch.testing.assert_close(prefill.log_probs, expected, atol=1e-5, rtol=1e-5)
    assert list(prefill.queries) == [1]
    assert prefill.prompt_length == LENGTH
    assert prefill.layers[1].get_seq_length() == LENGTH
    assert prefill.layers[0].keys.shape[2] == 31  # type: ignore[union-attr]


def test_a_model_of_sliding_windows_alone_is_refused() -> None:
    with pytest.raises(CompressionError, match="Every layer of this model has sliding-window"):
        prefill_prompt(tiny_mistral(sliding_window=16), PROMPT, observed=8)


def test_attention_that_is_not_finite_names_its_layer() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    with pytest.raises(CompressionError, match="attention of layer 1 is not finite"):
        prefill_prompt(model, PROMPT, observed=8, accumulate=True)
