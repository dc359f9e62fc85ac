"""From a generator's draws to a dataset whose prompts have the length that was asked for."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from clusterprof.data.builtin import code, docs, lines, needle
from clusterprof.data.prompts import count_tokens
from clusterprof.data.rows import Dataset, Row, make_dataset
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 40
MIN_TOKENS = 256
MAX_TOKENS = 131_072
SHORTEST = 0.97
# Draws per row. Units (lines, sentences) are coarse beside a short prompt, so a draw may miss the length.
ATTEMPTS = 30

# Makes the row that has this many units (lines, sentences) of text.
Make = Callable[[int], Row]


@dataclass(frozen=True)
class Generator:
    """A named generator: `draw` decides everything about row number `index` but its length."""

    name: str
    description: str
    text: str
    draw: Callable[[Random, int], Make]


_PYTHON = f"CPython {platform.python_version()}"
_ALL = (
    Generator(
        "needle", "a number hidden in prose, to be found", f"the language reference of {_PYTHON}", needle.draw
    ),
    Generator("lines", "one of many look-alike lines, to be found (LongEval)", "lists of words", lines.draw),
    Generator(
        "docs",
        "documentation, to be summarised or explained",
        f"the language reference of {_PYTHON}",
        docs.draw,
    ),
    Generator(
        "code", "source files, to be continued by one line", f"the standard library of {_PYTHON}", code.draw
    ),
)
GENERATORS = {generator.name: generator for generator in _ALL}


def generate_dataset(name: str, tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> Dataset:
    """Generate `ROWS` different rows, the same for the same arguments and Python version.

    Parameters
    ----------
    name : str
        A key of `GENERATORS`.
    tokenizer : PreTrainedTokenizerBase
        Measures the prompts, its chat template included.
    tokens : int
        Prompt length: none is longer, and none more than 3 % shorter (unless no draw comes that close,
        which takes a tokenizer with very long lines at a few hundred tokens).
    seed : int

    Raises
    ------
    DataError
        If `tokens` is out of range, or too few for the question alone.
    """
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise DataError(f"--tokens is {tokens}, and must be {MIN_TOKENS} to {MAX_TOKENS}.")
    generator = GENERATORS[name]
    prompts: set[object] = set()
    rows = []
    for index in range(ROWS):
        row = _generate_row(generator, index, tokenizer, tokens, seed, prompts)
        prompts.add(row.messages)
        rows.append(row)
    source = f"built-in generator ({tokens} tokens, from {generator.text})"
    return make_dataset(name, source, "", rows)


def _generate_row(
    generator: Generator,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
    taken: set[object],
) -> Row:
    best, longest = None, 0
    for attempt in range(ATTEMPTS):
        rng = Random(f"{generator.name} {seed} {tokens} {index} {attempt}")  # noqa: S311
        row, length = fit_row(generator.draw(rng, index), tokenizer, tokens)
        if row is None or row.messages in taken:
            continue
        if length >= SHORTEST * tokens:
            return row
        if length > longest:
            best, longest = row, length
    if best is None:
        raise DataError(
            f"No {generator.name} prompt fits in {tokens} tokens of this tokenizer; raise --tokens."
        )
    return best


def fit_row(make: Make, tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[Row | None, int]:
    """Find a number of units whose prompt is close under `tokens`, and its length; None if not even one unit fits."""
    best, longest = None, 0
    low, high = 0, tokens
    units = max(1, tokens // 25)
    for step in range(40):
        row = make(units)
        length = count_tokens(row, tokenizer)
        if length <= tokens:
            low = units
            best, longest = row, length
            if length >= SHORTEST * tokens:
                break
        else:
            high = units
        if high - low <= 1:
            break
        # In proportion first, which nearly always lands; halving then, which always ends.
        guess = round(units * 0.99 * tokens / length) if step < 6 else (low + high) // 2
        units = min(max(guess, low + 1), high - 1)
    return best, longest
