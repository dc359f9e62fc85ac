"""A compressed run against the untouched model whose attention mask hides the evicted positions."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.methods import Method
from clusterprof.profile import Compression
from tests.runtime.subjects import TINY, WINDOW, forward, pad_left, random_stream, step_logits, stored_lengths
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

STEPS = 20
SIZE = TINY.size


# By row and KV head.
Kept = tuple[tuple[tuple[int, ...], ...], ...]


class Handpicked(Method):
    """Keeps the prefix positions it was told, given from each row's first token on."""

    name: Literal["handpicked"] = "handpicked"
    lengths: tuple[int, ...]
    positions: Kept

    def select(self, importance: Tensor, budget: int) -> Tensor:
        # Rows of different length come one by one, each of its own length.
        rows = [row for row, length in enumerate(self.lengths) if length - WINDOW == importance.shape[2]]
        kept = torch.tensor([self.positions[row] for row in rows])
        assert kept.shape == (*importance.shape[:2], budget)
        return kept


def pick(lengths: list[int], kv_heads: int) -> Kept:
    """Random prefix positions per row and KV head; a row of at most `SIZE` tokens keeps all it has."""
    generator = torch.Generator().manual_seed(0)
    longest, budget = max(lengths), SIZE - WINDOW

    def choose(length: int) -> tuple[int, ...]:
        tokens = max(length - WINDOW, 0)
        order = torch.randperm(tokens, generator=generator).tolist() + list(range(tokens, longest - WINDOW))
        return tuple(sorted(order[:budget]))

    return tuple(tuple(choose(length) for _ in range(kv_heads)) for length in lengths)


def keeping(kept: Kept, lengths: list[int]) -> Compression:
    # Not one of the methods a profile may hold, hence past the checks.
    return TINY.model_copy(update={"method": Handpicked(positions=kept, lengths=tuple(lengths))})


def hidden(kept: Kept, lengths: list[int], heads: int) -> Tensor:
    """Additive mask ``(rows, heads, 1, longest)`` over the prompt: -inf where evicted or padded."""
    longest = max(lengths)
    mask = torch.full((len(lengths), heads, 1, longest), -torch.inf)
    for row, length in enumerate(lengths):
        for head in range(heads):
            chosen = kept[row][head * len(kept[row]) // heads]
            for position in chosen if length > SIZE else range(length):
                mask[row, head, 0, longest - length + position] = 0
            mask[row, head, 0, longest - min(WINDOW, length) :] = 0
    return mask


def grown(mask: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, tokens))


def prefill(model: PreTrainedModel, batch: Tensor, mask: Tensor) -> Cache:
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    forward(model, batch, attention_mask=mask, position_ids=positions, cache=cache)
    return cache


def check(model: PreTrainedModel, lengths: list[int]) -> None:
    config = model.config
    kept = pick(lengths, config.num_key_value_heads)
    stream = random_stream()
    batch, mask = pad_left([stream[None, 9 * row : 9 * row + n] for row, n in enumerate(lengths)])
    tokens = torch.randint(3, 128, (len(lengths), STEPS), generator=torch.Generator().manual_seed(7))
    positions = [torch.tensor(lengths)[:, None] + step for step in range(STEPS)]
    hide = hidden(kept, lengths, config.num_attention_heads)
    assert bool((hide == 0).any())
    assert bool(((hide == 0).sum(dim=-1) <= SIZE).all())

    masks = [grown(hide, step + 1) for step in range(STEPS)]
    expected = list(step_logits(model, tokens, prefill(model, batch, mask), masks, positions))
    with compress(model, keeping(kept, lengths)):
        cache = prefill(model, batch, mask)
        assert stored_lengths(cache) == [SIZE] * len(cache.layers)
        plain_masks = [torch.nn.functional.pad(mask, (0, step + 1), value=1) for step in range(STEPS)]
        found = list(step_logits(model, tokens, cache, plain_masks, positions))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3])
@torch.no_grad()
def test_evicting_is_hiding(build: Callable[..., PreTrainedModel], attention: str) -> None:
    model = build()
    model.set_attn_implementation(attention)
    check(model, [60])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_evicting_is_hiding_in_a_padded_batch(attention: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(attention)
    check(model, [60, 41, 20, 5])


@torch.no_grad()
def test_positions_follow_from_the_cache_when_nobody_gives_them() -> None:
    model = tiny_llama()
    kept = pick([60], 2)
    prompt = random_stream()[None, :60]
    tokens = random_stream(seed=3)[None, :STEPS]
    masks = [grown(hidden(kept, [60], 4), step + 1) for step in range(STEPS)]
    positions = [torch.tensor([[60 + step]]) for step in range(STEPS)]
    expected = list(step_logits(model, tokens, forward(model, prompt).cache, masks, positions))
    with compress(model, keeping(kept, [60])):
        cache = forward(model, prompt).cache
        found = [
            forward(model, tokens[:, step : step + 1], cache=cache).logits[:, -1] for step in range(STEPS)
        ]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_several_tokens_at_once_see_each_other_and_what_was_kept() -> None:
    # The second turn of a conversation: causal among its own tokens, at the right positions.
    model = tiny_llama()
    kept = pick([60], 2)
    prompt, turn = random_stream()[None, :60], random_stream(seed=4)[None, : STEPS + 1]
    hide = grown(hidden(kept, [60], 4), STEPS + 1).repeat(1, 1, STEPS + 1, 1)
    hide[..., 60:] = torch.full((STEPS + 1, STEPS + 1), -torch.inf).triu(1)
    plain = forward(model, prompt).cache
    expected = forward(model, turn[:, :1], cache=plain, attention_mask=hide[:, :, :1, :61])
    rest = forward(model, turn[:, 1:], cache=plain, attention_mask=hide[:, :, 1:])
    with compress(model, keeping(kept, [60])):
        cache = forward(model, prompt).cache
        first = forward(model, turn[:, :1], cache=cache)
        second = forward(model, turn[:, 1:], cache=cache)
    torch.testing.assert_close(first.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second.logits, rest.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        tiny_gemma3(),
        tiny_gemma3(layer_types=["full_attention", "sliding_attention"]),
        tiny_qwen2(use_sliding_window=True, sliding_window=32, max_window_layers=1),
    ],
    ids=["gemma3", "gemma3-full-first", "qwen2"],
)
@torch.no_grad()
def test_sliding_layers_stay_as_they_are(model: PreTrainedModel) -> None:
    kept = pick([60], 2)
    prompt, tokens = random_stream()[None, :60], random_stream(seed=5)[None, :STEPS]
    positions = [torch.tensor([[60 + step]]) for step in range(STEPS)]
    hide = hidden(kept, [60], 4)
    # A sliding layer holds the last 31 tokens, all of which the next one sees.
    masks = [
        {"full_attention": grown(hide, step + 1), "sliding_attention": torch.zeros(1, 1, 1, 32)}
        for step in range(STEPS)
    ]
    expected = list(step_logits(model, tokens, forward(model, prompt).cache, masks, positions))
    full = [kind == "full_attention" for kind in model.config.layer_types]
    with compress(model, keeping(kept, [60])):
        cache = forward(model, prompt).cache
        assert stored_lengths(cache) == [SIZE if whole else 31 for whole in full]
        found = list(step_logits(model, tokens, cache, [None] * STEPS, positions))
    assert stored_lengths(cache) == [SIZE + STEPS if whole else 31 for whole in full]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)
