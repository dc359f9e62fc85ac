"""A compressed run against the untouched model whose attention mask hides the evicted positions."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.methods import Method, Observation
from clusterprof.profile import Compression
from clusterprof.runtime.cache import GROWTH
from tests.runtime.models import SLIDING_WINDOW, expected_lengths, full_attention
from tests.runtime.subjects import (
    TINY,
    WINDOW,
    Subject,
    compressed_layers,
    forward,
    generate,
    pad_left,
    random_stream,
    step_logits,
    stored_lengths,
)
from tests.tiny import tiny_llama

STEPS = 20
SIZE = TINY.size


# By row and KV head.
Kept = tuple[tuple[tuple[int, ...], ...], ...]


class Handpicked(Method):
    """Keeps the prefix positions it was told, given from each row's first token on."""

    name: Literal["handpicked"] = "handpicked"
    lengths: tuple[int, ...]
    positions: Kept

    def select(self, observation: Observation, budget: int) -> Tensor:
        importance = observation.importance
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


def mask_of(model: PreTrainedModel, hide: Tensor, attention_mask: Tensor, step: int) -> Any:
    """What one decoded token sees: in full layers what is not hidden, in sliding ones the latest tokens."""
    full = grown(hide, step + 1)
    if all(full_attention(model)):
        return full
    padding = torch.where(attention_mask.bool(), 0.0, -torch.inf)[:, None, None]
    return {"full_attention": full, "sliding_attention": grown(padding, step + 1)[..., -SLIDING_WINDOW:]}


def prefill(model: PreTrainedModel, batch: Tensor, mask: Tensor) -> Cache:
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    forward(model, batch, attention_mask=mask, position_ids=positions, cache=cache)
    return cache


@pytest.mark.parametrize(
    ("attention", "lengths"),
    [("sdpa", [60]), ("sdpa", [60, 41, 20, 5]), ("eager", [60, 41, 20, 5])],
    ids=["sdpa", "sdpa-padded", "eager-padded"],
)
@torch.no_grad()
def test_evicting_is_hiding(tiny: Subject, attention: str, lengths: list[int]) -> None:
    model, config = tiny.model, tiny.model.config
    model.set_attn_implementation(attention)
    kept = pick(lengths, config.num_key_value_heads)
    batch, mask = pad_left([tiny.prompt(length, start=9 * row) for row, length in enumerate(lengths)])
    tokens = torch.randint(3, 128, (len(lengths), STEPS), generator=torch.Generator().manual_seed(7))
    positions = [torch.tensor(lengths)[:, None] + step for step in range(STEPS)]
    hide = hidden(kept, lengths, config.num_attention_heads)
    assert bool((hide == 0).any())
    assert bool(((hide == 0).sum(dim=-1) <= SIZE).all())

    masks = [mask_of(model, hide, mask, step) for step in range(STEPS)]
    expected = list(step_logits(model, tokens, prefill(model, batch, mask), masks, positions))
    with compress(model, keeping(kept, lengths)):
        cache = prefill(model, batch, mask)
        assert stored_lengths(cache) == expected_lengths(model, SIZE, 60)
        plain_masks = [torch.nn.functional.pad(mask, (0, step + 1), value=1) for step in range(STEPS)]
        found = list(step_logits(model, tokens, cache, plain_masks, positions))
    assert stored_lengths(cache) == expected_lengths(model, SIZE + STEPS, 60 + STEPS)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


# Once long enough for the buffers to grow twice.
@pytest.mark.parametrize(
    ("attention", "lengths", "new_tokens"),
    [("sdpa", [60], GROWTH + 2), ("sdpa", [60, 41, 5], 10), ("eager", [60, 41, 5], 10)],
    ids=["sdpa", "sdpa-padded", "eager-padded"],
)
def test_with_nothing_to_evict_it_is_the_untouched_model_to_the_bit(
    tiny: Subject, attention: str, lengths: list[int], new_tokens: int
) -> None:
    tiny.model.set_attn_implementation(attention)
    batch, mask = pad_left([tiny.prompt(length, start=9 * row) for row, length in enumerate(lengths)])
    options: dict[str, Any] = {"attention_mask": mask, "output_logits": True}
    expected = generate(tiny.model, batch, new_tokens, **options)
    with compress(tiny.model, TINY.model_copy(update={"size": 60})):
        found = generate(tiny.model, batch, new_tokens, **options)
    assert len(compressed_layers(found.cache)) == sum(full_attention(tiny.model))
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert torch.equal(found.sequences, expected.sequences)


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
