"""What cannot be compressed is refused in a sentence, never run uncompressed or wrong."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.runtime import CompressedLayer
from tests.runtime.subjects import (
    TINY,
    forward,
    generate,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT = random_stream()[None, :60]


class OtherCache(DynamicCache):
    """Stands for the quantized and whatever other caches there are."""


def filled_cache() -> DynamicCache:
    return forward(tiny_llama(), PROMPT[:, :30]).cache  # type: ignore[no-any-return]


# Row: beam search, num_return_sequences, assisted generation, quantized cache, static cache, `torch.compile`.
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "a StaticCache"),
        ({"cache_implementation": "offloaded"}, "an offloaded cache"),
        ({"cache": DynamicCache(offloading=True)}, "an offloaded cache"),
        ({"cache": StaticCache(config=tiny_llama().config, max_cache_len=99)}, "a StaticCache"),
        ({"cache": OtherCache()}, "a OtherCache"),
        ({"cache": filled_cache()}, "already holds 30 uncompressed tokens"),
    ],
    ids=[
        "no-cache",
        "static",
        "offloaded",
        "offloaded-object",
        "static-object",
        "other",
        "filled",
    ],
)
def test_caches_that_cannot_shrink(options: dict[str, Any], reason: str) -> None:
    model = tiny_llama(eos_token_id=None)
    with pytest.raises(CompressionError, match=reason), compress(model, TINY):
        generate(model, PROMPT, 5, **options)


def test_a_forward_without_a_cache_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(CompressionError, match="use_cache=False"), compress(model, TINY):
        forward(model, PROMPT, use_cache=False)


def test_a_mask_that_hides_a_token_in_the_middle_is_refused() -> None:
    model = tiny_llama()
    mask = torch.zeros(1, 1, 60, 60)
    mask[..., 30] = torch.finfo(torch.float32).min
    with pytest.raises(CompressionError, match="in the middle of a row"), compress(model, TINY):
        forward(model, PROMPT, attention_mask=mask)


@pytest.mark.parametrize("inside", [True, False])
def test_a_compressed_cache_prefilled_outside_is_refused_at_its_second_update(inside: bool) -> None:
    model = tiny_llama()
    cache = DynamicCache(config=model.config)
    cache.layers = [CompressedLayer() for _ in cache.layers]
    forward(model, PROMPT, cache=cache)
    context = compress(model, TINY) if inside else nullcontext()
    with pytest.raises(CompressionError, match="prefilled outside"), context:
        forward(model, PROMPT[:, :1], cache=cache)


def test_a_plain_empty_cache_is_adopted() -> None:
    for cache in (DynamicCache(), DynamicCache(config=tiny_gemma3().config)):
        model = tiny_gemma3()
        with compress(model, TINY):
            forward(model, PROMPT, cache=cache)
        assert isinstance(cache.layers[0], DynamicSlidingWindowLayer)
        assert stored_lengths(cache) == [31, 24]
