"""How many bytes the keys and values of a compressed prompt take, layer by layer.

Row: GQA model.
"""

import pytest
import torch
from transformers import Cache, DynamicCache

from clusterprof import compress
from clusterprof.runtime import cache_bytes
from clusterprof.runtime.cache import GROWTH
from tests.runtime.models import convert, expected_lengths, full_attention
from tests.runtime.subjects import TINY, Subject, compressed_layers, forward, generate, pad_left
from tests.tiny import tiny_llama

PROMPT = 60


def check(subject: Subject, cache: Cache, rows: int, capacity: int) -> None:
    """Compare every layer with room for ``capacity`` tokens after the prompt's."""
    model, config = subject.model, subject.model.config
    lengths = expected_lengths(model, subject.compression.size + capacity, int(cache.get_seq_length()))
    per_token = rows * config.num_key_value_heads * config.head_dim * 2 * model.dtype.itemsize
    assert cache_bytes(cache) == per_token * sum(lengths)
    # And no more memory is held behind the tensors.
    full = [length for length, whole in zip(lengths, full_attention(model), strict=True) if whole]
    for layer, length in zip(compressed_layers(cache), full, strict=True):
        assert layer.keys is not None
        assert layer.values is not None
        held = layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
        assert held == per_token * length


# One by one, and, for the sake of time, most of them at once.
@pytest.mark.parametrize(
    ("dtype", "feeds"),
    [(torch.float32, [1] * (GROWTH + 1)), (torch.bfloat16, [1, GROWTH - 1, 1])],
    ids=["float32", "bfloat16"],
)
@torch.no_grad()
def test_are_those_of_the_size_and_of_room_in_steps(
    tiny: Subject, dtype: torch.dtype, feeds: list[int]
) -> None:
    convert(tiny.model, dtype)
    batch, mask = pad_left([tiny.prompt(PROMPT), tiny.prompt(41, start=90)])
    rows = len(batch)
    capacities = {1: GROWTH, GROWTH: GROWTH, GROWTH + 1: 2 * GROWTH}
    with compress(tiny.model, TINY):
        cache = forward(tiny.model, batch, attention_mask=mask).cache
        check(tiny, cache, rows, capacity=0)
        for tokens in feeds:
            mask = torch.nn.functional.pad(mask, (0, tokens), value=1)
            feed = tiny.prompt(tokens).repeat(rows, 1)
            forward(tiny.model, feed, cache=cache, attention_mask=mask)
            decoded = int(cache.get_seq_length()) - PROMPT
            if decoded in capacities:
                check(tiny, cache, rows, capacity=capacities.pop(decoded))
    assert not capacities


def test_right_after_generating_one_token(subject: Subject) -> None:
    with compress(subject.model, subject.compression):
        check(subject, generate(subject.model, subject.prompt(subject.long), 1).cache, rows=1, capacity=0)


def test_of_an_empty_cache() -> None:
    assert cache_bytes(DynamicCache(config=tiny_llama().config)) == cache_bytes(DynamicCache()) == 0
