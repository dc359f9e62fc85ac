"""Capture files: their names, what their headers say, which there are, and deleting them. Needs no torch."""

import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

# Raise it when what a capture holds, or how it is computed or written, changes.
VERSION = 5
# Of all captures together, unless the user names another bound.
LIMIT_BYTES = 20 * 2**30
_NAME = re.compile(r"[0-9a-f]{40}(\.safetensors|\.[0-9a-f]{32}\.tmp)")
# Seconds without a change after which nobody is writing a file any more.
_ABANDONED_S = 3600

State = Literal["usable", "being written", "left unfinished", "of another version", "damaged"]


class CaptureHeader(BaseModel):
    """What the header of a capture file says.

    Attributes
    ----------
    version : int
        The :data:`VERSION` it was written under.
    model : str
        Its name when the capture was made.
    prompt_length, window, decoded : int
        In tokens.
    scaling : float
        What the model multiplies its attention scores with.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    version: int
    model: str
    prompt_length: int
    window: int
    decoded: int
    scaling: float


@dataclass(frozen=True)
class CaptureFile:
    """A file in the folder of captures.

    Attributes
    ----------
    used : float
        When it was last used, in seconds since the epoch.
    finished : bool
        Whether it was written to its end; if not, a process is writing it or was killed while it did.
    busy : bool
        Whether a process may still be writing it.
    """

    path: Path
    bytes: int
    used: float
    finished: bool
    busy: bool


def capture_files(folder: Path) -> list[CaptureFile]:
    """Capture files in a folder, the least recently used first; nothing else that lies there is ever listed."""
    found = []
    now = time.time()
    for path in folder.iterdir() if folder.exists() else ():
        if not _NAME.fullmatch(path.name):
            continue
        # Another process may be deleting, too.
        with suppress(FileNotFoundError):
            # A link is somebody's own, and may lead anywhere.
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                finished = path.suffix != ".tmp"
                busy = not finished and now - status.st_mtime < _ABANDONED_S
                found.append(CaptureFile(path, status.st_size, status.st_mtime, finished, busy))
    return sorted(found, key=lambda file: (file.used, file.path.name))


def look_into(file: CaptureFile) -> tuple[State, CaptureHeader | None]:
    """What can be done with a file, and its header if it can be used."""
    if not file.finished:
        return "being written" if file.busy else "left unfinished", None
    try:
        with safe_open(file.path, framework="np") as opened:
            text = opened.metadata()["capture"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return "damaged", None
    try:
        header = CaptureHeader.model_validate_json(text)
    except ValidationError:
        return "of another version", None
    return ("usable", header) if header.version == VERSION else ("of another version", None)


def delete(files: Iterable[CaptureFile]) -> list[CaptureFile]:
    """Delete files; returns those that were there and could be. Whoever has one mapped keeps what it maps."""
    deleted = []
    for file in files:
        with suppress(OSError):
            file.path.unlink()
            deleted.append(file)
    return deleted
