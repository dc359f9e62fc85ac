"""A benchmark as tables: the prefill, decoding, and what fits into memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeVar

from clusterprof.report.numbers import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.benchmarking.capacity import Capacity
    from clusterprof.benchmarking.results import Decode, Prefill
    from clusterprof.benchmarking.run import BenchReport
    from clusterprof.benchmarking.subjects import Subject

T = TypeVar("T")

_MISSING = "-"
_CONTEXT = " (context)"
# Longest over shortest time of the same work, up to which a machine counts as quiet.
_STEADY = 1.2


def bench_tables(report: "BenchReport", *, memory: str | None = None) -> list["Table"]:
    """Return the tables of what was measured; of what fits into memory only where one is known and holds the model.

    Parameters
    ----------
    memory : str, optional
        The memory as the user wrote it.
    """
    subjects = {subject.name: subject for subject in report.subjects}
    tables = [_prefill_table(report.prefill, subjects)]
    if report.decode:
        tables.append(_decode_table(report.decode, subjects, new_tokens=report.settings.new_tokens))
    if report.capacity and _holds_weights(report):
        tables.append(_capacity_table(report.capacity, subjects, memory=_memory(report, memory)))
    return tables


def bench_notes(
    report: "BenchReport",
    *,
    memory: str | None = None,
    question: Literal["given", "assumed"] | None = None,
) -> list[str]:
    """Return in a sentence each what the tables do not say of themselves.

    Parameters
    ----------
    memory : str, optional
        The memory as the user wrote it.
    question : {"given", "assumed"}, optional
        Where the window's length comes from, if the profile's window is the question.
    """
    from clusterprof.runtime.cache import GROWTH

    ours = next(subject.compression for subject in report.subjects if subject.compression is not None)
    notes = [f"Compressed caches keep {ours.size:,} tokens of the prompt per KV head."]
    if question is not None:
        notes.append(f"The profile's window is the question; its length is {question}: {ours.window} tokens.")
    notes += [
        *_timing_notes(report),
        "Peak memory is what the prefill held beside the weights, its cache included.",
    ]
    if report.decode:
        notes.append(
            f"Buffers of a compressed cache grow by {GROWTH} tokens at a time, so what is allocated at the end may "
            "be more than what is filled."
        )
    return notes + _capacity_notes(report, memory)


def _timing_notes(report: "BenchReport") -> list[str]:
    times = report.settings.repeats
    most = "at most " if report.interrupted else ""
    timed = "once" if times == 1 else f"{most}{times:,} times in turns, and the medians are shown"
    rows = ""
    if any(it.prefilled_rows < it.batch for it in report.decode):
        rows = "; one row was read, and repeated for larger batches"
    elif any(it.batch > 1 for it in report.decode):
        rows = "; each row of a batch was read"
    notes = [f"Everything was timed {timed}{rows}."]
    spreads = [it.spread for it in report.prefill if it.seconds is not None]
    spreads += [it.spread for it in report.decode if it.tokens_per_s is not None]
    known = [value for value in spreads if value is not None]
    if known:
        notes.append("A ratio marked ~ differs from 1 by no more than the repetitions do from one another.")
    if len(known) < len(spreads):
        notes.append(
            "Ratios of what was timed once have no spread, so differences below 20 % mean nothing; see --repeats."
        )
    spread = max(known, default=1.0)
    if spread > _STEADY:
        notes.append(
            f"The same work took up to {spread:.1f} times as long from one time to the next, so the machine had "
            "something else to do."
        )
    return notes


def _capacity_notes(report: "BenchReport", memory: str | None) -> list[str]:
    if not report.capacity:
        return []
    if not _holds_weights(report):
        weights = size_text(report.model["weight_bytes"])
        return [f"Nothing fits into {_memory(report, memory)}: the weights alone need {weights}."]
    notes = [
        "What fits is estimated from the weights, peak memory and KV cache, for rows that are read together "
        "and for rows that are read one by one, then decoded together (see --memory in --help)."
    ]
    if any(it.context_limits or it.context_limits_one_by_one for it in report.capacity):
        notes.append("A longest prompt marked (context) is the model's context; the memory would hold more.")
    if any(it.largest_batch is None for it in report.capacity):
        notes.append(
            "Where a prompt fits in the size nothing is compressed, so what fits is not estimated for compressed "
            f"caches ({_MISSING}); a longer --tokens gives it."
        )
    if report.environment["attention_backend"] == "eager":
        notes.append(
            "Eager attention's memory does not grow in proportion to the prompt, so there is no longest prompt "
            f"({_MISSING}); --attn sdpa gives it."
        )
    return notes


def _holds_weights(report: "BenchReport") -> bool:
    return report.memory_bytes is not None and report.memory_bytes > report.model["weight_bytes"]


def _memory(report: "BenchReport", written: str | None) -> str:
    return written or f"{(report.memory_bytes or 0) / 2**30:,.1f} GiB"


def _prefill_table(prefills: Sequence["Prefill"], subjects: Mapping[str, "Subject"]) -> "Table":
    from clusterprof.benchmarking.subjects import FULL

    spreads = {(it.tokens, it.rows, it.subject): it.spread for it in prefills}
    table = _table("Prefill, compression included", "rows", "seconds", "x full", "peak memory", "KV cache")
    _add_sections(
        table,
        prefills,
        lambda it: (it.tokens, it.rows),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            it.error or _number(it.seconds, 3),
            _ratio(it.ratio_to_full, it.spread, spreads.get((it.tokens, it.rows, FULL.name))),
            _size(it.peak_bytes),
            _size(it.kv_bytes),
        ),
    )
    return table


def _decode_table(
    decodes: Sequence["Decode"], subjects: Mapping[str, "Subject"], *, new_tokens: int
) -> "Table":
    from clusterprof.benchmarking.subjects import FULL, PREALLOCATED

    headings = ("batch", "tokens/s", "x full", "x preallocated", "KV cache", "allocated at the end")
    spreads = {(it.tokens, it.batch, it.subject): it.spread for it in decodes}
    table = _table(f"Decoding {new_tokens} tokens", *headings)
    _add_sections(
        table,
        decodes,
        lambda it: (it.tokens, it.batch),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            it.error or _number(it.tokens_per_s, 1),
            _ratio(it.ratio_to_full, it.spread, spreads.get((it.tokens, it.batch, FULL.name))),
            _ratio(
                it.ratio_to_preallocated, it.spread, spreads.get((it.tokens, it.batch, PREALLOCATED.name))
            ),
            _size(it.kv_bytes_start),
            _size(it.kv_bytes_end),
        ),
    )
    return table


def _capacity_table(
    capacities: Sequence["Capacity"], subjects: Mapping[str, "Subject"], *, memory: str
) -> "Table":
    batch, prompt = "largest batch", "longest prompt"
    headings = (f"{batch}, together", f"{batch}, one by one", f"{prompt}, together", f"{prompt}, one by one")
    table = _table(f"What fits into {memory}, estimated", "batch", *headings)
    _add_sections(
        table,
        capacities,
        lambda it: (it.tokens, it.batch),
        lambda it: (
            _label(subjects[it.subject], it.tokens),
            _number(it.largest_batch, 0),
            _number(it.largest_batch_one_by_one, 0),
            _number(it.longest_prompt, 0) + _CONTEXT * it.context_limits,
            _number(it.longest_prompt_one_by_one, 0) + _CONTEXT * it.context_limits_one_by_one,
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


def _ratio(value: float | None, *spreads: float | None) -> str:
    """A ratio to the reference, marked where either's repetitions differ as much; 1.0 is the reference itself."""
    if value is None or value == 1.0:
        return _number(value, 2)
    noise = max((spread for spread in spreads if spread is not None), default=1.0)
    return ("~" if max(value, 1 / value) <= noise else "") + _number(value, 2)


def _size(value: int | None) -> str:
    return _MISSING if value is None else size_text(value)
