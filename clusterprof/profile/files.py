"""Reading a profile that may be anything, and writing one whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from clusterprof.errors import ProfileError
from clusterprof.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 1 << 20
# Characters of a value or a name that a message quotes.
_SHOWN = 60
_LONGEST = 400

Document = TypeVar("Document", bound=BaseModel)


def first_problem(error: ValidationError) -> str:
    """Put the first thing that is wrong with a value, and how many more there are, in one line."""
    problems = error.errors(include_url=False, include_context=False)
    # Another version explains whatever else does not fit.
    first = next((problem for problem in problems if problem["loc"] == ("schema_version",)), problems[0])
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    # It may quote what the file says.
    text = one_line(message[0].lower() + message[1:], _LONGEST)
    # Of a section that contradicts another, the message says enough.
    section = first["type"] == "value_error" and isinstance(first["input"], dict)
    if not section and first["type"] not in ("missing", "json_invalid", "model_type"):
        text += f" (got {one_line(repr(first['input']), _SHOWN)})"
    if field:
        text = f"{one_line(field, _SHOWN)}: {text}"
    others = len(problems) - 1
    return f"{text}, and {others} more" if others else text


def read(document: type[Document], path: Path) -> Document:
    """Read and validate a JSON file of at most ``MAX_BYTES``.

    Raises
    ------
    ProfileError
        In one line, whatever is wrong with the file.
    """
    shown = one_line(str(path))
    try:
        text = _read_bytes(path, shown).decode("utf-8-sig")
        profile = document.model_validate_json(text, strict=True)
        # A repeated field passes the parser, and which of the two holds is anybody's guess.
        json.loads(text, object_pairs_hook=_refuse_repeated)
    except FileNotFoundError as error:
        raise ProfileError(
            f"There is no profile {shown}; check the path, or make one with `clusterprof tune`."
        ) from error
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"The profile {shown} is not UTF-8 text (byte {error.start}); save it as UTF-8, or tune again."
        ) from error
    except ValidationError as error:
        raise _invalid(shown, first_problem(error)) from error
    except OSError as error:
        raise ProfileError(
            f"The profile {shown} cannot be read ({_reason(error)}); check the path and its permissions."
        ) from error
    except ValueError as error:
        raise _invalid(shown, str(error)) from error
    return profile


def write(document: BaseModel, path: Path) -> None:
    """Write a model as indented JSON, atomically.

    Raises
    ------
    ProfileError
        If it cannot be written; nothing is left behind then.
    """
    shown = one_line(str(path))
    text = json.dumps(document.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    data = text.encode()
    if len(data) > MAX_BYTES:
        raise ProfileError(
            f"The profile {shown} would have {len(data):,} bytes, and at most {MAX_BYTES:,} can be read again; "
            "tune on fewer samples."
        )
    try:
        replace_file(path, data)
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"The profile {shown} cannot be written ({_reason(error)}); name another file."
        ) from error


def _invalid(shown: str, problem: str) -> ProfileError:
    return ProfileError(
        f"The profile {shown} is not valid: {problem}; correct it, tune again with this release, or install the one "
        "that wrote it."
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _read_bytes(path: Path, shown: str) -> bytes:
    # Looked at before it is opened: opening a pipe would wait for a writer, and a device never ends.
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ProfileError(f"The profile {shown} is a folder; name the file inside it.")
    if not stat.S_ISREG(status.st_mode):
        raise ProfileError(f"The profile {shown} is not a regular file; name one saved on disk.")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ProfileError(
            f"The profile {shown} has {status.st_size:,} bytes, and a profile at most {MAX_BYTES:,}; check the path."
        )
    return data


def _refuse_repeated(pairs: Sequence[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the field {one_line(name, _SHOWN)} is there more than once")
        seen.add(name)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; its folder is made if need be."""
    # A link keeps pointing where it points.
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Not every file system can sync a folder, and the file is whole by now either way.
    with suppress(OSError):
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
