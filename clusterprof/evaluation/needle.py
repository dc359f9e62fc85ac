"""Needle in a haystack: lengths by depths, with several needles and haystacks (the paper's Figures 7 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from clusterprof.data.builtin.generator import fit_row
from clusterprof.data.builtin.needle import CITIES, KINDS, Needle
from clusterprof.data.builtin.prose import sentences, split_sentences
from clusterprof.data.rows import Row
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from clusterprof.evaluation.tasks import Labels, Task, TaskMaker


def needle_tasks(
    maker: TaskMaker,
    *,
    tokens: Sequence[int],
    depths: int,
    samples: int,
    seed: int,
    haystack: str | None,
) -> list[Task]:
    """The prompts of the grid: every length at every depth, ``samples`` times.

    The needle stands at a sentence's end, depth 0 before all of them and depth 1 after; its kinds take turns, and
    each prompt's haystack starts at another sentence.

    Parameters
    ----------
    tokens : sequence of int
        Prompt lengths; a prompt is at most so long, and less than one sentence shorter where that is possible.
    depths : int
        How many, evenly from 0 to 1.
    haystack : str, optional
        Text to hide the needles in; by default CPython's language reference.

    Raises
    ------
    DataError
        If a haystack has too few sentences, or a length is too short for a question.
    """
    text = sentences() if haystack is None else split_sentences(haystack)
    if len(text) < 10:
        raise DataError(
            f"The haystack has {len(text)} sentences, and at least 10 are needed; give a longer text."
        )
    tasks = []
    for length in tokens:
        for step in range(depths):
            depth = step / (depths - 1) if depths > 1 else 0.5
            # The kinds take turns within a cell, but no depth begins with a kind of its own.
            first_kind = Random(f"kind {seed} {length} {depth:.3f}").randrange(len(KINDS))  # noqa: S311
            for sample in range(samples):
                rng = Random(f"needle {seed} {length} {depth:.3f} {sample}")  # noqa: S311
                needle = KINDS[(first_kind + sample) % len(KINDS)](rng, rng.choice(CITIES))
                row = _row(needle, text, rng.randrange(len(text)), depth, length, maker.tokenizer)
                row = replace(row, id=f"{length}-{depth:.3f}-{sample}-{seed}")
                labels: Labels = {"tokens": length, "depth": round(depth, 4), "needle": needle.kind}
                tasks += maker.make("needle", [row], labels=labels, references=(needle.statement,))
    return tasks


def _row(
    needle: Needle,
    text: Sequence[str],
    start: int,
    depth: float,
    tokens: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Row:
    def make(units: int) -> Row:
        return needle.hidden([text[(start + offset) % len(text)] for offset in range(units)], depth)

    row, _ = fit_row(make, tokenizer, tokens)
    if row is None:
        raise DataError(f"No needle prompt fits in {tokens} tokens of this tokenizer; raise --tokens.")
    return row
