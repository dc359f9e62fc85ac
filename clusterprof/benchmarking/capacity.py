"""Capacity: what fits in a given memory, worked out from what was measured.

With the weights `W`, and per row of the batch the prefill's peak `P` (the row's own cache counts in it) and the
cache `K` at the end of the measured decoding, a memory of `M` bytes holds `B` rows

- read together, as `generate` does with a batch:  ``W + B * max(P, K) <= M``
- read one after the other and decoded together:   ``W + P + (B - 1) * K <= M``

For other prompt lengths, `P` and the `K` of a full cache grow in proportion to the length; the `K` of a compressed
one does not. That is on the safe side for longer prompts than the measured one, as some of `P` is constant. Not
counted: fragmentation, other processes, and what a decode step needs beside the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.benchmarking.results import Decode, Prefill
from clusterprof.benchmarking.subjects import FULL, PREALLOCATED


@dataclass(frozen=True)
class Capacity:
    """What fits beside the weights, estimated from one measurement.

    Attributes
    ----------
    tokens, batch, subject : int, int, str
        The measurement: prompt length, rows, name of the cache.
    largest_batch, largest_batch_one_by_one : int, optional
        Rows of that prompt length, read together and one after the other; 0 if not even one prompt fits. None for
        a compressed cache whose prompt fits in the size: longer ones take another kind of cache.
    longest_prompt, longest_prompt_one_by_one : int, optional
        Tokens at that batch size. None there, too, and where the prefill's memory does not grow in proportion to
        the prompt.
    context_limits, context_limits_one_by_one : bool
        Whether the longest prompt is the model's context, and the memory would hold more.
    """

    tokens: int
    batch: int
    subject: str
    largest_batch: int | None
    largest_batch_one_by_one: int | None
    longest_prompt: int | None
    longest_prompt_one_by_one: int | None
    context_limits: bool = False
    context_limits_one_by_one: bool = False


@dataclass(frozen=True)
class _Row:
    """Bytes per row of the batch: the prefill's peak, and the cache of a prompt as long as the measured one."""

    tokens: int
    peak: float
    cache: float
    compressed: bool


def capacities(
    prefills: Sequence[Prefill], decodes: Sequence[Decode], *, weights: int, memory: int, proportional: bool
) -> list[Capacity]:
    """Estimate what fits in a memory, for every measured decoding whose prefill was measured too.

    Parameters
    ----------
    prefills, decodes : sequence of Prefill, sequence of Decode
        What was measured.
    weights, memory : int
        Bytes of the model and of the memory.
    proportional : bool
        Whether the prefill's memory grows in proportion to the prompt, as it does with any attention but eager.
    """
    peaks = {(it.tokens, it.rows, it.subject): it.peak_bytes for it in prefills}
    free = memory - weights
    found = []
    for it in decodes:
        peak = peaks.get((it.tokens, it.prefilled_rows, it.subject))
        if peak is None or it.kv_bytes_end is None:
            continue
        if not it.compressed and it.subject not in (FULL.name, PREALLOCATED.name):
            found.append(Capacity(it.tokens, it.batch, it.subject, None, None, None, None))
            continue
        row = _Row(it.tokens, peak / it.prefilled_rows, it.kv_bytes_end / it.batch, it.compressed)
        found.append(
            Capacity(
                tokens=it.tokens,
                batch=it.batch,
                subject=it.subject,
                largest_batch=max(0, int(free // max(row.peak, row.cache))),
                largest_batch_one_by_one=max(0, int((free - row.peak) // row.cache) + 1),
                longest_prompt=_together(row, it.batch, free) if proportional else None,
                longest_prompt_one_by_one=_one_by_one(row, it.batch, free) if proportional else None,
            )
        )
    return found


def within_context(found: Sequence[Capacity], context: int | None) -> list[Capacity]:
    """Return the capacities with no prompt longer than the model's context in tokens, if it has one."""
    if context is None:
        return list(found)
    return [
        replace(
            it,
            longest_prompt=_at_most(it.longest_prompt, context),
            longest_prompt_one_by_one=_at_most(it.longest_prompt_one_by_one, context),
            context_limits=it.longest_prompt is not None and it.longest_prompt > context,
            context_limits_one_by_one=it.longest_prompt_one_by_one is not None
            and it.longest_prompt_one_by_one > context,
        )
        for it in found
    ]


def _at_most(tokens: int | None, context: int) -> int | None:
    return None if tokens is None else min(tokens, context)


def _together(row: _Row, batch: int, free: int) -> int:
    share = free / batch
    if not row.compressed:
        return _tokens(row, share / max(row.peak, row.cache))
    return _tokens(row, share / row.peak) if share >= row.cache else 0


def _one_by_one(row: _Row, batch: int, free: int) -> int:
    others = (batch - 1) * row.cache
    if not row.compressed:
        return _tokens(row, free / (row.peak + others))
    return _tokens(row, (free - others) / row.peak)


def _tokens(row: _Row, times: float) -> int:
    return max(0, int(row.tokens * times))
