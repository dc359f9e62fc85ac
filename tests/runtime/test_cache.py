"""The compressed cache in the user's hands: conversations, beams, samples, copies."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from tests.runtime.models import expected_lengths
from tests.runtime.subjects import (
    TINY,
    WINDOW,
    Subject,
    compressed_layers,
    fed_lengths,
    forward,
    generate,
    greedy_singly,
    pad_left,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT = random_stream()[None, :60]


# Row: second turn on the compressed cache.
@torch.no_grad()
def test_second_turn_on_a_compressed_cache(subject: Subject) -> None:
    model, new = subject.model, subject.new_tokens
    prompt, question = subject.prompt(subject.long), subject.prompt(9, start=subject.long)
    cache = DynamicCache(config=model.config)
    with compress(model, subject.compression), fed_lengths(model) as fed:
        first = generate(model, prompt, new, cache=cache)
        assert first.cache is cache
        second_prompt = torch.cat([first.sequences, question], dim=1)
        fed.clear()
        second = generate(model, second_prompt, new, cache=cache)
    decoded = first.sequences.shape[1] - prompt.shape[1]
    # The last answer token was not fed yet.
    assert fed[0] == 1 + question.shape[1]
    assert set(fed[1:]) <= {1}
    assert cache.get_seq_length() == second.sequences.shape[1] - 1
    assert {layer.evicted for layer in compressed_layers(cache)} == {subject.long - subject.compression.size}

    # The same conversation with every token fed alone, as a run that never stopped would.
    again = DynamicCache(config=model.config)
    with compress(model, subject.compression):
        forward(model, prompt, cache=again)
    answer = first.sequences[:, -decoded:]
    singly = greedy_singly(model, again, torch.cat([answer, question], dim=1), new)
    assert singly[: second.sequences.shape[1] - second_prompt.shape[1]] == (
        second.sequences[0, second_prompt.shape[1] :].tolist()
    )


@torch.no_grad()
def test_second_turn_of_a_batch_and_of_a_hybrid_model() -> None:
    for model in (tiny_llama(eos_token_id=None), tiny_gemma3(eos_token_id=None)):
        prompts = [PROMPT, PROMPT[:, 10:40], PROMPT[:, :6]]
        batch, mask = pad_left(prompts)
        question = random_stream(seed=2)[None, :7].repeat(3, 1)
        texts = []
        for ids, attention_mask in [(batch, mask), *((p, torch.ones_like(p)) for p in prompts)]:
            cache = DynamicCache(config=model.config)
            with compress(model, TINY):
                first = generate(model, ids, 5, cache=cache, attention_mask=attention_mask).sequences
                turn = torch.cat([first, question[: len(ids)]], dim=1)
                turn_mask = torch.nn.functional.pad(attention_mask, (0, 12), value=1)
                second = generate(model, turn, 10, cache=cache, attention_mask=turn_mask).sequences
            texts.append(second[:, ids.shape[1] :])
        assert torch.equal(texts[0], torch.cat(texts[1:]))


@torch.no_grad()
def test_second_turn_is_not_compressed_however_long() -> None:
    model = tiny_llama(eos_token_id=None)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        first = generate(model, PROMPT, 3, cache=cache).sequences
        generate(model, torch.cat([first, PROMPT], dim=1), 1, cache=cache)
    assert stored_lengths(cache) == [24 + 2 + 61] * 2


@torch.no_grad()
def test_decoding_goes_on_outside_the_context(tiny: Subject) -> None:
    caches = [DynamicCache(config=tiny.model.config) for _ in range(2)]
    with compress(tiny.model, TINY):
        inside = generate(tiny.model, PROMPT, 12, cache=caches[0]).sequences
        forward(tiny.model, PROMPT, cache=caches[1])
    outside = greedy_singly(tiny.model, caches[1], inside[:, 60:61], 11)
    assert outside == inside[0, 61:].tolist()


@pytest.mark.parametrize("other", [tiny_gemma3, lambda: tiny_llama(num_hidden_layers=3)])
def test_a_cache_for_another_model_is_refused(other: Any) -> None:
    model = tiny_llama(eos_token_id=None)
    another = other()
    cache: Any = DynamicCache(config=another.config)
    with compress(another, TINY):
        forward(another, PROMPT, cache=cache)
    cache.reset()
    with pytest.raises(CompressionError, match="made for another model"), compress(model, TINY):
        generate(model, PROMPT, 1, cache=cache)


@pytest.mark.parametrize("second", [3, 40], ids=["shorter than the window", "longer"])
def test_the_turn_that_outgrows_the_size_is_compressed(second: int, kept_sets: list[Tensor]) -> None:
    model = tiny_llama(eos_token_id=None)
    first = PROMPT[:, :20]
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        answered = generate(model, first, 4, cache=cache).sequences
        assert stored_lengths(cache) == [23, 23]
        turn = torch.cat([answered, PROMPT[:, 20 : 20 + second]], dim=1)
        logits = forward(model, turn[:, 23:], cache=cache).logits
    assert stored_lengths(cache) == [24, 24]
    assert cache.get_seq_length() == turn.shape[1]
    # The prefill of that turn itself still saw everything.
    assert torch.allclose(logits, forward(model, turn).logits[:, 23:], atol=1e-5)
    window = torch.arange(turn.shape[1] - WINDOW, turn.shape[1])
    assert all((kept[..., -WINDOW:] == window).all() for kept in kept_sets)


def test_a_batch_outgrows_the_size_in_a_later_turn_as_its_rows_do() -> None:
    model = tiny_llama(eos_token_id=None)
    rows = [PROMPT[:, :20], PROMPT[:, 30:45]]
    batch, mask = pad_left(rows)
    more = random_stream(seed=5)[:60].view(2, 30)

    def run(prompt: Tensor, mask: Tensor, later: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        with compress(model, TINY):
            forward(
                model,
                prompt,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                cache=cache,
            )
            one = forward(
                model,
                later[:, :1],
                attention_mask=torch.cat([mask, torch.ones_like(later[:, :1])], dim=1),
                position_ids=mask.sum(-1, keepdim=True),
                cache=cache,
            )
            assert one is not None
            full = torch.cat([mask, torch.ones_like(later)], dim=1)
            positions = (full.cumsum(-1) - 1)[:, -later.shape[1] + 1 :]
            forward(model, later[:, 1:], attention_mask=full, position_ids=positions, cache=cache)
            token = later[:, :1]
            full = torch.cat([full, torch.ones_like(token)], dim=1)
            output = forward(
                model, token, attention_mask=full, position_ids=full.sum(-1, keepdim=True) - 1, cache=cache
            )
            logits: Tensor = output.logits
            return logits

    together = run(batch, mask, more)
    for i, row in enumerate(rows):
        alone = run(row, torch.ones_like(row), more[i : i + 1])
        assert torch.allclose(together[i : i + 1], alone, atol=1e-4)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_a_cache_that_was_reset_compresses_the_next_prompt(build: Any, kept_sets: list[Tensor]) -> None:
    model = build(eos_token_id=None)
    cache: Any = DynamicCache(config=model.config)
    with compress(model, TINY):
        expected = generate(model, PROMPT[:, :40], 5).sequences
        generate(model, PROMPT, 5, cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        kept_sets.clear()
        assert torch.equal(generate(model, PROMPT[:, :40], 5, cache=cache).sequences, expected)
    assert kept_sets
    assert {layer.evicted for layer in compressed_layers(cache)} == {16}


def test_a_cache_that_was_reset_refuses_what_a_new_one_does() -> None:
    model = tiny_llama(eos_token_id=None)
    cache: Any = DynamicCache(config=model.config)
    for refused in ("chunks", "outside"):
        with compress(model, TINY):
            generate(model, PROMPT, 5, cache=cache)
        cache.reset()
        if refused == "chunks":
            with compress(model, TINY):
                forward(model, PROMPT[:, :30], cache=cache)
                with pytest.raises(CompressionError, match="came in pieces"):
                    forward(model, PROMPT[:, 30:], cache=cache)
        else:
            forward(model, PROMPT, cache=cache)
            with pytest.raises(CompressionError, match="prefilled outside"):
                forward(model, PROMPT[:, :1], cache=cache)
        cache.reset()


@torch.no_grad()
def test_a_copy_of_a_prefilled_cache_answers_as_the_original() -> None:
    model = tiny_llama(eos_token_id=None)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        forward(model, PROMPT, cache=cache)
    other = copy.deepcopy(cache)
    feed = PROMPT[:, :4]
    assert greedy_singly(model, other, feed, 8) == greedy_singly(model, cache, feed, 8)
    assert stored_lengths(cache) == stored_lengths(other) == [24 + 4 + 7] * 2


@torch.no_grad()
def test_decoded_tokens_can_be_taken_back_and_prompt_tokens_cannot() -> None:
    model = tiny_llama()
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        forward(model, PROMPT, cache=cache)
        cache.crop(0)
        expected = forward(model, PROMPT[:, 5:6], cache=cache).logits
        forward(model, PROMPT[:, :3], cache=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 60
        torch.testing.assert_close(forward(model, PROMPT[:, 5:6], cache=cache).logits, expected)
    with pytest.raises(
        CompressionError, match="Only the last 1 tokens of the cache can be taken back, not 2"
    ):
        cache.crop(-2)


def test_what_was_never_compressed_can_be_taken_back() -> None:
    cache = DynamicCache(config=tiny_llama().config)
    cache.crop(-1)
    with compress(tiny_llama(), TINY):
        forward(tiny_llama(), PROMPT[:, :20], cache=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 15


def log_probability(model: PreTrainedModel, prompt: Tensor, answer: Tensor) -> Tensor:
    """Of each answer token ``(1, tokens)``, with the prompt compressed and the answer fed."""
    with compress(model, TINY):
        output = forward(model, prompt)
    log_probs = [output.logits[:, -1]]
    log_probs += [
        forward(model, token.view(1, 1), cache=output.cache).logits[:, -1] for token in answer[0, :-1]
    ]
    return torch.cat(log_probs).log_softmax(-1).gather(1, answer[0, :, None])[:, 0]


# Row: beam search, num_return_sequences, assisted generation, quantized cache, static cache, `torch.compile`.
@torch.no_grad()
def test_beam_search_reorders_the_compressed_cache(tiny: Subject) -> None:
    with compress(tiny.model, TINY):
        result = generate(
            tiny.model,
            PROMPT,
            7,
            num_beams=4,
            num_return_sequences=3,
            output_scores=True,
            length_penalty=0.0,
        )
    assert stored_lengths(result.cache) == expected_lengths(tiny.model, 24 + 6, 60 + 6)
    assert result.cache.layers[0].keys.shape[0] == 4
    assert len({tuple(row) for row in result.sequences.tolist()}) == 3
    for sequence, score in zip(result.sequences, result.sequences_scores, strict=True):
        found = log_probability(tiny.model, PROMPT, sequence[None, 60:]).sum()
        torch.testing.assert_close(found, score, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_beams_of_a_padded_batch_are_those_of_single_runs() -> None:
    model = tiny_llama(eos_token_id=None)
    prompts = [PROMPT, PROMPT[:, 10:40], PROMPT[:, :6]]
    batch, mask = pad_left(prompts)
    with compress(model, TINY):
        together = generate(model, batch, 8, num_beams=3, attention_mask=mask).sequences[:, 60:]
        alone = [generate(model, p, 8, num_beams=3).sequences[:, p.shape[1] :] for p in prompts]
    assert torch.equal(together, torch.cat(alone))


@torch.no_grad()
def test_samples_share_one_compressed_prompt(tiny: Subject) -> None:
    torch.manual_seed(0)
    with compress(tiny.model, TINY):
        result = generate(
            tiny.model, PROMPT, 6, do_sample=True, top_k=0, num_return_sequences=3, output_logits=True
        )
    assert stored_lengths(result.cache) == expected_lengths(tiny.model, 24 + 5, 60 + 5)
    assert len({tuple(row) for row in result.sequences.tolist()}) == 3
    for row, sequence in enumerate(result.sequences):
        answer = sequence[None, 60:]
        found = torch.stack([logits[row] for logits in result.logits]).log_softmax(-1)
        found = found.gather(1, answer[0, :, None])[:, 0]
        torch.testing.assert_close(found, log_probability(tiny.model, PROMPT, answer), atol=1e-4, rtol=1e-4)
