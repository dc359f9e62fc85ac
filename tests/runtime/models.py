"""The model matrix: every architecture that the runtime promises to be right for, tiny and random."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import MinistralConfig, MinistralForCausalLM, PreTrainedModel

from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen2, tiny_qwen3

# What a token sees in a layer with a sliding window, itself included.
SLIDING_WINDOW = 32


def tiny_ministral(**overrides: object) -> PreTrainedModel:
    """A Mistral with layers of both kinds."""
    settings = tiny_mistral().config.to_dict() | {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        **overrides,
    }
    del settings["model_type"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MinistralForCausalLM(MinistralConfig(**settings))
    model.train(False)
    return model


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama-mha": partial(tiny_llama, num_key_value_heads=4),
    "llama-gqa": tiny_llama,
    "llama-mqa": partial(tiny_llama, num_key_value_heads=1),
    "mistral": tiny_mistral,
    "ministral-mixed": tiny_ministral,
    "qwen2": tiny_qwen2,
    "qwen2-mixed": partial(
        tiny_qwen2, use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
    ),
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
    "phi3": tiny_phi3,
}


def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of a model in place; transformers' own types do not know this argument."""
    to: Any = model.to
    to(dtype)


def full_attention(model: PreTrainedModel) -> list[bool]:
    """Which layers see every token, by the model's own settings."""
    kinds = getattr(model.config, "layer_types", None)
    return [kind == "full_attention" for kind in kinds or ["full_attention"] * model.config.num_hidden_layers]


def expected_lengths(model: PreTrainedModel, full: int, seen: int) -> list[int]:
    """Tokens per head in each layer: ``full`` where it has full attention, else the latest of all ``seen``."""
    return [full if whole else min(seen, SLIDING_WINDOW - 1) for whole in full_attention(model)]
