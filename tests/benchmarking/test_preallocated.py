from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from clusterprof.benchmarking.preallocated import PreallocatedLayer, preallocate
from clusterprof.runtime import cache_bytes
from clusterprof.runtime.transformers_names import CACHE
from tests.tiny import tiny_gemma3, tiny_llama

ROOM = 6


def prefilled(model: PreTrainedModel, prompt: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(prompt, **{CACHE: cache})
    return cache


def places(cache: DynamicCache) -> list[int]:
    """Where in memory the layers' keys are."""
    return [
        layer.keys.data_ptr()
        for layer in cache.layers
        if isinstance(layer, PreallocatedLayer) and layer.keys is not None
    ]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.inference_mode()
def test_logits_are_those_of_the_plain_cache(build: Any) -> None:
    model = build()
    prompt = torch.randint(3, 128, (2, 50), generator=torch.Generator().manual_seed(0))
    plain, roomy = prefilled(model, prompt), prefilled(model, prompt)
    preallocate(roomy, ROOM)
    for token in prompt.T[:ROOM]:
        expected = model(token[:, None], **{CACHE: plain}).logits
        torch.testing.assert_close(model(token[:, None], **{CACHE: roomy}).logits, expected)
    assert roomy.get_seq_length() == plain.get_seq_length() == 50 + ROOM


@torch.inference_mode()
def test_nothing_is_allocated_or_copied_per_token() -> None:
    model = tiny_llama()
    cache = prefilled(model, torch.arange(3, 53)[None])
    preallocate(cache, ROOM)
    buffers = places(cache)
    # Two layers, 2 KV heads of 16 numbers, keys and values, float32.
    assert cache_bytes(cache) == (50 + ROOM) * 2 * 2 * 16 * 2 * 4
    for token in range(3, 3 + ROOM):
        model(torch.tensor([[token]]), **{CACHE: cache})
    assert places(cache) == buffers
    with pytest.raises(RuntimeError):
        model(torch.tensor([[3]]), **{CACHE: cache})


@torch.inference_mode()
def test_sliding_layers_stay_as_they_are() -> None:
    cache = prefilled(tiny_gemma3(), torch.arange(3, 53)[None])
    sliding = cache.layers[0]
    preallocate(cache, ROOM)
    assert cache.layers[0] is sliding
    assert isinstance(cache.layers[1], PreallocatedLayer)
