"""Assisted generation: drafts are verified against the compressed prompt, and never compressed with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import StreamingLLM
from clusterprof.profile import Compression
from tests.runtime.subjects import (
    TINY,
    WINDOW,
    compressed_layers,
    forward,
    generate,
    greedy_singly,
    random_stream,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

PROMPT = random_stream()[None, :60]
# Three times the same, so that the prompt itself has drafts to offer.
REPEATED = PROMPT[:, :20].repeat(1, 3)
# Its kept set is known beforehand, and the same in every layer and head.
SINKS = Compression(size=24, window=WINDOW, method=StreamingLLM())
EVICTED = slice(4, 60 - 20)
SLIDING_WINDOW = 32

Build = Callable[..., PreTrainedModel]


class Rounds(BaseStreamer):
    """Counts the tokens that each round of drafting adds."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, value: Tensor) -> None:
        self.lengths.append(value.numel())

    def end(self) -> None:
        pass


def drafting(source: str, build: Build) -> dict[str, Any]:
    """Options of generate() that let drafts come from the prompt, a copy of the model, or another one."""
    if source == "prompt":
        return {"prompt_lookup_num_tokens": 4}
    # Two of the same build have the same weights; this one goes other ways after some tokens.
    assistant = build(**({} if source == "copy" else {"rms_norm_eps": 0.1}))
    settings: Any = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 4, "constant"
    settings.assistant_confidence_threshold = 0
    return {"assistant_model": assistant}


def logits_without_cache(model: PreTrainedModel, text: Tensor, first_blind: int) -> Tensor:
    """One forward of a whole text in which no token from ``first_blind`` on sees what was evicted of the prompt."""
    length = text.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = key <= query
    seen = causal.clone()
    seen[first_blind:, EVICTED] = False
    masks = {"full_attention": seen, "sliding_attention": causal & (query - key < SLIDING_WINDOW)}
    additive = {
        kind: torch.zeros(1, 1, length, length).masked_fill(~mask, -torch.inf) for kind, mask in masks.items()
    }
    hybrid = hasattr(model.config, "sliding_window")
    output = forward(model, text, attention_mask=additive if hybrid else additive["full_attention"])
    logits: Tensor = output.logits
    return logits


@pytest.mark.parametrize("source", ["other model", "copy", "prompt"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_says_what_the_model_says_with_the_evicted_tokens_hidden(build: Build, source: str) -> None:
    model, rounds, drafts = build(eos_token_id=None), Rounds(), drafting(source, build)
    with compress(model, SINKS):
        result = generate(model, REPEATED, 30, streamer=rounds, output_logits=True, **drafts)
    of_prompt, first, *later = rounds.lengths
    assert of_prompt == 60
    assert sum([first, *later]) == 30
    # Drafts of every kind: accepted together with the prompt, accepted later, and taken back.
    assert first > 1 or source != "copy"
    assert max(later) > 1
    assert min(later) < 5
    assert result.cache.get_seq_length() == 60 + 29
    # Drafts in the prompt's own forward see all of it; the last of the first tokens was not fed there.
    expected = logits_without_cache(model, result.sequences, 60 + first - 1)[:, 59:-1]
    assert expected.argmax(-1).tolist() == result.sequences[:, 60:].tolist()
    torch.testing.assert_close(torch.stack(result.logits, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("source", ["other model", "copy", "prompt"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
@torch.no_grad()
def test_keeps_what_a_run_without_drafts_keeps(build: Build, source: str, kept_sets: list[Tensor]) -> None:
    model, drafts = build(eos_token_id=None), drafting(source, build)
    with compress(model, TINY):
        generate(model, REPEATED, 1)
        expected = list(kept_sets)
        kept_sets.clear()
        cache = generate(model, REPEATED, 20, **drafts).cache
    assert {layer.stored for layer in compressed_layers(cache)} == {TINY.size + 19}
    assert len(kept_sets) == len(expected) == len(compressed_layers(cache))
    assert all(torch.equal(a, b) for a, b in zip(kept_sets, expected, strict=True))


@pytest.mark.parametrize("source", ["copy", "prompt"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_a_prompt_within_the_size_is_answered_as_without_drafts(build: Build, source: str) -> None:
    model, drafts, prompt = build(eos_token_id=None), drafting(source, build), REPEATED[:, 12:36]
    expected = generate(model, prompt, 30).sequences
    with compress(model, TINY):
        result = generate(model, prompt, 30, **drafts)
    assert torch.equal(result.sequences, expected)
    assert {layer.evicted for layer in compressed_layers(result.cache)} == {0}


@torch.no_grad()
def test_sampling_from_the_likeliest_token_is_greedy() -> None:
    model, drafts = tiny_llama(eos_token_id=None), drafting("copy", tiny_llama)
    with compress(model, TINY):
        greedy = generate(model, PROMPT, 20, **drafts)
        sampled = generate(model, PROMPT, 20, do_sample=True, top_k=1, **drafts)
    assert torch.equal(sampled.sequences, greedy.sequences)


@pytest.mark.parametrize("inside", [True, False])
@torch.no_grad()
def test_a_conversation_goes_on_without_drafts(inside: bool) -> None:
    model, drafts = tiny_llama(eos_token_id=None), drafting("copy", tiny_llama)
    with compress(model, TINY):
        answered = generate(model, PROMPT, 10, **drafts)
        feed = torch.cat([answered.sequences[:, -1:], random_stream(seed=4)[None, :9]], dim=1)
        turn = torch.cat([answered.sequences, feed[:, 1:]], dim=1)
        if inside:
            text = generate(model, turn, 8, cache=answered.cache).sequences
    if not inside:
        text = generate(model, turn, 8, cache=answered.cache).sequences
    # The same cache, made again, and every token fed alone.
    with compress(model, TINY):
        again = generate(model, PROMPT, 10, **drafts).cache
    assert greedy_singly(model, again, feed, 8) == text[0, turn.shape[1] :].tolist()


@torch.no_grad()
def test_drafts_for_a_filled_cache_are_refused() -> None:
    # Without compression, transformers answers as if the conversation had been said twice.
    model = tiny_llama(eos_token_id=None)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        answered = generate(model, PROMPT, 5, cache=cache).sequences
        for source in ("copy", "prompt"):
            with pytest.raises(CompressionError, match=r"feeds all 65 tokens .* holds 64 of them already"):
                generate(model, answered, 5, cache=cache, **drafting(source, tiny_llama))


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_a_model_that_drafts_inside_the_context_is_refused(build: Build) -> None:
    model, assistant = build(eos_token_id=None), build()
    with compress(model, TINY), compress(assistant, TINY):
        expected = generate(model, PROMPT, 5).sequences
        for drafts in (
            {"assistant_model": assistant},
            {"assistant_model": model},
            {"assistant_early_exit": 1},
        ):
            with pytest.raises(CompressionError, match="assistant model cannot draft inside compress"):
                generate(model, PROMPT, 5, **drafts)
            assert torch.equal(generate(model, PROMPT, 5).sequences, expected)


@torch.no_grad()
def test_decode_budget_and_drafts_exclude_each_other() -> None:
    model, drafts = tiny_llama(eos_token_id=None), drafting("copy", tiny_llama)
    with compress(model, TINY, decode_budget=18):
        with pytest.raises(CompressionError, match="decode_budget does not work with assisted generation"):
            generate(model, PROMPT, 5, **drafts)
        generate(model, PROMPT, 5)


@torch.no_grad()
def test_an_answer_is_taken_back_and_given_again() -> None:
    model = tiny_llama(eos_token_id=None)
    cache: Any = DynamicCache(config=model.config)
    with compress(model, TINY):
        text = generate(model, PROMPT, 12, cache=cache).sequences
        cache.crop(-6)
        assert cache.get_seq_length() == 65
        assert torch.equal(generate(model, text[:, :66], 6, cache=cache).sequences, text)
        # Down to the prompt, and not into it.
        with pytest.raises(
            CompressionError, match="Only the last 11 tokens of the cache can be taken back, not 12"
        ):
            cache.crop(-12)
        cache.crop(-11)
        assert cache.get_seq_length() == 60
        assert torch.equal(generate(model, text[:, :61], 11, cache=cache).sequences, text)
