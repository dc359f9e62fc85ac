"""What identifies a model and its tokenizer, for headers and for matching a profile."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterprof.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelInfo:
    """What a profile must know of a model to tell it from another.

    Attributes
    ----------
    id
        The hub id or folder, as it was given to `load_model`.
    revision
        The hub's commit or the sha256 of the built-in model's source, None for a folder and for a
        model that `load_model` did not load.
    architecture
        The model's class.
    rope
        The RoPE settings of the config, as JSON would hold them; empty without RoPE.
    max_position_embeddings
        The longest sequence in tokens, None where the config names none.
    """

    id: str
    revision: str | None
    architecture: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: dict[str, Any]
    max_position_embeddings: int | None


def describe_model(model: "PreTrainedModel") -> ModelInfo:
    """Return what identifies `model`; for a multimodal one, its text decoder."""
    config = model.config
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        raise ModelError(
            f"{type(model).__name__} has no attention heads in its configuration, so it has no KV cache of the kind "
            "that clusterprof compresses; use a transformer with attention layers."
        )
    return ModelInfo(
        id=str(config.name_or_path),
        revision=getattr(config, "_commit_hash", None),
        architecture=type(model).__name__,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rope=_jsonable(getattr(text, "rope_parameters", None) or {}),
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
    )


def describe_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the sha256 of the tokenizer's vocabulary and special tokens, in hex.

    The padding token is left out: `load_model` sets a missing one, and it changes no text.
    """
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return _sha256({"vocabulary": tokenizer.get_vocab(), "special": _jsonable(special)})


def chat_template_hash(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the sha256 of the chat template, or of all of them if it has several; None without one."""
    template = tokenizer.chat_template
    return _sha256(template) if template else None


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    """Plain dicts, lists, numbers and strings, with the keys sorted, so that equal settings look equal."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
