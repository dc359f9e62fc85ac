"""A multimodal model hands its decoder masks that are already made."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from clusterprof import compress
from clusterprof.runtime.attention import decoder_of
from tests.runtime.subjects import TINY, compressed_layers, continuation, pad_left, random_stream


@pytest.fixture(params=["sdpa", "eager"])
def gemma3(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "eos_token_id": None,
        "pad_token_id": 2,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    options: Any = {"image_token_id": 299, "mm_tokens_per_image": 1}
    config = Gemma3Config(text_config=text, vision_config=vision, **options)
    model: PreTrainedModel = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation(request.param)
    model.train(False)
    return model


def test_a_padded_batch_equals_its_rows(gemma3: PreTrainedModel) -> None:
    rows = [random_stream(seed=seed)[None, :length] for seed, length in enumerate((70, 50, 15))]
    batch, mask = pad_left(rows)
    cache: Any = DynamicCache(config=decoder_of(gemma3).config)
    with compress(gemma3, TINY):
        together = continuation(gemma3, batch, 8, attention_mask=mask, cache=cache)
        alone = [continuation(gemma3, row, 8)[0] for row in rows]
    assert together == alone
    assert [layer.evicted for layer in compressed_layers(cache)] == [70 - TINY.size]
