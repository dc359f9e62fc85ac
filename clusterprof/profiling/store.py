"""Captures on disk: one memory-mapped safetensors file per prompt, keyed by all that determines it."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clusterprof.errors import ClusterprofError
from clusterprof.profiling.capture import Capture, LayerCapture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Raise it when what a capture holds, or how it is computed, changes.
VERSION = 4
_LAYER_FIELDS = tuple(field.name for field in fields(LayerCapture))


@dataclass(frozen=True)
class CaptureStore:
    """The captures of one model under one decode length.

    Files of the least recently used captures are deleted when all of them together exceed ``limit_bytes``.

    Attributes
    ----------
    folder : Path
        Shared by all models; created when the first capture is saved.
    fingerprint : str
        Of model, decode length and library versions; see :func:`fingerprint`.
    limit_bytes : int
        For the whole folder.
    """

    folder: Path
    fingerprint: str
    limit_bytes: int = 20 * 2**30

    def path(self, input_ids: tuple[int, ...], window: int, *, accumulated: bool = False) -> Path:
        """File of a prompt's capture under a window of so many tokens, whether or not it exists."""
        parts = f"{VERSION}:{self.fingerprint}:{window}:{accumulated}:{list(input_ids)}"
        key = hashlib.sha256(parts.encode()).hexdigest()
        return self.folder / f"{key[:40]}.safetensors"

    def load(self, input_ids: tuple[int, ...], window: int, *, accumulated: bool = False) -> Capture | None:
        """Memory-map a capture, or return None if there is none or its file is damaged.

        One with accumulated attention serves those that do not need it, too.
        """
        found = _load(self.path(input_ids, window, accumulated=True))
        return found if found or accumulated else _load(self.path(input_ids, window))

    def save(self, input_ids: tuple[int, ...], capture: Capture) -> Capture:
        """Write a capture and return it memory-mapped; the file is whole or absent.

        Raises
        ------
        ClusterprofError
            If it cannot be written, for instance because the disk is full.
        """
        accumulated = capture.observation.accumulated is not None
        path = self.path(input_ids, capture.window, accumulated=accumulated)
        temporary = path.with_suffix(f".{uuid4().hex}.tmp")
        header = {
            "prompt_length": capture.prompt_length,
            "window": capture.window,
            "scaling": capture.scaling,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(_to_tensors(capture), temporary, metadata={"capture": json.dumps(header)})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise ClusterprofError(
                f"The capture of a prompt cannot be written to {self.folder} ({error}); free some space there, "
                "or name another folder in CLUSTERPROF_CACHE. What was captured before is kept."
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        self._trim(keep=path)
        # Another process may already have deleted it to stay within the limit.
        return _load(path) or capture

    def _trim(self, keep: Path) -> None:
        files = []
        # Everything in the folder: also what a killed process left half written.
        for file in self.folder.iterdir():
            # Another process may be deleting, too.
            with suppress(FileNotFoundError):
                status = file.stat()
                files.append((status.st_mtime, status.st_size, file))
        excess = sum(size for _, size, _ in files) - self.limit_bytes
        for _, size, file in sorted(files):
            if excess <= 0:
                return
            if file != keep:
                excess -= size
                with suppress(OSError):
                    file.unlink()


def _load(path: Path) -> Capture | None:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = json.loads(file.metadata()["capture"])
        capture = _from_tensors(tensors, header)
        observation = capture.observation
        numbers = [observation.importance, observation.accumulated, capture.log_probs]
        if not all(number is None or bool(torch.isfinite(number).all()) for number in numbers):
            return None
        os.utime(path)
        return capture
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def fingerprint(model: "PreTrainedModel", *, decode_tokens: int) -> str:
    """SHA-256 over what a run of a model depends on besides its prompt and window.

    A model is recognised by its configuration and by sums over each of its tensors, so a folder whose files
    changed is another model, and a copy under another name is the same one.
    """
    digest = hashlib.sha256()
    # Buffers too: quantized models keep their weights in them.
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = tensor.detach().flatten()
        # Rounded, since the last digits of a sum depend on the number of threads.
        sums = [f"{part.sum(dtype=torch.float64).item():.8g}" for part in (flat, flat[::2])]
        some = flat[:: max(1, flat.numel() // 16)][:16].to(torch.float64).tolist()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{sums}{some}".encode())
    # RoPE settings, sliding windows and end tokens change a capture and are no parameters.
    digest.update(json.dumps(_unnamed(model.config.to_dict()), sort_keys=True, default=str).encode())
    end_tokens = model.generation_config.eos_token_id if model.generation_config else None
    backend = model.config._attn_implementation
    versions = f"{torch.__version__} {transformers.__version__}"
    digest.update(f"{versions} {model.device.type} {backend} {decode_tokens} {end_tokens}".encode())
    return digest.hexdigest()


def _unnamed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those inside it, without where it was loaded from."""
    return {
        key: _unnamed(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "_name_or_path"
    }


def _to_tensors(capture: Capture) -> dict[str, Tensor]:
    tensors = {"tokens": capture.tokens, "log_probs": capture.log_probs}
    if capture.word_starts is not None:
        tensors["word_starts"] = capture.word_starts
    for i, layer in capture.layers.items():
        fields_of_layer = {name: getattr(layer, name) for name in _LAYER_FIELDS}
        tensors |= {
            f"layer.{i}.{name}": tensor.contiguous()
            for name, tensor in fields_of_layer.items()
            if tensor is not None
        }
    for i, (keys, values) in capture.sliding.items():
        tensors |= {f"sliding.{i}.keys": keys.contiguous(), f"sliding.{i}.values": values.contiguous()}
    return tensors


def _from_tensors(tensors: dict[str, Tensor], header: dict[str, float]) -> Capture:
    def indices(kind: str) -> list[int]:
        return sorted({int(name.split(".")[1]) for name in tensors if name.startswith(f"{kind}.")})

    if not indices("layer"):
        raise ValueError("no layers")
    return Capture(
        layers={
            i: LayerCapture(
                **{
                    name: tensors[f"layer.{i}.{name}"]
                    for name in _LAYER_FIELDS
                    if f"layer.{i}.{name}" in tensors
                }
            )
            for i in indices("layer")
        },
        sliding={
            i: (tensors[f"sliding.{i}.keys"], tensors[f"sliding.{i}.values"]) for i in indices("sliding")
        },
        prompt_length=int(header["prompt_length"]),
        window=int(header["window"]),
        tokens=tensors["tokens"],
        log_probs=tensors["log_probs"],
        scaling=float(header["scaling"]),
        word_starts=tensors.get("word_starts"),
    )
