"""Whether a profile belongs to a model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from clusterprof.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.models import ModelInfo
    from clusterprof.profile.sections import ModelIdentity

_COMPARED = ("architecture", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_LONGEST = 200


def differences(
    expected: ModelIdentity, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    """See :meth:`clusterprof.profile.Profile.mismatches`."""
    from clusterprof.models import describe_model

    pairs = [*_model_pairs(expected, describe_model(model))]
    if tokenizer is not None:
        pairs += _tokenizer_pairs(expected, tokenizer)
    return [
        f"{field}: profile {_shown(ours)}, model {_shown(theirs)}"
        for field, ours, theirs in pairs
        if ours != theirs
    ]


def _model_pairs(expected: ModelIdentity, info: ModelInfo) -> Iterator[tuple[str, object, object]]:
    # Whole ids in the message, but only their names decide.
    if _name(expected.id) != _name(info.id):
        yield "id", expected.id, info.id
    for field in _COMPARED:
        yield field, getattr(expected, field), getattr(info, field)
    for key in sorted(expected.rope.keys() | info.rope.keys()):
        yield f"rope.{one_line(key, 60)}", expected.rope.get(key), info.rope.get(key)


def _tokenizer_pairs(
    expected: ModelIdentity, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, object, object]]:
    from clusterprof.models import chat_template_hash, describe_tokenizer

    yield "tokenizer_hash", expected.tokenizer_hash, describe_tokenizer(tokenizer)
    yield "chat_template_hash", expected.chat_template_hash, chat_template_hash(tokenizer)


def _name(model_id: str) -> str:
    """Last part of an id or path; of a folder in the hub's cache, the model's own name."""
    parts = [part for part in re.split(r"[/\\]+", model_id) if part] or [""]
    cached = next((part for part in reversed(parts) if part.startswith("models--")), parts[-1])
    return cached.rpartition("--")[2].casefold()


def _shown(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]
    text = value if isinstance(value, str) else json.dumps(value)
    return one_line(text, _LONGEST)
