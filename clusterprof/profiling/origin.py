"""Origin: which model, tokenizer and libraries captures come from, in parts that can be compared one by one."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import transformers

from clusterprof.models import describe_model
from clusterprof.profiling.capture import end_tokens
from clusterprof.runtime.words import spelling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The parts that are for people.
FOR_PEOPLE = frozenset({"model", "revision"})


@dataclass(frozen=True)
class Origin:
    """All that a capture depends on besides its prompt and window; long parts as hashes, see :func:`hash_text`.

    Attributes
    ----------
    model, revision : str
        Hub id or folder, and commit. For people: a copy elsewhere is the same model, if its weights are.
    weights : str
        Hash over sums over each tensor, so that a folder whose files changed is another model.
    model_settings : str
        Hash of the configuration: RoPE, sliding windows and the like change a capture and are no weights.
    vocabulary : str
        Hash of how the tokenizer spells its tokens, which says where words begin.
    end_tokens : str
        The tokens that end an answer, of model and tokenizer together.
    decode_tokens : int
        Decoded tokens per prompt, at most.
    """

    model: str
    revision: str
    weights: str
    model_settings: str
    vocabulary: str
    end_tokens: str
    decode_tokens: int
    dtype: str
    device: str
    attention: str
    torch: str
    transformers: str

    @classmethod
    def of(
        cls, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, decode_tokens: int
    ) -> "Origin":
        """Of captures that are made with a loaded model now."""
        info = describe_model(model)
        settings = json.dumps(_unnamed(model.config.to_dict()), sort_keys=True, default=str)
        tokens = spelling(tokenizer, sorted(set(tokenizer.get_vocab().values())))
        return cls(
            model=info.id or "not named",
            revision=info.revision or "not known",
            weights=_hash_weights(model),
            model_settings=hash_text(settings),
            vocabulary=hash_text(repr(sorted(tokens.items()))),
            end_tokens=", ".join(map(str, sorted(end_tokens(model, tokenizer)))),
            decode_tokens=decode_tokens,
            dtype=str(model.dtype).removeprefix("torch."),
            device=model.device.type,
            attention=str(model.config._attn_implementation),
            torch=torch.__version__,
            transformers=transformers.__version__,
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex over everything but name and revision."""
        parts = [value for part, value in asdict(self).items() if part not in FOR_PEOPLE]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hash_text(text: str) -> str:
    """Return what stands for a text too long to show, such as "sha256:0123456789abcdef"."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _hash_weights(model: "PreTrainedModel") -> str:
    lines = []
    # Buffers too: quantized models keep their weights in them.
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = tensor.detach().flatten()
        # Rounded, since the last digits of a sum depend on the number of threads.
        sums = [f"{part.sum(dtype=torch.float64).item():.8g}" for part in (flat, flat[::2])]
        some = flat[:: max(1, flat.numel() // 16)][:16].to(torch.float64).tolist()
        lines.append(f"{name}{tuple(tensor.shape)}{tensor.dtype}{sums}{some}")
    return hash_text("\n".join(lines))


def _unnamed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those inside it, without where it was loaded from."""
    return {
        key: _unnamed(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "_name_or_path"
    }
