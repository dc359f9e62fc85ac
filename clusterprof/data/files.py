"""Local files: JSONL, JSON, CSV and Parquet, each read into records that know where they stand."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from clusterprof.data.records import FIELDS, row_from_record
from clusterprof.data.rows import Dataset, make_dataset
from clusterprof.errors import DataError

MAX_LINE_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 30
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

Records = Iterator[tuple[str, Mapping[str, Any]]]


def load_file(path: Path, name: str) -> Dataset:
    """Read a local file, checking every row.

    Parameters
    ----------
    path : Path
        Ends in ``.jsonl``, ``.json`` (a list of objects), ``.csv`` or ``.parquet``; text files are UTF-8.
    name : str
        What the dataset will be called.

    Raises
    ------
    DataError
        Naming the file, the line (for JSON and Parquet the row) and the field at fault.
    """
    readers = {".jsonl": read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    with open_file(path) as stream:
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise DataError(f"{path} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")
        rows = (row_from_record(record, where) for where, record in reader(stream, str(path)))
        return make_dataset(name, str(path), "", rows)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file, or raise `DataError` saying why that is not possible."""
    try:
        if path.is_dir():
            raise DataError(
                f"{path} is a folder; give one {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file."
            )
        # Opening a pipe would wait for a writer that may never come.
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a regular file.")
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}; check its path.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def read_jsonl(stream: IO[bytes], label: str) -> Records:
    """Yield ``(place, object)`` for each line that is not blank; a BOM and CRLF are fine.

    Raises
    ------
    DataError
        Naming `label` and the line that is too long, not UTF-8, not JSON, or not an object.
    """
    for number, line in _read_lines(stream, label):
        if line.strip():
            where = f"{label}, line {number}"
            yield where, _object(_parse_json(line, where), where)


def _read_lines(stream: IO[bytes], label: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{label}, line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB.")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            yield number, line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{label}, line {number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8."
        ) from error
    except OSError as error:
        raise DataError(f"{label} cannot be read: {error.strerror or error}.") from error


def _parse_json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
        raise DataError(f"{where}: is not JSON ({error.msg} at {line}column {error.colno}).") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets nested thousands deep.
        raise DataError(f"{where}: holds JSON that no dataset needs ({error}).") from error


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: is not a JSON object; every row is written as {{...}}.")
    return value


def _read_json(stream: IO[bytes], label: str) -> Records:
    try:
        content = stream.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise DataError(f"{label} is larger than {MAX_JSON_BYTES >> 20} MiB; save it as JSONL.")
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{label}: byte {error.start + 1} is not UTF-8; save the file as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{label} cannot be read: {error.strerror or error}.") from error
    rows = _parse_json(text, label) if text.strip() else []
    if not isinstance(rows, list):
        raise DataError(
            f"{label}: is not a list of rows; write [{{...}}, ...], or one object per line as JSONL."
        )
    for number, value in enumerate(rows, start=1):
        where = f"{label}, row {number}"
        yield where, _object(value, where)


def _read_csv(stream: IO[bytes], label: str) -> Records:
    # The limit is the process's: it is raised for this file only, so the file is read in one go.
    previous = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        return iter(list(_csv_records(stream, label)))
    finally:
        csv.field_size_limit(previous)


def _csv_records(stream: IO[bytes], label: str) -> Records:
    reader = csv.reader((line for _, line in _read_lines(stream, label)), strict=True)
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            where = f"{label}, line {line}"
            line = reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = cells
                if len(set(header)) < len(header):
                    raise DataError(f"{where}: two columns have the same name.")
                continue
            if len(cells) != len(header):
                raise DataError(f"{where}: has {len(cells)} fields, and the header names {len(header)}.")
            yield where, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{label}, line {line}: is not CSV ({error}).") from error


def _read_parquet(stream: IO[bytes], label: str) -> Records:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        file = pq.ParquetFile(stream)
        columns = [column for column in file.schema_arrow.names if column in FIELDS]
        if not columns:
            raise DataError(f"{label}: has none of the columns {', '.join(FIELDS)}.")
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{label}, row {number}", record
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        # The last two: text that is not UTF-8, and dates that Python has no year for.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{label} is not a Parquet file that can be read: {reason.rstrip('.')}.") from error
