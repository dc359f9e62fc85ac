"""A benchmark as tables: the prefill, decoding, and what fits into memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from clusterprof.report.numbers import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.benchmarking.capacity import Capacity
    from clusterprof.benchmarking.results import Decode, Prefill
    from clusterprof.benchmarking.run import BenchReport
    from clusterprof.benchmarking.subjects import Subject

T = TypeVar("T")

_MISSING = "-"
# Longest over shortest time of the same work, up to which a machine counts as quiet.
_STEADY = 1.2


def bench_tables(report: "BenchReport") -> list["Table"]:
    """Return the tables of what was measured; of what fits into memory only where a memory is known."""
    subjects = {subject.name: subject for subject in report.subjects}
    tables = [_prefill_table(report.prefill, subjects)]
    if report.decode:
        tables.append(_decode_table(report.decode, subjects, new_tokens=report.settings.new_tokens))
    if report.capacity and report.memory_bytes is not None:
        tables.append(_capacity_table(report.capacity, subjects, memory=report.memory_bytes))
    return tables


def bench_notes(report: "BenchReport") -> list[str]:
    """Return in a sentence each what the tables do not say of themselves."""
    size = next(subject.compression.size for subject in report.subjects if subject.compression is not None)
    times = report.settings.repeats
    most = "at most " if report.interrupted else ""
    timed = "once" if times == 1 else f"{most}{times:,} times in turns, and the medians are shown"
    rows = "each row of a batch was read"
    if any(it.prefilled_rows < it.batch for it in report.decode):
        rows = "one row was read, and repeated for larger batches"
    notes = [
        f"Compressed caches keep {size:,} tokens of the prompt per KV head.",
        f"Everything was timed {timed}; {rows}.",
        "Peak memory is what the prefill held beside the weights, its cache included.",
    ]
    spreads = [it.spread for it in report.prefill] + [it.spread for it in report.decode]
    spread = max((value for value in spreads if value is not None), default=1.0)
    if spread > _STEADY:
        notes.append(
            f"The same work took up to {spread:.1f} times as long from one time to the next, so the machine had "
            "something else to do; ratios close to 1 say nothing."
        )
    if report.capacity:
        context = report.model["context"]
        limit = f"; the model's context is {context:,} tokens" if context is not None else ""
        notes.append(
            "What fits is estimated from the weights, peak memory and KV cache, for rows that are read together "
            f"and for rows that are read one by one, then decoded together (see --memory in --help){limit}."
        )
    return notes


def _prefill_table(prefills: Sequence["Prefill"], subjects: Mapping[str, "Subject"]) -> "Table":
    table = _table("Prefill, compression included", "rows", "seconds", "x full", "peak memory", "KV cache")
    _add_sections(
        table,
        prefills,
        lambda it: (it.tokens, it.rows),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            it.error or _number(it.seconds, 3),
            _number(it.ratio_to_full, 2),
            _size(it.peak_bytes),
            _size(it.kv_bytes),
        ),
    )
    return table


def _decode_table(
    decodes: Sequence["Decode"], subjects: Mapping[str, "Subject"], *, new_tokens: int
) -> "Table":
    headings = ("batch", "tokens/s", "x full", "x preallocated", "KV cache", "at the end")
    table = _table(f"Decoding {new_tokens} tokens", *headings)
    _add_sections(
        table,
        decodes,
        lambda it: (it.tokens, it.batch),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            it.error or _number(it.tokens_per_s, 1),
            _number(it.ratio_to_full, 2),
            _number(it.ratio_to_preallocated, 2),
            _size(it.kv_bytes_start),
            _size(it.kv_bytes_end),
        ),
    )
    return table


def _capacity_table(
    capacities: Sequence["Capacity"], subjects: Mapping[str, "Subject"], *, memory: int
) -> "Table":
    headings = ("batch", "largest batch", "one by one", "longest prompt", "one by one")
    table = _table(f"What fits into {memory / 2**30:,.1f} GiB, estimated", *headings)
    _add_sections(
        table,
        capacities,
        lambda it: (it.tokens, it.batch),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            f"{it.largest_batch:,}",
            f"{it.largest_batch_one_by_one:,}",
            _number(it.longest_prompt, 0),
            _number(it.longest_prompt_one_by_one, 0),
        ),
    )
    return table


def _table(title: str, rows: str, *headings: str) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("prompt", justify="right")
    table.add_column(rows, justify="right")
    table.add_column("cache")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _add_sections(
    table: "Table",
    results: Iterable[T],
    key: Callable[[T], tuple[int, int]],
    cells: Callable[[T], tuple[str, ...]],
) -> None:
    """A section per prompt length and number of rows, which its first line names."""
    for (tokens, rows), group in groupby(results, key=key):
        table.add_section()
        names = (f"{tokens:,}", str(rows))
        for result in group:
            table.add_row(*names, *cells(result))
            names = ("", "")


def _label(subject: "Subject", tokens: int) -> str:
    whole = subject.compression is not None and not subject.compresses(tokens)
    return f"{subject.label}, nothing left out" if whole else subject.label


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:,.{digits}f}"


def _size(value: int | None) -> str:
    return _MISSING if value is None else size_text(value)
