"""Eviction: which tokens leave a layer's cache at the end of a prompt, and while decoding past a budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from clusterprof.errors import CompressionError
from clusterprof.methods import Observation
from clusterprof.profile import Compression
from clusterprof.runtime.cache import CompressedLayer, check_finite, stored
from clusterprof.runtime.importance import window_importance
from clusterprof.runtime.padding import Rows
from clusterprof.runtime.selection import kept_positions

LaterTurns = Literal["append", "compress"]


@dataclass(frozen=True)
class Eviction:
    """What to compress to, and when.

    Attributes
    ----------
    query_lengths : tuple of int, optional
        With a window that is the prompt's question: its length in each row, or one for all.
    decode_budget : int, optional
        Most tokens per head after the prompt; None never evicts those.
    later_turns : str
        "append" leaves a compressed cache alone when a conversation goes on; "compress" compresses all of it to
        ``size`` again, observed by the new turn.

    Raises
    ------
    CompressionError
        If the settings contradict each other.
    """

    compression: Compression
    query_lengths: tuple[int, ...] | None
    decode_budget: int | None
    later_turns: LaterTurns

    def __post_init__(self) -> None:
        size, window = self.compression.size, self.compression.window
        for name, numbers in (("query_length", self.query_lengths), ("decode_budget", (self.decode_budget,))):
            if numbers not in (None, (None,)) and any(type(number) is not int for number in numbers):
                given = ", ".join(map(repr, numbers or ()))
                raise CompressionError(f"{name} is {given}; it must be a whole number of tokens.")
        if window == "query" and self.query_lengths is None:
            raise CompressionError(
                "The profile's observation window is the prompt's question; say how many tokens it has, up to the "
                "end of the prompt: compress(model, profile, query_length=...)."
            )
        if window != "query" and self.query_lengths is not None:
            raise CompressionError(
                f"The profile's observation window is the last {window} tokens; query_length is for a profile that "
                'was tuned with window "query".'
            )
        lengths = self.query_lengths
        if lengths is not None and not (lengths and all(0 < length < size for length in lengths)):
            raise CompressionError(
                f"query_length is {', '.join(map(str, lengths)) or 'empty'}; each must be at least 1 and below the "
                f"profile's size of {size}."
            )
        least = 2 * self.longest_window + 2
        if self.decode_budget is not None and self.decode_budget < least:
            raise CompressionError(
                f"decode_budget is {self.decode_budget}; with an observation window of {least // 2 - 1} it must be "
                f"at least {least}."
            )
        if self.later_turns not in ("append", "compress"):
            raise CompressionError(f'later_turns is {self.later_turns!r}; it must be "append" or "compress".')

    @property
    def longest_window(self) -> int:
        """Of all rows, in tokens."""
        return max(self.query_lengths or self.windows(1))

    def check_prompts(self, count: int) -> None:
        """Raise a CompressionError if the query lengths are not those of so many prompts."""
        given = 1 if self.query_lengths is None else len(self.query_lengths)
        if given not in (1, count):
            raise CompressionError(
                f"query_length has {given} values for {count} prompts; give one per prompt, or one for all."
            )

    def windows(self, batch: int) -> list[int]:
        """Length of each row's observation window, in tokens."""
        if self.compression.window != "query":
            return [self.compression.window] * batch
        assert self.query_lengths is not None
        # One prompt may have become several rows, beams or returned sequences, side by side.
        return [length for length in self.query_lengths for _ in range(batch // len(self.query_lengths))]


def finish_prompt(
    layer: CompressedLayer,
    layer_idx: int,
    eviction: Eviction,
    rows: Sequence[Rows],
    queries: Tensor,
    scaling: float,
    *,
    fresh: int,
    of_turn: int,
) -> None:
    """Shrink a layer whose prompt, or new turn, is complete to ``size`` tokens per head, where that is due.

    Parameters
    ----------
    layer_idx : int
        For messages.
    rows : sequence of Rows
        Of the whole batch.
    queries : Tensor
        The prompt's last queries after RoPE, ``(batch, heads, at most the longest window, head_dim)``; a later
        turn may be shorter than the window.
    scaling : float
        What the model multiplies its attention scores with.
    fresh : int
        Tokens at the end that do not belong to the prompt: drafts of an answer.
    of_turn : int
        Tokens of the prompt, or of this turn alone.
    """
    end, size = layer.stored - fresh, eviction.compression.size
    if end > size and (layer.evicted_of_prompt == 0 or eviction.later_turns == "compress"):
        keys, _ = stored(layer)
        kept = [
            _kept_of_prompt(
                layer,
                layer_idx,
                eviction.compression,
                group,
                queries[:, :, -of_turn:],
                keys[..., :end, :],
                scaling,
            )
            for group in rows
        ]
        layer.keep(torch.cat(kept), end)
        layer.finish_prompt(size)
    elif layer.prompt == 0:
        layer.finish_prompt(end)
    elif eviction.decode_budget is not None and layer.stored - layer.prompt > eviction.decode_budget:
        evict_generated(layer, layer_idx, eviction, rows, queries, scaling)


def _kept_of_prompt(
    layer: CompressedLayer,
    layer_idx: int,
    compression: Compression,
    rows: Rows,
    queries: Tensor,
    keys: Tensor,
    scaling: float,
) -> Tensor:
    padding, end, size = _stored_padding(layer, rows), keys.shape[2], compression.size
    keys, queries = keys[rows.of_batch], queries[rows.of_batch]
    if end - padding <= size:
        # All of a short row stays, filled up with padding, which the attention mask goes on hiding.
        return torch.arange(end - size, end, device=keys.device).expand(*keys.shape[:2], -1)
    observation = _observation(layer_idx, rows, queries, keys[:, :, padding:], scaling)
    return kept_positions(compression.method, observation, size) + padding


def evict_generated(
    layer: CompressedLayer,
    layer_idx: int,
    eviction: Eviction,
    rows: Sequence[Rows],
    queries: Tensor,
    scaling: float,
) -> None:
    """Shrink what comes after the prompt to half of ``decode_budget``; the prompt's tokens stay.

    The paper leaves this open: nothing is compressed while decoding (its limitations). Here the latest decoded
    tokens observe those before them, as the question observes the prompt; half, so that it happens once in many
    tokens. Parameters as in :func:`finish_prompt`.
    """
    assert eviction.decode_budget is not None
    keys, _ = stored(layer)
    to_evict = layer.stored - layer.prompt - eviction.decode_budget // 2
    kept = []
    for group in rows:
        padding = _stored_padding(layer, group)
        row_keys, row_queries = keys[group.of_batch], queries[group.of_batch]
        # Padding goes first. So a short row loses fewer tokens, and every row the same number of slots.
        evicted_padding = min(padding, to_evict)
        start = layer.prompt - (max(0, group.padding - layer.evicted_of_prompt) - padding)
        generated = torch.arange(start, layer.stored, device=keys.device).expand(*row_keys.shape[:2], -1)
        if evicted_padding < to_evict:
            observation = _observation(layer_idx, group, row_queries, row_keys[:, :, padding:], scaling)
            chosen = kept_positions(
                eviction.compression.method,
                replace(observation, importance=observation.importance[..., start - padding :]),
                generated.shape[-1] - (to_evict - evicted_padding),
            )
            generated = chosen + start
        prompt = torch.arange(evicted_padding, start, device=keys.device).expand(*row_keys.shape[:2], -1)
        kept.append(torch.cat([prompt, generated], dim=-1))
    layer.keep(torch.cat(kept))


def _observation(layer_idx: int, rows: Rows, queries: Tensor, keys: Tensor, scaling: float) -> Observation:
    importance = window_importance(queries[:, :, -rows.window :], keys, scaling=scaling)
    check_finite(importance, layer_idx)
    # Fewer queries than the window has tokens observe only what lies before the window all the same.
    return Observation(importance[..., : keys.shape[2] - rows.window], window=rows.window)


def _stored_padding(layer: CompressedLayer, rows: Rows) -> int:
    """Slots at the start of these rows that hold padding: it is the first to be evicted."""
    return max(0, rows.padding - layer.evicted)
