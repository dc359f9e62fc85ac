"""Captures on disk: one memory-mapped safetensors file per prompt, keyed by all that determines it."""

import hashlib
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clusterprof.errors import ClusterprofError
from clusterprof.profiling.capture import Capture, LayerCapture
from clusterprof.profiling.capture_files import LIMIT_BYTES, VERSION, CaptureHeader, capture_files, delete
from clusterprof.profiling.origin import Origin

_LAYER_FIELDS = tuple(field.name for field in fields(LayerCapture))


@dataclass(frozen=True)
class CaptureStore:
    """The captures of one model under one decode length.

    Files of the least recently used captures are deleted when all of them together exceed ``limit_bytes``, but
    none of a capture that this process holds: that would free nothing before it ends.

    Attributes
    ----------
    folder : Path
        Shared by all models; created when the first capture is saved.
    origin : Origin
        What the captures come from.
    limit_bytes : int
        For the whole folder.
    """

    folder: Path
    origin: Origin
    limit_bytes: int = LIMIT_BYTES
    _held: WeakValueDictionary[Path, Capture] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of what the captures come from."""
        return self.origin.fingerprint

    @property
    def held_bytes(self) -> int:
        """Size of the files of all captures that this process holds."""
        return sum(file.bytes for file in capture_files(self.folder) if file.path in self._held)

    def path(self, input_ids: tuple[int, ...], window: int, *, accumulated: bool = False) -> Path:
        """File of a prompt's capture under a window of so many tokens, whether or not it exists."""
        parts = f"{VERSION}:{self.fingerprint}:{window}:{accumulated}:{list(input_ids)}"
        key = hashlib.sha256(parts.encode()).hexdigest()
        return self.folder / f"{key[:40]}.safetensors"

    def load(self, input_ids: tuple[int, ...], window: int, *, accumulated: bool = False) -> Capture | None:
        """Memory-map a capture, or return None if there is none or its file is damaged.

        One with accumulated attention serves those that do not need it, too.
        """
        found = self._load(self.path(input_ids, window, accumulated=True))
        return found if found or accumulated else self._load(self.path(input_ids, window))

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
        header = CaptureHeader(
            version=VERSION,
            model=self.origin.model,
            prompt_length=capture.prompt_length,
            window=capture.window,
            decoded=len(capture.log_probs),
            scaling=capture.scaling,
        ).model_dump_json()
        tensors = _to_tensors(capture)
        metadata = {"capture": header, "checksum": _checksum(header, tensors)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, metadata=metadata)
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise ClusterprofError(
                f"The capture of a prompt cannot be written to {self.folder} ({error}); free some space there, "
                "or name another folder in CLUSTERPROF_CACHE. What was captured before is kept."
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        # Another process may delete it at once to stay within the limit.
        saved = self._load(path) or capture
        self._trim()
        return saved

    def _load(self, path: Path) -> Capture | None:
        capture = _load(path)
        if capture is not None:
            self._held[path] = capture
        return capture

    def _trim(self) -> None:
        files = capture_files(self.folder)
        excess = sum(file.bytes for file in files) - self.limit_bytes
        for file in files:
            if excess <= 0:
                return
            if file.path not in self._held and not file.busy:
                delete([file])
                excess -= file.bytes


def _load(path: Path) -> Capture | None:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        header = CaptureHeader.model_validate_json(metadata["capture"])
        if metadata["checksum"] != _checksum(metadata["capture"], tensors):
            return None
        capture = _from_tensors(tensors, header)
        os.utime(path)
        return capture
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _checksum(header: str, tensors: dict[str, Tensor]) -> str:
    """CRC-32 of all that a file holds; for 100 MB it takes less than 0.1 s, most of it to map what a replay needs."""
    value = zlib.crc32(header.encode())
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


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


def _from_tensors(tensors: dict[str, Tensor], header: CaptureHeader) -> Capture:
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
        prompt_length=header.prompt_length,
        window=header.window,
        tokens=tensors["tokens"],
        log_probs=tensors["log_probs"],
        scaling=header.scaling,
        word_starts=tensors.get("word_starts"),
    )
