"""A prompt that generate() cuts into chunks: compressed once, as if it had come in one forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from tests.runtime.subjects import (
    TINY,
    WINDOW,
    compressed_layers,
    fed_lengths,
    forward,
    generate,
    model_state,
    pad_left,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

PROMPT = random_stream()[None, :60]
Build = Callable[..., PreTrainedModel]


def compressed_as_whole(
    model: PreTrainedModel, prompt: Tensor, chunk: int, kept_sets: list[Tensor], **options: Any
) -> Any:
    """Compare a prompt in chunks with the same in one forward; returns the former's result."""
    kept_sets.clear()
    with compress(model, TINY):
        whole = generate(model, prompt, 12, output_logits=True, **options)
        kept_of_whole = list(kept_sets)
        kept_sets.clear()
        with fed_lengths(model) as fed:
            chunked = generate(model, prompt, 12, output_logits=True, prefill_chunk_size=chunk, **options)
    # Independent of what was compressed: the prompt really came in these pieces.
    full, rest = divmod(prompt.shape[1], chunk)
    assert fed == [chunk] * full + [rest] * (rest > 0) + [1] * 11
    assert len(kept_sets) == len(kept_of_whole) == len(compressed_layers(whole.cache))
    assert all(torch.equal(a, b) for a, b in zip(kept_sets, kept_of_whole, strict=True))
    torch.testing.assert_close(chunked.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(chunked.sequences, whole.sequences)
    assert stored_lengths(chunked.cache) == stored_lengths(whole.cache)
    return chunked


# The last chunk has 4, 4, 4, 12, 1, 60 and 60 tokens: often fewer than the window.
@pytest.mark.parametrize("chunk", [1, 7, WINDOW, TINY.size, 59, 60, 200])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
@torch.no_grad()
def test_any_chunk_size(build: Build, chunk: int, kept_sets: list[Tensor]) -> None:
    compressed_as_whole(build(eos_token_id=None), PROMPT, chunk, kept_sets)


@pytest.mark.parametrize("length", [TINY.size, TINY.size + 1])
@torch.no_grad()
def test_a_prompt_around_the_size(length: int, kept_sets: list[Tensor]) -> None:
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        whole = generate(model, PROMPT[:, :length], 12)
        chunked = generate(model, PROMPT[:, :length], 12, prefill_chunk_size=7)
    assert [kept.shape[2] for kept in kept_sets] == [TINY.size] * (4 if length > TINY.size else 0)
    assert torch.equal(chunked.sequences, whole.sequences)


@pytest.mark.parametrize("chunk", [7, 50, 59])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_a_padded_batch(build: Build, chunk: int, kept_sets: list[Tensor]) -> None:
    # In the first chunks there is nothing but padding in the short rows.
    model = build(eos_token_id=None)
    prompts = [PROMPT, PROMPT[:, 10:40], PROMPT[:, :6]]
    batch, mask = pad_left(prompts)
    result = compressed_as_whole(model, batch, chunk, kept_sets, attention_mask=mask)
    with compress(model, TINY):
        alone = [generate(model, p, 12, prefill_chunk_size=chunk).sequences[:, p.shape[1] :] for p in prompts]
    assert torch.equal(result.sequences[:, 60:], torch.cat(alone))


@torch.no_grad()
def test_beams(kept_sets: list[Tensor]) -> None:
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        whole = generate(model, PROMPT, 8, num_beams=3, num_return_sequences=2)
        chunked = generate(model, PROMPT, 8, num_beams=3, num_return_sequences=2, prefill_chunk_size=13)
    assert all(torch.equal(a, b) for a, b in zip(kept_sets[:2], kept_sets[2:], strict=True))
    assert torch.equal(chunked.sequences, whole.sequences)


@pytest.mark.parametrize("first", [PROMPT, PROMPT[:, :20]], ids=["compressed before", "outgrows the size"])
@pytest.mark.parametrize("later_turns", ["append", "compress"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_a_second_turn(build: Build, later_turns: Any, first: Tensor, kept_sets: list[Tensor]) -> None:
    model = build(eos_token_id=None)
    question = random_stream(seed=4)[None, :30]
    texts, kept = [], []
    for chunk in (None, 7):
        cache = DynamicCache(config=model.config)
        kept_sets.clear()
        with compress(model, TINY, later_turns=later_turns):
            answered = generate(model, first, 5, cache=cache, prefill_chunk_size=chunk).sequences
            turn = torch.cat([answered, question], dim=1)
            with fed_lengths(model) as fed:
                texts.append(generate(model, turn, 10, cache=cache, prefill_chunk_size=chunk).sequences)
        # The last answer token comes with the question.
        assert fed[:-9] == ([31] if chunk is None else [7, 7, 7, 7, 3])
        kept.append(list(kept_sets))
    assert torch.equal(*texts)
    compressions = (first.shape[1] > TINY.size) + (later_turns == "compress" or first.shape[1] <= TINY.size)
    assert len(kept[0]) == len(kept[1]) == compressions * len(compressed_layers(cache))
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def interrupt(model: PreTrainedModel, cache: DynamicCache, after: int) -> None:
    """Begin to prefill the prompt in chunks of 7; the user stops it after so many."""
    forwards = 0

    def stop(*args: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards > after:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(model, PROMPT, 12, cache=cache, prefill_chunk_size=7)
    finally:
        handle.remove()


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_an_exception_between_chunks(build: Build, after: int, kept_sets: list[Tensor]) -> None:
    model = build(eos_token_id=None)
    with compress(model, TINY):
        expected = generate(model, PROMPT, 12).sequences
    layers, before = len(kept_sets), model_state(model)
    with compress(model, TINY):
        cache = DynamicCache(config=model.config)
        interrupt(model, cache, after)
        assert cache.get_seq_length() == 7 * after
        # Another prompt is not taken for the rest of this one.
        assert torch.equal(generate(model, PROMPT, 12).sequences, expected)
        # The rest of this one goes on where it stopped, with or without chunks.
        assert torch.equal(generate(model, PROMPT, 12, cache=cache).sequences, expected)
    assert model_state(model) == before
    assert len(kept_sets) == 3 * layers
    assert all(torch.equal(kept, kept_sets[i % layers]) for i, kept in enumerate(kept_sets))


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize("tokens", [1, 20])
@torch.no_grad()
def test_an_unfinished_prompt_is_not_decoded_uncompressed(after: int, tokens: int) -> None:
    model = tiny_llama(eos_token_id=None)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        interrupt(model, cache, after)
        with pytest.raises(CompressionError, match=f"came in pieces \\({7 * after} tokens, then {tokens}"):
            forward(model, PROMPT[:, :tokens], cache=cache)


@torch.no_grad()
def test_chunks_outside_generate_are_refused() -> None:
    model = tiny_gemma3()
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        forward(model, PROMPT[:, :30], cache=cache)
        with pytest.raises(
            CompressionError, match=r"came in pieces \(30 tokens, then 30\).*prefill_chunk_size"
        ):
            forward(model, PROMPT[:, 30:], cache=cache)
