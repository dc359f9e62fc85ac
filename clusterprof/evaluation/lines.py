"""LongEval's lines: prompts of several lengths, generated or from LongEval's own files (the paper's Figure 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.data import load_dataset
from clusterprof.data.files import open_file, read_jsonl
from clusterprof.data.records import text_field
from clusterprof.data.rows import Dataset, Message, Row, make_dataset
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from clusterprof.evaluation.tasks import Task, TaskMaker

MAX_NEW_TOKENS = 32
_MOST = 10**9

# Rows, and the number of lines of each prompt.
LongEval = tuple[Dataset, dict[str, int]]


def generated_lines(maker: TaskMaker, *, tokens: Sequence[int], samples: int, seed: int) -> list[Task]:
    """Prompts of the built-in generator: up to 40 for each length."""
    tasks = []
    for length in tokens:
        dataset = load_dataset("lines", tokenizer=maker.tokenizer, tokens=length, seed=seed)
        tasks += maker.draw(dataset, samples=samples, seed=seed, labels={"tokens": length})
    return tasks


def lines_of_files(maker: TaskMaker, files: Iterable[LongEval], *, samples: int, seed: int) -> list[Task]:
    """Prompts of LongEval's files, up to ``samples`` of each."""
    tasks = []
    for dataset, lines in files:
        for task in maker.draw(dataset, samples=samples, seed=seed):
            tasks.append(replace(task, labels={"lines": lines[task.row.messages[0].content]}))
    return tasks


def load_longeval(path: Path) -> LongEval:
    """Read a LongEval file: JSONL with ``prompt``, ``expected_number`` and ``num_lines``.

    Raises
    ------
    DataError
        Naming the file, the line and the field at fault.
    """
    rows, lines = [], {}
    with open_file(path) as stream:
        for where, record in read_jsonl(stream, str(path)):
            prompt = text_field(record, "prompt", where)
            expected = _whole_number(record, "expected_number", where)
            lines[prompt] = _whole_number(record, "num_lines", where)
            rows.append(
                Row(
                    id="",
                    messages=(Message("user", prompt),),
                    answers=(str(expected),),
                    max_new_tokens=MAX_NEW_TOKENS,
                )
            )
    return make_dataset("lines", str(path), "", rows), lines


def _whole_number(record: Mapping[str, Any], field: str, where: str) -> int:
    value = record.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise DataError(f"{where}: field '{field}' must be a whole number from 0 to {_MOST:,}.")
    return value
