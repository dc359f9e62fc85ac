"""Tiny random models of several architectures, and a tokenizer for them, that need no download."""

from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 128

_Model = TypeVar("_Model", bound=PreTrainedModel)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Ten times the usual, so that attention has peaks to find instead of being all but uniform.
    "initializer_range": 0.2,
}


def _build(model_class: type[_Model], config_class: type[PreTrainedConfig], **settings: Any) -> _Model:
    """Weights depend on the config alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**settings))
    model.train(False)
    return model


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    return _build(LlamaForCausalLM, LlamaConfig, **{**_SIZES, **overrides})


def tiny_mistral(**overrides: Any) -> MistralForCausalLM:
    """Full attention as in v0.2 and later; `sliding_window=16` makes it a v0.1."""
    return _build(MistralForCausalLM, MistralConfig, **{**_SIZES, "sliding_window": None, **overrides})


def tiny_qwen2(**overrides: Any) -> Qwen2ForCausalLM:
    """Its projections have biases."""
    return _build(Qwen2ForCausalLM, Qwen2Config, **{**_SIZES, **overrides})


def tiny_qwen3(**overrides: Any) -> Qwen3ForCausalLM:
    """It normalises queries and keys before RoPE."""
    return _build(Qwen3ForCausalLM, Qwen3Config, **{**_SIZES, **overrides})


def tiny_gemma3(**overrides: Any) -> Gemma3ForCausalLM:
    """One sliding layer of 32 tokens below one full layer, with a RoPE of its own each."""
    # Tied embeddings would make so small a model repeat its last token.
    settings = {
        **_SIZES,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "tie_word_embeddings": False,
        **overrides,
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig, **settings)


def tiny_phi3(**overrides: Any) -> Phi3ForCausalLM:
    """Queries, keys and values come from one projection."""
    return _build(
        Phi3ForCausalLM, Phi3Config, **{**_SIZES, "original_max_position_embeddings": 512, **overrides}
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, `<s>` 1 and `</s>` 2; no padding token, no chat template."""
    specials = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *map(chr, range(32, 127)), "\n"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
