"""LongBench rows from a folder, from data.zip, or from the hub, wrapped in a task's template."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from clusterprof.data.files import open_file, read_jsonl
from clusterprof.data.hub import download_longbench
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS, LongBenchTask
from clusterprof.data.records import answer_list, checked_text, id_field, text_field
from clusterprof.data.rows import Dataset, Message, Row, make_dataset
from clusterprof.errors import DataError

MAX_MEMBER_BYTES = 1 << 30
MAX_TEMPLATES_BYTES = 1 << 20


def load_longbench(task_name: str, data_dir: Path | None, templates: Path | None) -> Dataset:
    """Read one task's rows.

    Parameters
    ----------
    task_name : str
        A key of `LONGBENCH_TASKS`.
    data_dir : Path or None
        A folder with ``<task>.jsonl`` (also under ``data/``) or ``data.zip``, or the zip file itself; the
        hub's ``data.zip`` if None.
    templates : Path or None
        JSON file that maps task names to templates with ``{context}`` and ``{input}``, instead of the
        wording that comes with this package.

    Raises
    ------
    DataError
        If the task is not there, a row is not what LongBench's format promises, or there is no network.
    """
    task = LONGBENCH_TASKS[task_name]
    template = task.template if templates is None else _read_template(templates, task_name)
    place = download_longbench() if data_dir is None else data_dir
    with _open_task(place, task_name) as (stream, label):
        rows = (_row(record, where, task, template) for where, record in read_jsonl(stream, label))
        return make_dataset(task_name, label, "test", rows)


@contextmanager
def _open_task(place: Path, task_name: str) -> Iterator[tuple[IO[bytes], str]]:
    """Open the task's JSONL wherever it lies under `place`, and name it."""
    try:
        if not place.exists():
            raise DataError(
                f"There is no {place}; --data-dir takes a folder of LongBench JSONL, or data.zip."
            )
        candidates = [place / f"{task_name}.jsonl", place / "data" / f"{task_name}.jsonl"]
        file = next((path for path in candidates if path.exists()), None)
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror or error}.") from error
    archive = place / "data.zip" if place.is_dir() else place
    if file is not None:
        with open_file(file) as stream:
            yield stream, str(file)
    elif archive.exists():
        with _open_member(archive, task_name) as opened:
            yield opened
    else:
        raise DataError(_missing(task_name, place, _files_in(place)))


@contextmanager
def _open_member(archive: Path, task_name: str) -> Iterator[tuple[IO[bytes], str]]:
    """Open one member by its name; nothing is unpacked to disk."""
    try:
        with open_file(archive) as stream, zipfile.ZipFile(stream) as opened:
            members = {info.filename: info for info in opened.infolist()}
            names = (f"data/{task_name}.jsonl", f"{task_name}.jsonl")
            info = next((members[name] for name in names if name in members), None)
            if info is None:
                raise DataError(_missing(task_name, archive, _members(opened)))
            label = f"{archive}/{info.filename}"
            if info.file_size > MAX_MEMBER_BYTES:
                raise DataError(
                    f"{label} unpacks to more than {MAX_MEMBER_BYTES >> 20} MiB; no LongBench task does."
                )
            with opened.open(info) as member:
                yield member, label
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{archive} is not a whole zip file ({error}); fetch it again.") from error
    except (NotImplementedError, RuntimeError) as error:
        raise DataError(f"{archive} is packed in a way that cannot be read: {error}.") from error


def longbench_tasks_in(place: Path) -> list[str]:
    """The tasks whose rows lie in a folder or zip file, in LongBench's order."""
    archive = place / "data.zip" if place.is_dir() else place
    present = _files_in(place) if place.is_dir() else []
    if archive.is_file():
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(archive) as opened:
            present += _members(opened)
    return [name for name in LONGBENCH_TASKS if name in present]


def _files_in(place: Path) -> list[str]:
    return [path.stem for folder in (place, place / "data") for path in folder.glob("*.jsonl")]


def _members(archive: zipfile.ZipFile) -> list[str]:
    return [Path(name).stem for name in archive.namelist() if name.endswith(".jsonl")]


def _missing(task_name: str, place: Path, present: list[str]) -> str:
    tasks = ", ".join(sorted(set(present) & set(LONGBENCH_TASKS))) or "no LongBench task"
    return f"There is no {task_name}.jsonl in {place}; what is there: {tasks}."


def _row(record: Mapping[str, Any], where: str, task: LongBenchTask, template: str) -> Row:
    context = text_field(record, "context", where)
    asked = text_field(record, "input", where)
    if not (context.strip() or asked.strip()):
        raise DataError(f"{where}: fields 'context' and 'input' are both blank.")
    if "answers" not in record:
        raise DataError(f"{where}: field 'answers' is missing.")
    content, question, question_start = _fill(template, context, asked)
    if not task.has_question:
        question, question_start = "", None
    classes = record.get("all_classes")
    return Row(
        id=id_field({key: record[key] for key in ("_id",) if record.get(key) is not None}, where),
        messages=(Message("user", content),),
        context=context,
        question=question,
        question_start=question_start,
        answers=answer_list(record["answers"], f"{where}: field 'answers'"),
        all_classes=() if classes is None else answer_list(classes, f"{where}: field 'all_classes'"),
        max_new_tokens=task.max_new_tokens,
        use_chat_template=task.use_chat_template,
    )


def _fill(template: str, context: str, asked: str) -> tuple[str, str, int | None]:
    """Fill a template; return the text, the question, and where in the text the question starts.

    The question is the input, or what the template says after the context if there is no input.
    """
    values = {"context": context, "input": asked}

    def fill(part: str) -> str:
        # One pass over the template: braces inside the values stay as they are.
        return re.sub(r"\{(context|input)\}", lambda match: values[match[1]], part)

    content = fill(template)
    if "{input}" in template and asked.strip():
        before = fill(template.rpartition("{input}")[0])
        return content, asked.strip(), len(before) + len(asked) - len(asked.lstrip())
    instruction = fill(template.rpartition("{context}")[2]).lstrip()
    if not instruction:
        return content, "", None
    return content, instruction.rstrip(), len(content) - len(instruction)


def _read_template(path: Path, task_name: str) -> str:
    with open_file(path) as stream:
        content = stream.read(MAX_TEMPLATES_BYTES + 1)
    if len(content) > MAX_TEMPLATES_BYTES:
        raise DataError(f"{path} is larger than {MAX_TEMPLATES_BYTES >> 20} MiB, and no file of templates.")
    try:
        templates = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON file of templates ({error}).") from error
    if not isinstance(templates, dict) or task_name not in templates:
        raise DataError(f"{path} has no template for {task_name}; it maps task names to templates.")
    template = checked_text(templates[task_name], f"{path}: the template of {task_name}")
    if "{context}" not in template:
        raise DataError(f"{path}: the template of {task_name} does not contain {{context}}.")
    return template
