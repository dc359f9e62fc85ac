"""Observers of a forward inside `compress()`: one for what is decoded, one for a prompt or a later turn."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache

from clusterprof.errors import CompressionError
from clusterprof.runtime.attention import Observer
from clusterprof.runtime.cache import CompressedLayer, check_keys
from clusterprof.runtime.eviction import accumulate, evict_beyond_size, evict_generated, finish_prompt
from clusterprof.runtime.padding import Rows
from clusterprof.runtime.settings import Eviction


def decoding(
    cache: Cache,
    first: CompressedLayer,
    eviction: Eviction,
    rows: Callable[[], list[Rows]],
    new_tokens: int,
) -> Observer | None:
    """Observe decoded tokens only if they, or what they look at, may be evicted."""
    summing = eviction.needs_sums(first) and first.accumulated is not None
    if eviction.evicts_decoded is not None:
        refuse_drafts(eviction, new_tokens - 1)
    elif not summing:
        return None
    budget = eviction.decode_budget
    over_budget = budget is not None and first.stored + new_tokens - first.prompt > budget
    over_size = eviction.while_decoding and first.stored + new_tokens > eviction.compression.size
    groups: list[Rows] = rows() if over_budget or over_size or summing else []

    def observer(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        layer = cache.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            return
        check_keys(layer, layer_idx, key)
        if summing:
            accumulate(layer, groups, query, key, scaling, drafts=0)
        if budget is not None:
            layer.queries = _latest(layer, query, eviction.longest_window)
            layer.observed = layer.get_seq_length()
            if over_budget:
                evict_generated(layer, layer_idx, eviction, groups, layer.queries, scaling)
        if over_size:
            evict_beyond_size(layer, layer_idx, eviction, groups)

    return observer


def prefilling(
    cache: Cache, eviction: Eviction, rows: list[Rows], *, fresh: int, of_turn: int, summing: bool
) -> Observer:
    """Observe a prompt or a later turn, which has ``of_turn`` tokens.

    ``fresh`` tokens of the forward come after its end, or so many (< 0) of it are to come. ``summing`` sums up the
    attention that each token receives.
    """
    drafts = max(fresh, 0)

    def observer(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        layer = cache.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            return
        check_keys(layer, layer_idx, key)
        queries = _latest(layer, query, eviction.longest_window, drafts)
        # A copy, as a view would keep the queries of the whole forward.
        layer.queries = queries.clone() if fresh < 0 or eviction.decode_budget is not None else None
        layer.observed = layer.get_seq_length() - drafts
        if summing:
            accumulate(layer, rows, query, key, scaling, drafts=drafts)
        if fresh >= 0:
            finish_prompt(layer, layer_idx, eviction, rows, queries, scaling, fresh=fresh, of_turn=of_turn)

    return observer


def _latest(layer: CompressedLayer, query: Tensor, window: int, drafts: int = 0) -> Tensor:
    """The last queries of a layer, at most ``window``: this forward's without its drafts, and those before it."""
    before = layer.get_seq_length() - query.shape[2]
    query = query[:, :, : query.shape[2] - drafts]
    # What was decoded outside the context was not observed, and leaves a gap.
    if layer.queries is not None and layer.observed == before:
        query = torch.cat([layer.queries, query[:, :, -window:]], dim=2)
    return query[:, :, -window:]


def refuse_drafts(eviction: Eviction, drafts: int) -> None:
    """Raise a CompressionError if there are drafts of an answer and decoded tokens are evicted."""
    if eviction.evicts_decoded is not None and drafts > 0:
        raise CompressionError(
            f"{eviction.evicts_decoded} does not work with assisted generation, which takes tokens back; leave one of "
            "them out."
        )
