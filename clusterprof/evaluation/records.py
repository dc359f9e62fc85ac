"""Records: what was measured, one JSON line each, in a file that a run appends to and continues."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from clusterprof.data.files import MAX_LINE_BYTES
from clusterprof.errors import DataError
from clusterprof.profile.fields import (
    Count,
    FiniteJson,
    Label,
    Line,
    PositiveCount,
    SampleId,
    SchemaVersion,
    Sha256,
    Value,
    Window,
)
from clusterprof.profile.files import first_problem
from clusterprof.text import one_line

Name = Annotated[Label, Field(max_length=100)]

# Of every line that is written here.
_BEGINNING = b'{"key":"'


class Record(BaseModel):
    """One prompt under one method at one size.

    Attributes
    ----------
    key : str
        SHA-256 in hex over everything that determines the result; see :func:`record_key`.
    bench : str
        The benchmark, such as "needle".
    environment : dict
        Model id, dtype, device, attention backend and versions.
    dataset, prompt, prompt_tokens
        Where the prompt is from, its id there, and its length.
    labels : dict
        What the benchmark groups by, such as ``{"tokens": 2000, "depth": 0.25}``.
    method : str
        As tables and plots call it, such as "snapkv" or a profile's name.
    origin : str
        Where the method's parameters are from: its paper's values, or which profile.
    parameters : dict
        The method's own, its name and version included; ``{"name": "full"}`` for the full cache.
    size, window : int, optional
        Tokens kept per head and the observation window; None for the full cache.
    scores : dict
        One number per metric.
    curves : dict
        Lists of numbers, or lists of lists, where one number does not say it: per layer, head or step.
    settings : dict
        The benchmark's own, such as its thresholds.
    asked : str, optional
        SHA-256 in hex over all that determines a result besides the method: only results of the same are compared
        prompt by prompt.
    text, references
        What was generated, and what would have been right; for benchmarks that generate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: SchemaVersion = 1
    key: Sha256
    bench: Name
    environment: dict[Name, Line]
    dataset: Label
    prompt: SampleId
    prompt_tokens: PositiveCount
    labels: dict[Name, Count | Value | Line] = {}
    method: Name
    origin: Line
    parameters: FiniteJson
    size: PositiveCount | None = None
    window: Window | None = None
    scores: dict[Name, Value] = {}
    curves: FiniteJson = {}
    settings: FiniteJson = {}
    asked: Sha256 | None = None
    text: str | None = None
    references: tuple[str, ...] = ()


def record_key(parts: Mapping[str, Any]) -> str:
    """SHA-256 over everything that determines a result: JSON values by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_records(path: Path) -> list[Record]:
    """Read a run's file; what a crash left of a last line is left out.

    Raises
    ------
    DataError
        If it cannot be read, or a line is not a record; names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"The results {path} cannot be read: {error.strerror or error}.") from error
    # Some editors put a mark there.
    *lines, last = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines += [last] if _is_whole(last) else []
    if lines and lines[0].strip() == b"{":
        raise DataError(
            f"{one_line(str(path))} is a JSON document, such as a profile (`clusterprof profiles show`), and no file "
            "of eval or compare, which has a record in each line."
        )
    return [_record(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line]


def _record(line: bytes, where: str) -> Record:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}: is longer than {MAX_LINE_BYTES >> 20} MiB, and no record.")
    try:
        return Record.model_validate_json(line)
    except ValidationError as error:
        raise DataError(
            f"{one_line(where)}: is not a record of eval or compare ({first_problem(error)})."
        ) from error


def _is_whole(line: bytes) -> bool:
    """Whether a last line without its end is all of a record: editors and copies leave it out, too."""
    try:
        Record.model_validate_json(line)
    except ValidationError:
        return False
    return True


class RunFile:
    """A run's results: those that are there, and a place for new ones.

    Attributes
    ----------
    records : dict of str to Record
        By key.
    """

    def __init__(self, path: Path, records: Iterable[Record]) -> None:
        self.path = path
        self.records = {record.key: record for record in records}

    def add(self, record: Record) -> None:
        """Append a record; when this returns it is on disk.

        Raises
        ------
        DataError
            If it cannot be written; everything before it is kept.
        """
        try:
            with self.path.open("ab") as stream:
                stream.write(record.model_dump_json(exclude_defaults=True).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise DataError(
                f"The results cannot be written to {self.path} ({error.strerror or error}); make room there and run "
                "the same command again: what is in the file is kept."
            ) from error
        self.records[record.key] = record


@contextmanager
def open_run(path: Path) -> Iterator[RunFile]:
    """Open a run's file to add to it; one process at a time.

    Raises
    ------
    DataError
        If it is not a run's file, cannot be written, or another process is adding to it.
    """
    # A file that is reached by several names has one lock.
    file = Path(os.path.realpath(path))
    lock = FileLock(file.with_name(f"{file.name}.lock"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(f"Another process is adding to {path}; wait for it, or name another file.") from error
    except OSError as error:
        raise DataError(f"The results cannot be written to {path}: {error.strerror or error}.") from error
    try:
        records = read_records(path) if path.exists() else []
        _end_last_line(path)
        yield RunFile(path, records)
    finally:
        lock.release()


def _end_last_line(path: Path) -> None:
    """End a last record that lacks its line's end, and cut off what a crash left of one.

    A file that was never a run's is refused, not cut.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    last = content[whole:]
    if not last:
        return
    with path.open("r+b") as stream:
        if _is_whole(last):
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n")
        elif last.startswith(_BEGINNING[: len(last)]):
            stream.truncate(whole)
        else:
            raise DataError(f"{path} is not a file of eval or compare; name another one for the results.")


def numbers(values: Iterable[Any]) -> list[JsonValue]:
    """Round to what is worth keeping in a file: six significant digits."""
    return [numbers(value) if isinstance(value, list) else float(f"{value:.6g}") for value in values]
