"""Prompts that broke other projects: several in a row, short ones, grouped heads, padded batches."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from clusterprof import Profile, compress
from clusterprof.errors import ProfileError
from clusterprof.runtime import cache_bytes
from tests.profile.examples import document
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
from tests.tiny import tiny_llama, tiny_phi3, tiny_qwen2, tiny_qwen3


def test_two_prompts_one_after_another_are_both_compressed(subject: Subject, kept_sets: list[Tensor]) -> None:
    size, new, layers = subject.compression.size, subject.new_tokens, subject.model.config.num_hidden_layers
    prompts = [subject.prompt(subject.long), subject.prompt(subject.long + 7, start=30)]
    texts = []
    with compress(subject.model, subject.compression):
        for prompt in prompts:
            result = generate(subject.model, prompt, new)
            # The last token was sampled and not fed.
            decoded = result.sequences.shape[1] - prompt.shape[1] - 1
            assert stored_lengths(result.cache) == [size + decoded] * layers
            assert {layer.evicted for layer in compressed_layers(result.cache)} == {prompt.shape[1] - size}
            assert result.cache.get_seq_length() == prompt.shape[1] + decoded
            texts.append(result.sequences)

    assert len(kept_sets) == 2 * layers
    assert not torch.equal(kept_sets[0], kept_sets[layers])
    # A model that has seen no other prompt says the same.
    fresh = copy.deepcopy(subject.model)
    with compress(fresh, subject.compression):
        assert torch.equal(generate(fresh, prompts[1], new).sequences, texts[1])


def test_compression_changes_something_here(tiny: Subject) -> None:
    # Otherwise the equalities in this folder would say nothing.
    prompt = tiny.prompt(tiny.long)
    plain = forward(tiny.model, prompt, cache=DynamicCache()).cache
    with compress(tiny.model, tiny.compression):
        compressed = forward(tiny.model, prompt).cache
    token = prompt[:, :1]
    difference = (
        forward(tiny.model, token, cache=plain).logits - forward(tiny.model, token, cache=compressed).logits
    )
    assert difference.abs().max() > 0.01


def test_prompts_of_at_most_size_are_left_whole(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    size, window = subject.compression.size, subject.window
    for length in (size, window - 1, 1):
        prompt = subject.prompt(length)
        expected = generate(subject.model, prompt, 6, output_logits=True)
        with warnings.catch_warnings(), compress(subject.model, subject.compression):
            warnings.simplefilter("error")
            result = generate(subject.model, prompt, 6, output_logits=True)
        assert [layer.evicted for layer in compressed_layers(result.cache)] == [0] * len(result.cache.layers)
        assert stored_lengths(result.cache) == stored_lengths(expected.cache)
        assert torch.equal(result.sequences, expected.sequences)
        # Not nearly: the same numbers in the same order.
        assert all(torch.equal(a, b) for a, b in zip(result.logits, expected.logits, strict=True))
    assert not caplog.records


def test_one_token_more_than_size_evicts_one(tiny: Subject) -> None:
    with compress(tiny.model, tiny.compression):
        cache = generate(tiny.model, tiny.prompt(tiny.compression.size + 1), 1).cache
    assert {layer.evicted for layer in compressed_layers(cache)} == {1}


def test_cache_holds_kv_heads_and_not_query_heads(subject: Subject) -> None:
    config = subject.model.config
    assert config.num_key_value_heads < config.num_attention_heads
    with compress(subject.model, subject.compression):
        cache = generate(subject.model, subject.prompt(subject.long), 1).cache
    head_dim, itemsize = config.head_dim, subject.model.dtype.itemsize
    per_layer = subject.compression.size * config.num_key_value_heads * head_dim * 2 * itemsize
    assert cache_bytes(cache) == per_layer * config.num_hidden_layers


def test_bytes_of_an_empty_cache() -> None:
    assert cache_bytes(DynamicCache(config=tiny_llama().config)) == cache_bytes(DynamicCache()) == 0


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
    check_batch_against_single_runs(subject, kept_sets, (subject.long, size - 3, window - 3))


@pytest.mark.parametrize("lengths", [(60, 51, 25), (26, 24, 1), (24, 8, 1), (1, 60, 33), (60, 60, 60)])
def test_left_padded_batch_around_size_and_window(lengths: tuple[int, ...], kept_sets: list[Tensor]) -> None:
    check_batch_against_single_runs(tiny_subject(tiny_llama(eos_token_id=None)), kept_sets, lengths)


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_qwen3, tiny_phi3])
def test_left_padded_batch_on_other_architectures(
    build: Callable[..., PreTrainedModel], kept_sets: list[Tensor]
) -> None:
    check_batch_against_single_runs(tiny_subject(build(eos_token_id=None)), kept_sets, (60, 21, 5))


def test_rows_of_a_batch_keep_all_their_tokens_while_these_fit(kept_sets: list[Tensor]) -> None:
    batch, mask = pad_left(
        [random_stream()[None, :60], random_stream()[None, :10], random_stream()[None, :3]]
    )
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        generate(model, batch, 1, attention_mask=mask)
    for kept in kept_sets:
        for row, length in ((1, 10), (2, 3)):
            assert set(range(60 - length, 60)) <= set(kept[row, 0].tolist())


def test_generate_without_the_context_is_untouched(tiny: Subject) -> None:
    prompt = tiny.prompt(tiny.long)
    before = generate(tiny.model, prompt, 6, output_logits=True)
    with compress(tiny.model, tiny.compression):
        generate(tiny.model, prompt, 2)
    after = generate(tiny.model, prompt, 6, output_logits=True)
    assert {type(layer) for layer in after.cache.layers} == {DynamicLayer}
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))


def test_a_profile_of_another_model_is_refused_unless_forced() -> None:
    subject = tiny_subject(tiny_llama(eos_token_id=None))
    profile = Profile.model_validate(document(), strict=False)
    with pytest.raises(ProfileError, match="made for another model"), compress(subject.model, profile):
        pytest.fail("entered")
    with compress(subject.model, profile, force=True):
        result = generate(subject.model, random_stream()[None, :300], 1)
    assert stored_lengths(result.cache) == [256, 256]


def test_bfloat16_is_compressed_in_place_and_reproducibly(kept_sets: list[Tensor]) -> None:
    model = tiny_llama(eos_token_id=None).bfloat16()
    prompt = random_stream()[None, :60]
    with compress(model, TINY):
        first = generate(model, prompt, 1)
        generate(model, prompt, 1)
    assert cache_bytes(first.cache) == 2 * 24 * 2 * 16 * 2 * 2
    assert all(layer.keys.dtype == torch.bfloat16 for layer in first.cache.layers)
    assert all(torch.equal(a, b) for a, b in zip(kept_sets[:2], kept_sets[2:], strict=True))
