"""Methods that keep whole words: `compress(tokenizer=...)` tells them where these begin."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import NGram, Observation
from clusterprof.runtime import StaticCompressedCache
from tests.runtime.models import full_attention
from tests.runtime.subjects import TINY, WINDOW, compressed_layers, forward, generate, pad_left
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
NGRAMS = TINY.model_copy(update={"method": NGram(n=2)})
SIZE = TINY.size
TEXTS = [
    "the red door, key 417; the blue door has key 25. red?",
    "one, two and three 4 five",
    "A cat sat on the mat: why? it was warm",
    "short one",
]

Build = Callable[..., PreTrainedModel]


def prompt(text: str) -> Tensor:
    """(1, length): one token per character."""
    return torch.tensor([TOKENIZER(text)["input_ids"]])


@torch.no_grad()
def kept_by_hand(model: PreTrainedModel, text: str) -> list[Tensor]:
    """Per compressed layer what n-gram keeps of a text, from the eager model's attention and words by a pattern."""
    model.set_attn_implementation("eager")
    weights = model(prompt(text), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    prefix, kv_heads = len(text) - WINDOW, model.config.num_key_value_heads
    begins = {match.start() for match in re.finditer(r"[a-zA-Z0-9]+|[^a-zA-Z0-9]", text)}
    words = torch.tensor([[position in begins for position in range(prefix)]])
    kept = []
    for layer in (layer for layer, full in zip(weights, full_attention(model), strict=True) if full):
        importance = layer[:, :, prefix:, :prefix].mean(dim=2).view(1, kv_heads, -1, prefix).mean(dim=2)
        observation = Observation(importance, window=WINDOW, word_starts=words)
        chosen = NGram(n=2).select(observation, SIZE - WINDOW)[0]
        kept.append(torch.cat([chosen, torch.arange(prefix, len(text)).expand(kv_heads, -1)], dim=-1))
    return kept


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
@torch.no_grad()
def test_keeps_whole_words(build: Build, kept_sets: list[Tensor]) -> None:
    model = build()
    with compress(model, NGRAMS, tokenizer=TOKENIZER):
        forward(model, prompt(TEXTS[0]))
    expected = kept_by_hand(model, TEXTS[0])
    assert len(kept_sets) == len(expected)
    assert all(torch.equal(kept[0], by_hand) for kept, by_hand in zip(kept_sets, expected, strict=True))


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_each_row_of_a_padded_batch_has_its_own_words(build: Build, kept_sets: list[Tensor]) -> None:
    model = build()
    batch, mask = pad_left([prompt(text) for text in TEXTS])
    with compress(model, NGRAMS, tokenizer=TOKENIZER):
        forward(model, batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for row, text in enumerate(TEXTS[:3]):
        padding = batch.shape[1] - len(text)
        for kept, by_hand in zip(kept_sets, kept_by_hand(model, text), strict=True):
            assert torch.equal(kept[row] - padding, by_hand)
    assert all(set(range(44, 53)) <= set(kept[3, 0].tolist()) for kept in kept_sets)


@torch.no_grad()
def test_generate_beams_drafts_and_later_turns() -> None:
    model = tiny_llama(eos_token_id=None)
    repeated = prompt(TEXTS[1] * 2)
    with compress(model, NGRAMS, tokenizer=TOKENIZER):
        expected = generate(model, repeated, 12).sequences
        drafted = generate(model, repeated, 12, prompt_lookup_num_tokens=4).sequences
        chunked = generate(model, repeated, 12, prefill_chunk_size=100).sequences
        static = StaticCompressedCache(model.config, NGRAMS, max_new_tokens=12)
        fixed = generate(model, repeated, 12, cache=static).sequences
        assert all(torch.equal(text, expected) for text in (drafted, chunked, fixed))
        beams = generate(model, repeated, 4, num_beams=3)
        assert {layer.stored for layer in compressed_layers(beams.cache)} == {SIZE + 3}
        # Compressed already: what comes later is appended.
        cache = DynamicCache(config=model.config)
        text = generate(model, repeated, 4, cache=cache).sequences
        generate(model, torch.cat([text, prompt("and?")], dim=1), 2, cache=cache)
    assert {layer.stored for layer in compressed_layers(cache)} == {SIZE + 3 + 1 + 4 + 1}


@torch.no_grad()
def test_a_prompt_within_the_size_needs_no_words() -> None:
    model = tiny_llama(eos_token_id=None)
    short = prompt(TEXTS[3])
    with compress(model, NGRAMS, tokenizer=TOKENIZER):
        cache = generate(model, short, 3, prefill_chunk_size=4).cache
        assert {layer.evicted for layer in compressed_layers(cache)} == {0}
        model(inputs_embeds=model.get_input_embeddings()(short))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, r"ngram keeps whole words, which only a tokenizer knows; .*tokenizer=tokenizer"),
        ({"tokenizer": TOKENIZER, "decode_budget": 40}, "leave decode_budget and later_turns"),
        ({"tokenizer": TOKENIZER, "later_turns": "compress"}, "leave decode_budget and later_turns"),
    ],
    ids=["no tokenizer", "decode_budget", "later_turns"],
)
def test_what_leaves_the_words_unknown_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompressionError, match=reason), compress(tiny_llama(), NGRAMS, **options):
        pytest.fail("entered")


def in_chunks(model: Any) -> None:
    generate(model, prompt(TEXTS[0]), 3, prefill_chunk_size=20)


def as_embeddings(model: Any) -> None:
    model(inputs_embeds=model.get_input_embeddings()(prompt(TEXTS[0])))


def after_a_turn_within_the_size(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    text = generate(model, prompt(TEXTS[3]), 3, cache=cache).sequences
    generate(model, torch.cat([text, prompt(TEXTS[0])], dim=1), 3, cache=cache)


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (in_chunks, "came in pieces; pass its ids in one forward"),
        (as_embeddings, "came as embeddings; pass its ids"),
        (after_a_turn_within_the_size, "came in pieces; .*no earlier turn in the cache"),
    ],
)
@torch.no_grad()
def test_a_prompt_whose_words_are_not_known_is_refused(do: Callable[[Any], None], reason: str) -> None:
    model = tiny_llama(eos_token_id=None)
    with (
        compress(model, NGRAMS, tokenizer=TOKENIZER),
        pytest.raises(CompressionError, match=f"ngram reads the words of a prompt .*{reason}"),
    ):
        do(model)
