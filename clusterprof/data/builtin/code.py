"""Source files of the standard library, to be continued by their next line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from clusterprof.data.rows import Message, Row
from clusterprof.errors import DataError

MAX_NEW_TOKENS = 64
SMALLEST_FILE_BYTES = 4096
# Tables and test data rather than code that somebody would complete.
SKIPPED = frozenset({"encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "__pycache__"})


def draw(rng: Random, index: int) -> Callable[[int], Row]:
    """Choose a file, one of its lines to predict, and the files that come before it if it is too short."""
    files = list(_source_files())
    rng.shuffle(files)
    lines = _lines(files[0])
    targets = [i for i, line in enumerate(lines) if i > len(lines) // 4 and _is_worth_predicting(line)]
    target = rng.choice(targets or [len(lines) - 1])

    def make(units: int) -> Row:
        before = lines[max(0, target - units) : target]
        for other in files[1:]:
            missing = units - len(before)
            if missing <= 0:
                break
            before = _lines(other)[-missing:] + before
        context = "\n".join(before) + "\n"
        return Row(
            id="",
            messages=(Message("user", context),),
            context=context,
            answers=(lines[target],),
            max_new_tokens=MAX_NEW_TOKENS,
            use_chat_template=False,
        )

    return make


@cache
def _source_files() -> tuple[Path, ...]:
    library = Path(os.__file__).parent
    # Outside a virtual environment the folder also holds site-packages, which differ between machines.
    files = tuple(
        path
        for name in sorted(sys.stdlib_module_names)
        for path in (library / f"{name}.py", *sorted((library / name).rglob("*.py")))
        if path.is_file()
        and not SKIPPED & set(path.relative_to(library).parts)
        and path.stat().st_size >= SMALLEST_FILE_BYTES
    )
    if not files:
        raise DataError(f"The dataset 'code' needs Python's own source files, and {library} has none.")
    return files


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def _is_worth_predicting(line: str) -> bool:
    """Whether a line says enough to be missed: no bracket, comment or docstring edge."""
    code = line.strip()
    return 12 <= len(code) <= 100 and not code.startswith(("#", '"', "'", "@"))
