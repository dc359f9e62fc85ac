"""From what both sides measured to the table, and how far their kept positions agree."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks.kvpress.exchange import PLAIN, PromptRuns, Run, Task

_HEADINGS = (
    "",
    "prefill s, full cache",
    "prefill, compressed / full (range)",
    "decode tokens/s",
    "full cache",
    "ratio",
    "needles right",
    "full cache",
)


@dataclass(frozen=True)
class Row:
    """One method in one environment.

    Attributes
    ----------
    full_prefill_s : float
        Median seconds of a plain prefill.
    overheads : tuple of float
        Per prompt: compressed prefill / plain prefill, run one right after the other.
    speed, full_speed : float
        Median decode tokens/s over the compressed and over the full cache.
    right, full_right : int
        Right answers of as many as there are overheads.
    """

    label: str
    full_prefill_s: float
    overheads: tuple[float, ...]
    speed: float
    full_speed: float
    right: int
    full_right: int


@dataclass(frozen=True)
class Agreement:
    """How far two sides kept the same positions, over all prompts, layers and KV heads.

    Attributes
    ----------
    heads, equal_heads : int
        Kept sets, and how many are the same on both sides.
    kept, shared : int
        Positions that one side kept, and those of them that the other kept too.
    at_edges : int
        Of the positions that only the second side kept, those at either end of the prefix, where the two
        projects pool differently.
    prompts, equal_texts : int
        Prompts, and how many got the same continuation from both sides.
    """

    heads: int
    equal_heads: int
    kept: int
    shared: int
    at_edges: int
    prompts: int
    equal_texts: int


def summarise(
    label: str, runs: list[PromptRuns], name: str, is_right: Callable[[int, list[int]], bool]
) -> Row:
    """One row of the table; ``is_right`` takes a prompt's index and what was generated."""

    def speed(variant: str) -> float:
        return median((len(run[variant].tokens) - 1) / run[variant].decode_s for run in runs)

    def right(variant: str) -> int:
        return sum(is_right(index, run[variant].tokens) for index, run in enumerate(runs))

    return Row(
        label=label,
        full_prefill_s=median(run[PLAIN].prefill_s for run in runs),
        overheads=tuple(run[name].prefill_s / run[PLAIN].prefill_s for run in runs),
        speed=speed(name),
        full_speed=speed(PLAIN),
        right=right(name),
        full_right=right(PLAIN),
    )


def compare_kept(theirs: list[PromptRuns], ours: list[PromptRuns], name: str, task: Task) -> Agreement:
    """Compare the positions that two sides kept by the method of this name."""
    heads = equal_heads = kept = shared = at_edges = equal_texts = 0
    for prompt, left, right in zip(task.prompts, theirs, ours, strict=True):
        edges = _edges(len(prompt) - task.window, task.kernel_size // 2)
        for first, second in zip(_kept_sets(left[name]), _kept_sets(right[name]), strict=True):
            heads += 1
            equal_heads += first == second
            kept += len(first)
            shared += len(first & second)
            at_edges += len((second - first) & edges)
        equal_texts += left[name].tokens == right[name].tokens
    return Agreement(heads, equal_heads, kept, shared, at_edges, len(ours), equal_texts)


def _edges(prefix_length: int, half: int) -> set[int]:
    """Positions whose pooling window reaches over an end of the prefix."""
    return {*range(half), *range(prefix_length - half, prefix_length)}


def _kept_sets(run: Run) -> list[set[int]]:
    return [set(head) for layer in run.kept for head in layer]


def agreement_text(agreement: Agreement) -> str:
    """The agreement in words, with what explains the rest."""
    apart = agreement.kept - agreement.shared
    return (
        f"Of the {agreement.kept:,} positions that SnapKVPress kept, SnapKV kept {agreement.shared:,} "
        f"({agreement.shared / agreement.kept:.3%}); {agreement.equal_heads:,} of {agreement.heads:,} kept sets and "
        f"{agreement.equal_texts} of {agreement.prompts} continuations are the same. Of the {apart:,} others, "
        f"{agreement.at_edges:,} gave way to a position at an end of the prefix, where kvpress pools zeros from "
        f"outside and clusterprof averages what there is; {apart - agreement.at_edges:,} have another cause."
    )


def numbers(text: str) -> set[str]:
    """The whole numbers in a text, whether or not written with thousands separators."""
    return set(re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text)))


def render(rows: list[Row]) -> str:
    """The table in Markdown."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    count = len(row.overheads)
    return (
        row.label,
        f"{row.full_prefill_s:.2f}",
        f"{median(row.overheads):.3f} ({min(row.overheads):.2f} to {max(row.overheads):.2f})",
        f"{row.speed:.1f}",
        f"{row.full_speed:.1f}",
        f"{row.speed / row.full_speed:.2f}",
        f"{row.right} of {count}",
        f"{row.full_right} of {count}",
    )
