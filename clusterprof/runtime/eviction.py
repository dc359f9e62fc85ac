"""Eviction: which tokens leave a layer's cache at the end of a prompt, and while decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clusterprof.errors import CompressionError
from clusterprof.methods import Observation
from clusterprof.runtime.cache import CompressedLayer, check_finite, stored
from clusterprof.runtime.importance import accumulated_attention, window_importance
from clusterprof.runtime.padding import Rows
from clusterprof.runtime.selection import kept_positions
from clusterprof.runtime.settings import Eviction


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
        Its index in the model.
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

        def observe(group: Rows, padding: int) -> Observation:
            row_keys = keys[group.of_batch, :, padding:end]
            row_queries = queries[group.of_batch, :, -of_turn:]
            return _observation(layer, layer_idx, eviction, group, row_queries, row_keys, scaling)

        _keep_size(layer, layer_idx, eviction, rows, end, observe)
        layer.finish_prompt(size)
    elif layer.prompt == 0:
        layer.finish_prompt(end)
    elif eviction.decode_budget is not None and layer.stored - layer.prompt > eviction.decode_budget:
        evict_generated(layer, layer_idx, eviction, rows, queries, scaling)
    elif eviction.while_decoding and layer.stored > size:
        evict_beyond_size(layer, layer_idx, eviction, rows)
    if not eviction.needs_sums(layer):
        layer.accumulated = None


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
            observation = _observation(
                layer, layer_idx, eviction, group, row_queries, row_keys[:, :, padding:], scaling
            )
            chosen = kept_positions(
                eviction.compression.method_of(layer_idx),
                _without_first(observation, start - padding),
                generated.shape[-1] - (to_evict - evicted_padding),
            )
            generated = chosen + start
        prompt = torch.arange(evicted_padding, start, device=keys.device).expand(*row_keys.shape[:2], -1)
        kept.append(torch.cat([prompt, generated], dim=-1))
    layer.keep(torch.cat(kept))


def evict_beyond_size(
    layer: CompressedLayer, layer_idx: int, eviction: Eviction, rows: Sequence[Rows]
) -> None:
    """Shrink all that is stored to ``size`` tokens per head, as methods that evict while decoding do it.

    They look at no window: H2O at what each token has received so far, StreamingLLM at the positions alone.
    Parameters as in :func:`finish_prompt`.
    """

    def observe(group: Rows, padding: int) -> Observation:
        keys = stored(layer)[0][group.of_batch, :, padding:]
        unknown = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
        sums = _sums(layer, layer_idx, eviction, group, padding)
        return Observation(unknown, window=0, accumulated=sums)

    _keep_size(layer, layer_idx, eviction, rows, layer.stored, observe)


@torch.no_grad()
def accumulate(
    layer: CompressedLayer, rows: Sequence[Rows], query: Tensor, key: Tensor, scaling: float, *, drafts: int
) -> None:
    """Add what the tokens of a forward look at to the attention that each stored token has received.

    Parameters
    ----------
    rows : sequence of Rows
        Of the whole batch; their padding neither pays nor receives anything.
    query : Tensor
        Of all tokens of the forward, after RoPE, ``(batch, heads, new_tokens, head_dim)``.
    key : Tensor
        Of all that is stored, ``(batch, kv_heads, stored, head_dim)``.
    drafts : int
        Tokens at the end that do not count.
    """
    before, end = layer.stored - query.shape[2], layer.stored - drafts
    if before > 0 and (layer.accumulated is None or layer.accumulated.shape[2] != before):
        # Some tokens came unseen, and what they looked at is not known.
        layer.accumulated = None
        return
    total = key.new_zeros((*key.shape[:2], end), dtype=torch.float32)
    for group in rows:
        padding = _stored_padding(layer, group)
        own = query[group.of_batch, :, max(0, padding - before) : end - before]
        if own.shape[2] > 0:
            keys = key[group.of_batch, :, padding:end]
            total[group.of_batch, :, padding:] = accumulated_attention(own, keys, scaling=scaling)
    if layer.accumulated is not None and before > 0:
        total[..., :before] += layer.accumulated
    layer.accumulated = total


def _keep_size(
    layer: CompressedLayer,
    layer_idx: int,
    eviction: Eviction,
    rows: Sequence[Rows],
    end: int,
    observe: Callable[[Rows, int], Observation],
) -> None:
    """Shrink the first ``end`` slots to ``size``; ``observe`` is asked for rows and the padding they store."""
    keys, size = stored(layer)[0], eviction.compression.size
    kept = []
    for group in rows:
        padding = _stored_padding(layer, group)
        if end - padding <= size:
            # All of a short row stays, filled up with padding, which the attention mask goes on hiding.
            positions = torch.arange(end - size, end, device=keys.device)
            positions = positions.expand(*keys[group.of_batch].shape[:2], -1)
        else:
            method = eviction.compression.method_of(layer_idx)
            positions = kept_positions(method, observe(group, padding), size) + padding
        kept.append(positions)
    layer.keep(torch.cat(kept), end)


def _observation(
    layer: CompressedLayer,
    layer_idx: int,
    eviction: Eviction,
    rows: Rows,
    queries: Tensor,
    keys: Tensor,
    scaling: float,
) -> Observation:
    """What the last of these queries see of the keys before their window; both are of these rows, unpadded."""
    mean, peak = window_importance(queries[:, :, -rows.window :], keys, scaling=scaling)
    check_finite(mean, layer_idx)
    # Fewer queries than the window has tokens observe only what lies before the window all the same.
    prefix = keys.shape[2] - rows.window
    sums = _sums(layer, layer_idx, eviction, rows, _stored_padding(layer, rows))
    words = rows.word_starts
    return Observation(
        mean[..., :prefix],
        window=rows.window,
        peak=peak[..., :prefix],
        accumulated=None if sums is None else sums[..., :prefix],
        word_starts=None if words is None else words[:, :prefix].to(keys.device),
    )


def _without_first(observation: Observation, tokens: int) -> Observation:
    """The observation of a prefix without its first tokens."""
    peak, sums = observation.peak, observation.accumulated
    return replace(
        observation,
        importance=observation.importance[..., tokens:],
        peak=None if peak is None else peak[..., tokens:],
        accumulated=None if sums is None else sums[..., tokens:],
    )


def _sums(
    layer: CompressedLayer, layer_idx: int, eviction: Eviction, rows: Rows, padding: int
) -> Tensor | None:
    """Attention that each token of these rows has received, if the method needs it."""
    if not eviction.needs_sums(layer):
        return None
    if layer.accumulated is None:
        raise CompressionError(
            f"The method {eviction.compression.method.name} needs the attention of every token of the conversation, "
            "and some were fed in another context or outside of one, drafted or taken back; begin it with an empty "
            "cache in this context."
        )
    sums = layer.accumulated[rows.of_batch, :, padding:]
    check_finite(sums, layer_idx)
    return sums


def _stored_padding(layer: CompressedLayer, rows: Rows) -> int:
    """Slots at the start of these rows that hold padding: it is the first to be evicted."""
    return max(0, rows.padding - layer.evicted)
