"""`compress`: run a model so that prompts are compressed right after their prefill."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression, Profile
from clusterprof.runtime.attention import Observer, decoder_of, observe_attention
from clusterprof.runtime.cache import (
    CompressedLayer,
    check_keys,
    compression_of,
    has_full_attention,
    plain_layers,
)
from clusterprof.runtime.eviction import Eviction, LaterTurns, evict_generated, finish_prompt
from clusterprof.runtime.padding import Rows, alike, left_padding
from clusterprof.runtime.static_cache import StaticCompressedLayer
from clusterprof.runtime.turns import RunningTurn, turns_of_generate


@contextmanager
def compress(
    model: PreTrainedModel,
    profile: Profile | Compression,
    *,
    query_length: int | Sequence[int] | None = None,
    decode_budget: int | None = None,
    later_turns: LaterTurns = "append",
    force: bool = False,
) -> Iterator[None]:
    """Compress the KV cache of every prompt that ``model`` prefills inside this context.

    The prefill runs on the model's own attention backend over the whole prompt. Right after each layer's
    attention its cache shrinks to ``size`` tokens per KV head; decoding goes on over that. A prompt of at
    most ``size`` tokens is left whole; the turn that makes it outgrow ``size`` is compressed instead.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers. It is as before when the context ends.
    profile : Profile or Compression
        A tuned profile, or only what to compress to.
    query_length : int or sequence of int, optional
        For a profile with the window "query": tokens from the first one of the prompt's question to the end of
        the prompt, generation prompt included; one number, or one per row.
    decode_budget : int, optional
        Most tokens per KV head to keep after the prompt. What passes it shrinks to half of it, chosen as the
        prompt's tokens are, with the latest decoded tokens as the window. By default none of them is evicted.
    later_turns : {"append", "compress"}
        What a further turn of a conversation does to a cache that was compressed: its tokens are appended, or
        all that is there shrinks to ``size`` again, as the new turn looks at it.
    force : bool
        Use a profile although it was made for another model.

    Raises
    ------
    ProfileError
        If the profile does not belong to the model.
    CompressionError
        If the model, or a cache passed to it, cannot be compressed, or the options contradict each other.

    Examples
    --------
    >>> with compress(model, Profile.load("profiles/needle-256.json")):  # doctest: +SKIP
    ...     model.generate(**inputs, max_new_tokens=64)
    """
    several = isinstance(query_length, Sequence) and not isinstance(query_length, str)
    lengths: Any = tuple(query_length) if several else (query_length,)  # type: ignore[arg-type]
    eviction = Eviction(
        compression_of(profile), None if query_length is None else lengths, decode_budget, later_turns
    )
    config = decoder_of(model).config
    if isinstance(profile, Profile) and not force:
        profile.check(model)
    # Says now, not in the middle of a generation, that a model cannot be compressed.
    full_attention = [has_full_attention(layer) for layer in plain_layers(config)]
    running = RunningTurn()

    def begin(cache: Cache | None, attention_mask: Any, tokens: Tensor) -> Observer | None:
        cache = _adopt(cache, config, full_attention)
        batch, new_tokens = tokens.shape[:2]
        first = next(layer for layer in cache.layers if isinstance(layer, CompressedLayer))
        if torch.compiler.is_compiling():
            _refuse_compiled(first, eviction)
            return None
        seen = int(first.get_seq_length())
        end = seen + new_tokens
        turn = running.turn
        # Guidance runs a prompt of its own, over another cache, in the middle of a generation.
        if turn is None or turn.cache not in (None, cache):
            # Not inside generate(): one forward is one prompt or turn, and a single token more is decoding.
            eviction.check_prompts(batch)
            prompt_length, start = seen if seen > 0 and new_tokens == 1 else end, seen
            if seen > 0:
                _refuse_chunk(first, new_tokens)
        else:
            turn.feed(cache, seen, new_tokens)
            prompt_length, start = turn.prompt_length, turn.start

        def rows() -> list[Rows]:
            return alike(left_padding(attention_mask, batch, end), eviction.windows(batch))

        if seen >= prompt_length:
            return _decoding(cache, first, eviction, rows, new_tokens)
        if isinstance(first, StaticCompressedLayer):
            _check_static(first, eviction, config._attn_implementation)
        fresh = end - prompt_length
        _refuse_drafts(eviction, fresh)
        # A short row has no token yet in the first chunks of a padded batch.
        groups = rows() if fresh >= 0 else []
        return _prefilling(cache, eviction, groups, fresh=fresh, of_turn=prompt_length - start)

    with observe_attention(model, begin), turns_of_generate(model, running, eviction):
        yield


def _decoding(
    cache: Cache,
    first: CompressedLayer,
    eviction: Eviction,
    rows: Callable[[], list[Rows]],
    new_tokens: int,
) -> Observer | None:
    """Observe decoded tokens only if they may be evicted."""
    if eviction.decode_budget is None:
        return None
    _refuse_drafts(eviction, new_tokens - 1)
    due = first.stored + new_tokens - first.prompt > eviction.decode_budget
    groups: list[Rows] = rows() if due else []

    def observer(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        layer = cache.layers[layer_idx]
        if isinstance(layer, CompressedLayer):
            check_keys(layer, layer_idx, key)
            layer.queries = _latest(layer, query, eviction.longest_window)
            layer.observed = layer.get_seq_length()
            if due:
                evict_generated(layer, layer_idx, eviction, groups, layer.queries, scaling)

    return observer


def _prefilling(cache: Cache, eviction: Eviction, rows: list[Rows], *, fresh: int, of_turn: int) -> Observer:
    """Observe a prompt or a later turn, which has ``of_turn`` tokens.

    ``fresh`` tokens of the forward come after its end, or so many (< 0) of it are to come.
    """

    def observer(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        layer = cache.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            return
        check_keys(layer, layer_idx, key)
        queries = _latest(layer, query, eviction.longest_window, drafts=max(fresh, 0))
        # A copy, as a view would keep the queries of the whole forward.
        layer.queries = queries.clone() if fresh < 0 or eviction.decode_budget is not None else None
        layer.observed = layer.get_seq_length() - max(fresh, 0)
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


def _refuse_drafts(eviction: Eviction, drafts: int) -> None:
    if eviction.decode_budget is not None and drafts > 0:
        raise CompressionError(
            "decode_budget does not work with assisted generation, which takes tokens back; leave one of them out."
        )


def _adopt(cache: Cache | None, config: PreTrainedConfig, full_attention: list[bool]) -> Cache:
    """Return a cache that compresses, turning an empty plain one into it."""
    if cache is None:
        raise CompressionError(
            "With use_cache=False there is no KV cache to compress; leave it on inside compress()."
        )
    compressed = [isinstance(layer, CompressedLayer) for layer in getattr(cache, "layers", [])]
    if any(compressed):
        if compressed != full_attention:
            raise CompressionError(
                "The cache passed to compress() was made for another model; make it from this model's config."
            )
        return cache
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"a {type(cache).__name__}"
        raise CompressionError(
            f"compress() cannot shrink {kind}; pass no cache, a plain DynamicCache or a StaticCompressedCache."
        )
    if cache.get_seq_length() > 0:
        raise CompressionError(
            f"The cache passed to compress() already holds {cache.get_seq_length()} uncompressed tokens; "
            "prefill the whole prompt inside compress(), starting with an empty cache."
        )
    past_recorded = any(cache.is_recording_past(i) for i in range(len(cache.layers)))
    cache.layers = [
        CompressedLayer() if full else layer
        for full, layer in zip(full_attention, plain_layers(config), strict=True)
    ]
    # Assisted generation tells sliding layers beforehand that tokens will be taken back.
    if past_recorded:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    return cache


def _refuse_compiled(first: CompressedLayer, eviction: Eviction) -> None:
    """Nothing of a compiled decode step needs to be observed; of anything else it would be."""
    if first.prompt == 0 or eviction.decode_budget is not None:
        raise CompressionError(
            "Only decode steps can be compiled inside compress(), and without decode_budget: run the prefill "
            "uncompiled."
        )


def _check_static(layer: StaticCompressedLayer, eviction: Eviction, backend: str) -> None:
    if "flash" in backend:
        # It takes no mask that would hide the free slots.
        raise CompressionError(
            "A StaticCompressedCache does not work with flash attention; load the model with "
            'attn_implementation="sdpa", or use a DynamicCache.'
        )
    if layer.prompt > 0:
        raise CompressionError(
            "A StaticCompressedCache holds one prompt; call its reset() before the next, or keep a conversation in a "
            "DynamicCache."
        )
    if eviction.decode_budget is not None:
        raise CompressionError(
            "decode_budget does not work with a StaticCompressedCache, which has its own bound."
        )
    if layer.size != eviction.compression.size:
        raise CompressionError(
            f"The StaticCompressedCache was made for a size of {layer.size}, and the profile's is "
            f"{eviction.compression.size}; make it with this profile."
        )


def _refuse_chunk(layer: CompressedLayer, new_tokens: int) -> None:
    # A second piece of a prompt would stay uncompressed. A new turn of a conversation comes after decoding.
    unfinished = layer.prompt == 0 and layer.observed > 0
    continued = layer.continued or isinstance(layer, StaticCompressedLayer)
    if unfinished or (new_tokens > 1 and not continued):
        raise CompressionError(
            f"The prompt came in pieces ({layer.get_seq_length()} tokens, then {new_tokens}), and outside generate() "
            "nobody says where it ends; run it in one forward, or let generate() cut it (prefill_chunk_size)."
        )
