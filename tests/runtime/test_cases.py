"""Inputs that broke others, a row of the list each, over the model matrix.

Contexts that fail, nest or meet are in test_attention.py, caches and models that cannot be compressed in
test_refusals.py and test_unsupported.py, bytes in test_bytes.py, second turns, beams and samples in test_cache.py,
drafts in test_assisted.py, compiled steps in test_static.py, flash attention in test_backends.py.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import ClusterAttn, TopK
from clusterprof.profile import Compression
from clusterprof.runtime import StaticCompressedCache
from clusterprof.runtime.cache import stored
from tests.runtime.models import convert, expected_lengths, full_attention
from tests.runtime.subjects import (
    TINY,
    Subject,
    compressed_layers,
    continuation,
    forward,
    generate,
    pad_left,
    random_stream,
    stored_lengths,
    tiny_subject,
)
from tests.tiny import tiny_llama, tiny_phi3


# Row: two different prompts one after the other, same model object.
def test_two_prompts_one_after_another_are_both_compressed(subject: Subject, kept_sets: list[Tensor]) -> None:
    model, size, new = subject.model, subject.compression.size, subject.new_tokens
    prompts = [subject.prompt(subject.long), subject.prompt(subject.long + 7, start=30)]
    texts = []
    with compress(model, subject.compression):
        for prompt in prompts:
            result = generate(model, prompt, new)
            # The last token was sampled and not fed.
            fed = result.sequences.shape[1] - 1
            decoded = fed - prompt.shape[1]
            assert stored_lengths(result.cache) == expected_lengths(model, size + decoded, fed)
            assert {layer.evicted for layer in compressed_layers(result.cache)} == {prompt.shape[1] - size}
            assert result.cache.get_seq_length() == fed
            texts.append(result.sequences)

    layers = sum(full_attention(model))
    assert len(kept_sets) == 2 * layers
    assert not torch.equal(kept_sets[0], kept_sets[layers])
    # A model that has seen no other prompt says the same.
    fresh = copy.deepcopy(model)
    with compress(fresh, subject.compression):
        assert torch.equal(generate(fresh, prompts[1], new).sequences, texts[1])


# Row: prompt shorter than `size`, shorter than the window, one token.
def test_prompts_of_at_most_size_are_left_whole(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    size, window = subject.compression.size, subject.window
    for length in (size, window - 1, 1):
        prompt = subject.prompt(length)
        expected = generate(subject.model, prompt, 6, output_logits=True)
        with warnings.catch_warnings(), compress(subject.model, subject.compression):
            warnings.simplefilter("error")
            result = generate(subject.model, prompt, 6, output_logits=True)
        assert {layer.evicted for layer in compressed_layers(result.cache)} == {0}
        assert stored_lengths(result.cache) == stored_lengths(expected.cache)
        assert torch.equal(result.sequences, expected.sequences)
        # Not nearly: the same numbers in the same order.
        assert all(torch.equal(a, b) for a, b in zip(result.logits, expected.logits, strict=True))
    assert not caplog.records


def test_one_token_more_than_size_evicts_one(tiny: Subject) -> None:
    with compress(tiny.model, tiny.compression):
        cache = forward(tiny.model, tiny.prompt(tiny.compression.size + 1)).cache
    assert {layer.evicted for layer in compressed_layers(cache)} == {1}


# Row: `size` <= `window`; `size` 0 or negative; theta NaN; num_block 0.
@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (lambda: Compression(size=8, window=8, method=TopK()), "at least 9"),
        (lambda: Compression(size=0, window=8, method=TopK()), "greater than or equal to 1"),
        (lambda: Compression(size=-24, window=8, method=TopK()), "greater than or equal to 1"),
        (lambda: ClusterAttn(num_block=2, theta=float("nan")), "a finite number"),
        (lambda: ClusterAttn(num_block=2, theta=2), "less than or equal to 1"),
        (lambda: ClusterAttn(num_block=0, theta=0.1), "greater than or equal to 1"),
    ],
    ids=["size-window", "size-0", "size-negative", "theta-nan", "theta-2", "num_block-0"],
)
def test_impossible_settings_are_refused_where_they_enter(
    setting: Callable[[], object], allowed: str
) -> None:
    with pytest.raises(ValidationError, match=allowed):
        setting()


# Row: left-padded batch of unequal prompts.
def check_batch_against_single_runs(
    subject: Subject, kept_sets: list[Tensor], lengths: tuple[int, ...]
) -> None:
    prompts = [subject.prompt(length, start=20 * row) for row, length in enumerate(lengths)]
    batch, mask = pad_left(prompts)
    kept_sets.clear()
    with compress(subject.model, subject.compression):
        together = continuation(subject.model, batch, subject.new_tokens, attention_mask=mask)
        in_batch = list(kept_sets)
        for row, prompt in enumerate(prompts):
            kept_sets.clear()
            assert continuation(subject.model, prompt, subject.new_tokens) == [together[row]]
            padding = batch.shape[1] - prompt.shape[1]
            if prompt.shape[1] > subject.compression.size:
                assert len(kept_sets) == len(in_batch)
                for alone, positions in zip(kept_sets, in_batch, strict=True):
                    assert torch.equal(positions[row] - padding, alone[0])


def test_left_padded_batch_gives_the_text_of_single_runs(subject: Subject, kept_sets: list[Tensor]) -> None:
    size, window = subject.compression.size, subject.window
    check_batch_against_single_runs(subject, kept_sets, (subject.long, size + 9, size - 3, window - 3))


@pytest.mark.parametrize("lengths", [(26, 24, 1), (24, 8, 1), (1, 60, 33), (60, 60, 60)])
def test_left_padded_batch_around_size_and_window(lengths: tuple[int, ...], kept_sets: list[Tensor]) -> None:
    check_batch_against_single_runs(tiny_subject(tiny_llama(eos_token_id=None)), kept_sets, lengths)


# Row: right-padded batch.
def test_right_padding_is_refused_before_anything_runs(tiny: Subject) -> None:
    batch, mask = pad_left([tiny.prompt(60), tiny.prompt(40)])
    ran: list[object] = []
    layer: Any = tiny.model.get_submodule("model.layers.0")
    layer.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(CompressionError, match="padded on the right"), compress(tiny.model, TINY):
        forward(tiny.model, batch.flip(1), attention_mask=mask.flip(1))
    assert not ran


def test_an_empty_row_is_refused_as_what_it_is(tiny: Subject) -> None:
    prompt = tiny.prompt(60)
    mask = torch.tensor([[0] * 60, [1] * 60])
    with pytest.raises(CompressionError, match="A row of the batch is empty"), compress(tiny.model, TINY):
        forward(tiny.model, prompt.expand(2, -1), attention_mask=mask)


# Row: prompt fed in chunks (`prefill_chunk_size`).
def test_a_prompt_in_chunks_is_compressed_once_as_a_whole(tiny: Subject, kept_sets: list[Tensor]) -> None:
    layers = sum(full_attention(tiny.model))
    batch, mask = pad_left([tiny.prompt(60), tiny.prompt(33, start=90), tiny.prompt(5)])
    with compress(tiny.model, TINY):
        whole = generate(tiny.model, batch, 10, attention_mask=mask)
        chunked = generate(tiny.model, batch, 10, attention_mask=mask, prefill_chunk_size=7)
    assert len(kept_sets) == 2 * layers
    assert all(torch.equal(a, b) for a, b in zip(kept_sets[:layers], kept_sets[layers:], strict=True))
    assert stored_lengths(chunked.cache) == stored_lengths(whole.cache)
    assert torch.equal(chunked.sequences, whole.sequences)


# Row: sliding-window and hybrid models (Mistral v0.1, Gemma3). Models of sliding windows alone: test_unsupported.py.
def test_sliding_layers_are_left_alone(tiny: Subject) -> None:
    batch, mask = pad_left([tiny.prompt(60), tiny.prompt(33, start=90), tiny.prompt(5)])
    plain = forward(tiny.model, batch, attention_mask=mask).cache
    with compress(tiny.model, TINY):
        cache = forward(tiny.model, batch, attention_mask=mask).cache
    assert stored_lengths(cache) == expected_lengths(tiny.model, full=24, seen=60)
    for layer, untouched, full in zip(cache.layers, plain.layers, full_attention(tiny.model), strict=True):
        if not full:
            assert type(layer) is DynamicSlidingWindowLayer
            for found, expected in zip(stored(layer), stored(untouched), strict=True):
                assert torch.equal(found, expected)


@torch.no_grad()
def test_a_window_that_no_prompt_outgrows_is_full_attention() -> None:
    # Phi-3 of long contexts and Phi-3.5: a window of 262,144 tokens, and 131,072 positions.
    wide, plain = (tiny_phi3(sliding_window=width, eos_token_id=None) for width in (1024, None))
    prompt = random_stream()[None, :60]
    with compress(wide, TINY), compress(plain, TINY):
        found, expected = (generate(model, prompt, 10, output_logits=True) for model in (wide, plain))
    assert stored_lengths(found.cache) == [24 + 9] * 2
    torch.testing.assert_close(found.logits, expected.logits)


# Row: eager, sdpa, flash_attention_2.
def test_eager_and_sdpa_keep_the_same(tiny: Subject, kept_sets: list[Tensor]) -> None:
    batch, mask = pad_left([tiny.prompt(60), tiny.prompt(33, start=90)])
    for attention in ("sdpa", "eager"):
        tiny.model.set_attn_implementation(attention)
        with compress(tiny.model, TINY):
            forward(tiny.model, batch, attention_mask=mask)
    layers = sum(full_attention(tiny.model))
    assert len(kept_sets) == 2 * layers
    assert torch.equal(torch.stack(kept_sets[:layers]), torch.stack(kept_sets[layers:]))


# Row: bf16/fp16 scores full of ties; fp16 overflow.
def test_ties_go_to_the_lower_position_in_every_dtype(tiny: Subject, kept_sets: list[Tensor]) -> None:
    # Queries of zero look at all tokens alike: nothing but ties.
    heads = tiny.model.config.num_attention_heads * tiny.model.config.head_dim
    for name, parameter in tiny.model.named_parameters():
        if "q_proj" in name or "qkv_proj" in name:
            parameter.data[:heads] = 0
    compression = Compression(size=24, window=8, method=TopK())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for attention in ("sdpa", "eager"):
            convert(tiny.model, dtype)
            tiny.model.set_attn_implementation(attention)
            with compress(tiny.model, compression):
                forward(tiny.model, tiny.prompt(60))
    expected = torch.tensor([*range(16), *range(52, 60)])
    assert len(kept_sets) == 6 * sum(full_attention(tiny.model))
    assert all(bool((kept == expected).all()) for kept in kept_sets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_reproducible(tiny: Subject, dtype: torch.dtype, kept_sets: list[Tensor]) -> None:
    convert(tiny.model, dtype)
    texts = []
    with compress(tiny.model, TINY):
        for _ in range(2):
            texts.append(generate(tiny.model, tiny.prompt(60), 5).sequences)
    layers = sum(full_attention(tiny.model))
    assert all(torch.equal(a, b) for a, b in zip(kept_sets[:layers], kept_sets[layers:], strict=True))
    assert torch.equal(*texts)


# Row: beam search, num_return_sequences, assisted generation, quantized cache, static cache, `torch.compile`.
def test_the_static_cache_of_a_compressed_prompt_says_what_the_dynamic_one_says(tiny: Subject) -> None:
    batch, mask = pad_left([tiny.prompt(60), tiny.prompt(33, start=90), tiny.prompt(5)])
    cache: Any = StaticCompressedCache(tiny.model.config, TINY, max_new_tokens=15)
    with compress(tiny.model, TINY):
        expected = generate(tiny.model, batch, 15, attention_mask=mask).sequences
        found = generate(tiny.model, batch, 15, attention_mask=mask, cache=cache).sequences
    assert torch.equal(found, expected)


# Row: `generate()` called without the context after using it.
def test_generate_without_the_context_is_untouched(tiny: Subject) -> None:
    prompt = tiny.prompt(tiny.long)
    before = generate(tiny.model, prompt, 6, output_logits=True)
    with compress(tiny.model, tiny.compression):
        generate(tiny.model, prompt, 2)
    after = generate(tiny.model, prompt, 6, output_logits=True)
    assert [type(layer) for layer in after.cache.layers] == [type(layer) for layer in before.cache.layers]
    assert [type(layer) is DynamicLayer for layer in after.cache.layers] == full_attention(tiny.model)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
