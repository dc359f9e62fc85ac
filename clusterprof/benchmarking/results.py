"""Results of a benchmark: medians of what was measured, and every ratio between two numbers of the same run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from clusterprof.benchmarking.measure import Measurements, Samples
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import FULL, PREALLOCATED, Subject

_Table = Mapping[tuple[int, int, str], Samples]


@dataclass(frozen=True)
class Prefill:
    """A prompt read into one cache, compression included.

    Attributes
    ----------
    tokens, rows : int
        Prompt length, and how many prompts of it were read at once.
    subject : str
        Name of the cache.
    compressed : bool
        False for a full cache, and for a prompt that fits in the size.
    seconds : float, optional
        Median; None if it was not measured.
    ratio_to_full : float, optional
        Seconds over those of the full cache.
    peak_bytes : int, optional
        Most memory held at a time, beyond the weights and whatever else was there before; the cache counts.
    kv_bytes : int, optional
        Of the cache, after it.
    error : str, optional
        Why something is missing.
    spread : float, optional
        Longest over shortest time of the repetitions; None with fewer than two.
    """

    tokens: int
    rows: int
    subject: str
    compressed: bool
    seconds: float | None
    ratio_to_full: float | None
    peak_bytes: int | None
    kv_bytes: int | None
    error: str | None
    spread: float | None = None


@dataclass(frozen=True)
class Decode:
    """Tokens decoded over one cache.

    Attributes
    ----------
    tokens, batch : int
        Prompt length, and rows of the cache.
    prefilled_rows : int
        How many rows were really read; if it is less than the batch, one row repeated makes up the batch.
    subject : str
        Name of the cache.
    compressed : bool
        False for a full cache, and for a prompt that fits in the size.
    tokens_per_s : float, optional
        Median, over all rows; None if it was not measured.
    ratio_to_full, ratio_to_preallocated : float, optional
        Tokens per second over those of the full cache, as transformers has it and preallocated.
    kv_bytes_start, kv_bytes_end : int, optional
        Of the cache before the first step and after the last.
    error : str, optional
        Why something is missing.
    spread : float, optional
        Longest over shortest time of the repetitions; None with fewer than two.
    """

    tokens: int
    batch: int
    prefilled_rows: int
    subject: str
    compressed: bool
    tokens_per_s: float | None
    ratio_to_full: float | None
    ratio_to_preallocated: float | None
    kv_bytes_start: int | None
    kv_bytes_end: int | None
    error: str | None
    spread: float | None = None


def prefill_results(
    found: Measurements, subjects: Sequence[Subject], settings: BenchSettings
) -> list[Prefill]:
    """Return one result for every prefill of which anything was measured, by length, rows and subject."""
    return [
        Prefill(
            tokens=tokens,
            rows=rows,
            subject=subject.name,
            compressed=subject.compresses(tokens),
            seconds=(seconds := _seconds(found.prefills, tokens, rows, subject)),
            ratio_to_full=_ratio(seconds, _seconds(found.prefills, tokens, rows, FULL)),
            peak_bytes=samples.peak_bytes,
            kv_bytes=samples.kv_bytes_end,
            error=samples.error,
            spread=_spread(samples),
        )
        for tokens in settings.tokens
        for rows, _ in settings.groups
        for subject in subjects
        if (samples := found.prefills.get((tokens, rows, subject.name))) is not None
        and (samples.peak_bytes is not None or samples.error is not None)
    ]


def decode_results(found: Measurements, subjects: Sequence[Subject], settings: BenchSettings) -> list[Decode]:
    """Return one result for all decoding of which anything was measured, by length, batch size and subject."""
    return [
        Decode(
            tokens=tokens,
            batch=batch,
            prefilled_rows=rows,
            subject=subject.name,
            compressed=subject.compresses(tokens),
            tokens_per_s=None if seconds is None else batch * settings.new_tokens / seconds,
            # Seconds the other way round: for the same tokens, twice the time is half the speed.
            ratio_to_full=_ratio(_seconds(found.decodes, tokens, batch, FULL), seconds),
            ratio_to_preallocated=_ratio(_seconds(found.decodes, tokens, batch, PREALLOCATED), seconds),
            kv_bytes_start=samples.kv_bytes_start,
            kv_bytes_end=samples.kv_bytes_end,
            error=samples.error,
            spread=_spread(samples),
        )
        for tokens in settings.tokens
        for rows, batch_sizes in settings.groups
        for batch in batch_sizes
        for subject in subjects
        if (samples := found.decodes.get((tokens, batch, subject.name))) is not None
        and (
            (seconds := _seconds(found.decodes, tokens, batch, subject)) is not None
            or samples.error is not None
        )
    ]


def _seconds(table: _Table, tokens: int, rows: int, subject: Subject) -> float | None:
    samples = table.get((tokens, rows, subject.name))
    return median(samples.seconds) if samples is not None and samples.seconds else None


def _spread(samples: Samples) -> float | None:
    return max(samples.seconds) / min(samples.seconds) if len(samples.seconds) > 1 else None


def _ratio(first: float | None, second: float | None) -> float | None:
    return first / second if first is not None and second is not None else None
