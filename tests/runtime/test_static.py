"""The cache of fixed shapes: it says what the growing one says, and says when it is full."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.runtime import StaticCompressedCache, cache_bytes
from clusterprof.runtime.attention import decoder_of
from tests.runtime.subjects import (
    TINY,
    forward,
    generate,
    greedy_singly,
    pad_left,
    random_stream,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

PROMPT = random_stream()[None, :60]
SHORT = PROMPT[:, :10]
ROOM = 12
Build = Callable[..., PreTrainedModel]

models = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])


def static_cache(model: PreTrainedModel, room: int = ROOM) -> Any:
    return StaticCompressedCache(model.config, TINY, max_new_tokens=room)


@models
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_says_what_the_growing_cache_says(build: Build, attention: str) -> None:
    model = build(eos_token_id=None)
    model.set_attn_implementation(attention)
    batch, mask = pad_left([PROMPT, PROMPT[:, 10:40], PROMPT[:, :6]])
    cache = static_cache(model)
    runs: list[tuple[Tensor, dict[str, Any]]] = [
        (PROMPT, {}),
        (SHORT, {}),
        (batch, {"attention_mask": mask}),
        (PROMPT, {"prefill_chunk_size": 7}),
        (PROMPT, {"num_beams": 3}),
        (batch, {"attention_mask": mask, "prefill_chunk_size": 50}),
    ]
    for prompt, options in runs:
        with compress(model, TINY):
            expected = generate(model, prompt, ROOM, **options)
            found = generate(model, prompt, ROOM, cache=cache, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert int(cache.get_seq_length()) == prompt.shape[1] + ROOM - 1
        cache.reset()


@models
@torch.no_grad()
def test_decodes_outside_the_context_and_token_by_token(build: Build) -> None:
    model = build(eos_token_id=None)
    with compress(model, TINY):
        expected = generate(model, PROMPT, ROOM).sequences
        inside, outside = static_cache(model), static_cache(model)
        first = generate(model, PROMPT, 5, cache=outside).sequences
        forward(model, PROMPT, cache=inside)
        singly = greedy_singly(model, inside, expected[:, 60:61], ROOM - 1)
    assert singly == expected[0, 61:].tolist()
    assert torch.equal(generate(model, first, ROOM - 5, cache=outside).sequences, expected)


@pytest.mark.parametrize("rows", [1, 3])
@models
@torch.no_grad()
def test_bytes(build: Build, rows: int) -> None:
    model = build(eos_token_id=None)
    cache = static_cache(model)
    with compress(model, TINY):
        generate(model, PROMPT.repeat(rows, 1), ROOM, cache=cache)
    # Two KV heads of 16 float32 numbers, keys and values; a sliding layer holds its window of 32.
    slots = TINY.size + ROOM + (32 if build is tiny_gemma3 else TINY.size + ROOM)
    assert cache_bytes(cache) == rows * slots * 2 * 16 * 2 * 4


MODES: dict[str, Callable[[], Any]] = {"inference": torch.inference_mode, "no_grad": torch.no_grad}


@pytest.mark.parametrize("decode", MODES)
@pytest.mark.parametrize("prefill", MODES)
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_gradient_modes(build: Build, prefill: str, decode: str) -> None:
    model = build(eos_token_id=None)
    cache = static_cache(model)
    with compress(model, TINY):
        # The second prompt comes in the other mode, in the same memory.
        for modes in ((prefill, decode), (decode, prefill)):
            with torch.no_grad():
                expected = generate(model, PROMPT, ROOM).sequences[0, 60:].tolist()
            with MODES[modes[0]]():
                tokens = [int(forward(model, PROMPT, cache=cache).logits[0, -1].argmax())]
            with MODES[modes[1]]():
                tokens += greedy_singly(model, cache, torch.tensor([tokens]), ROOM - 1)
            assert tokens == expected
            cache.reset()


@models
@torch.no_grad()
def test_a_full_cache_says_so(build: Build) -> None:
    model = build(eos_token_id=None)
    cache = static_cache(model)
    message = "full: it was made for 12 tokens after the prompt; make it with a higher max_new_tokens"
    with compress(model, TINY):
        # The last token of an answer is not fed, so that one more fits.
        generate(model, PROMPT, ROOM + 1, cache=cache)
        assert int(cache.get_seq_length()) == 60 + ROOM
        with pytest.raises(CompressionError, match=message):
            forward(model, PROMPT[:, :1], cache=cache)
        cache.reset()
        with pytest.raises(CompressionError, match=message):
            generate(model, PROMPT, ROOM + 2, cache=cache)
        cache.reset()
        # A prompt within the size leaves its place to the answer.
        generate(model, SHORT, ROOM + TINY.size - 10 + 1, cache=cache)


@pytest.mark.parametrize("length", [30, 71, 72, 80])
@torch.no_grad()
def test_a_second_prompt_without_a_reset_is_refused(length: int) -> None:
    model = tiny_llama(eos_token_id=None)
    cache = static_cache(model)
    prompt = random_stream(seed=5)[None, :length]
    with compress(model, TINY):
        generate(model, PROMPT, ROOM, cache=cache)
        reason = "already holds 71 tokens" if length <= 71 else r"call its reset\(\) before the next"
        with pytest.raises(CompressionError, match=reason):
            generate(model, prompt, 1, cache=cache)
        with pytest.raises(CompressionError, match=r"call its reset\(\) before the next"):
            forward(model, prompt, cache=cache)
        cache.reset()
        generate(model, prompt, 1, cache=cache)


def test_what_contradicts_a_static_cache_is_refused() -> None:
    model = tiny_llama(eos_token_id=None)
    with pytest.raises(CompressionError, match="max_new_tokens is 0; it must be at least 1"):
        static_cache(model, room=0)
    with compress(model, TINY, decode_budget=20):  # noqa: SIM117
        with pytest.raises(
            CompressionError, match="decode_budget does not work with a StaticCompressedCache"
        ):
            forward(model, PROMPT, cache=static_cache(model))
    with compress(model, TINY.model_copy(update={"size": TINY.size + ROOM})):  # noqa: SIM117
        with pytest.raises(CompressionError, match="was made for a size of 24, and the profile's is 36"):
            forward(model, PROMPT, cache=static_cache(model))
    cache = static_cache(model)
    forward(model, PROMPT, cache=cache)
    with pytest.raises(CompressionError, match="prefilled outside compress"):
        forward(model, PROMPT[:, :1], cache=cache)
    other = tiny_gemma3(eos_token_id=None)
    with compress(other, TINY), pytest.raises(CompressionError, match="made for another model"):
        forward(other, PROMPT, cache=static_cache(model))
    assert decoder_of(other).config._attn_implementation == "sdpa"
