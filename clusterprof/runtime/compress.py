"""`compress`: run a model so that prompts are compressed right after their prefill."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression, Profile
from clusterprof.runtime.attention import Observer, decoder_of, observe_attention
from clusterprof.runtime.cache import (
    CompressedLayer,
    compression_of,
    has_full_attention,
    plain_layers,
)
from clusterprof.runtime.observers import decoding, prefilling, refuse_drafts
from clusterprof.runtime.padding import Rows, alike, left_padding
from clusterprof.runtime.reusable import reusable
from clusterprof.runtime.selection import check_overrides
from clusterprof.runtime.settings import Eviction, LaterTurns
from clusterprof.runtime.static_cache import StaticCompressedLayer
from clusterprof.runtime.turns import RunningTurn, turns_of_generate
from clusterprof.runtime.words import starts_of_words


@reusable
@contextmanager
def compress(
    model: PreTrainedModel,
    profile: Profile | Compression,
    *,
    query_length: int | Sequence[int] | None = None,
    decode_budget: int | None = None,
    later_turns: LaterTurns = "append",
    tokenizer: PreTrainedTokenizerBase | None = None,
    force: bool = False,
) -> Iterator[None]:
    """Compress the KV cache of every prompt that ``model`` prefills inside this context, which may be entered again.

    The prefill runs on the model's own attention backend over the whole prompt. Right after each layer's
    attention its cache shrinks to ``size`` tokens per KV head; decoding goes on over that. A prompt of at
    most ``size`` tokens is left whole; the turn that makes it outgrow ``size`` is compressed instead.

    A method with ``evict_while_decoding`` (H2O, StreamingLLM) then holds the cache at ``size`` tokens per head in
    every step, prompt and answer together. Tokens keep the positions they have in the text, as all that is kept
    here does; StreamingLLM's paper numbers them anew inside the cache, so that a text may outgrow the model's
    context, which it may not here.

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
    tokenizer : PreTrainedTokenizerBase, optional
        The model's, for a method that keeps whole words (n-gram); it reads them from a prompt's token ids.
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
        compression_of(profile),
        None if query_length is None else tuple(map(_whole, lengths)),
        _whole(decode_budget),
        later_turns,
        tokenizer,
    )
    config = decoder_of(model).config
    if isinstance(profile, Profile) and not force:
        profile.check(model, otherwise=", or apply it all the same with force=True")
    # Says now, not in the middle of a generation, that a model cannot be compressed.
    full_attention = [has_full_attention(layer) for layer in plain_layers(config)]
    check_overrides(eviction.compression, [i for i, full in enumerate(full_attention) if full])
    running = RunningTurn()
    evicts_decoded = eviction.evicts_decoded is not None

    def begin(cache: Cache | None, attention_mask: Any, tokens: Tensor) -> Observer | None:
        cache = _adopt(cache, config, full_attention)
        batch, new_tokens = tokens.shape[:2]
        first = next(layer for layer in cache.layers if isinstance(layer, CompressedLayer))
        if torch.compiler.is_compiling():
            _refuse_compiled(first, evicts_decoded)
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

        fresh = end - prompt_length

        def rows() -> list[Rows]:
            padding = left_padding(attention_mask, batch, end, unfinished=fresh < 0)
            return alike(padding, eviction.windows(batch))

        if seen >= prompt_length:
            if isinstance(first, StaticCompressedLayer):
                _refuse_bounds(eviction)
            return decoding(cache, first, eviction, rows, new_tokens)
        if isinstance(first, StaticCompressedLayer):
            _check_static(first, eviction, config._attn_implementation)
        refuse_drafts(eviction, fresh)
        summing = eviction.needs_sums(first)
        groups = rows() if fresh >= 0 or summing else []
        if (
            eviction.needs_words
            and first.evicted_of_prompt == 0
            and prompt_length > eviction.compression.size
        ):
            groups = _with_words(groups, eviction, tokens[:, :prompt_length], in_pieces=seen > 0 or fresh < 0)
        return prefilling(
            cache, eviction, groups, fresh=fresh, of_turn=prompt_length - start, summing=summing
        )

    with observe_attention(model, begin), turns_of_generate(model, running, eviction):
        yield


def _whole(number: Any) -> Any:
    """Python's own integer of numpy's; anything else as it is, to be refused as that."""
    return int(number) if isinstance(number, np.integer) else number


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


def _refuse_compiled(first: CompressedLayer, evicts_decoded: bool) -> None:
    """Nothing of a compiled decode step needs to be observed; of anything else it would be."""
    if first.prompt == 0 or evicts_decoded:
        raise CompressionError(
            "Only decode steps can be compiled inside compress(), and without decode_budget or evict_while_decoding: "
            "run the prefill uncompiled."
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
    _refuse_bounds(eviction)
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


def _refuse_bounds(eviction: Eviction) -> None:
    if eviction.evicts_decoded is not None:
        raise CompressionError(
            f"{eviction.evicts_decoded} does not work with a StaticCompressedCache, which has its own bound."
        )


def _with_words(rows: list[Rows], eviction: Eviction, tokens: Tensor, *, in_pieces: bool) -> list[Rows]:
    """Note where the words of a prompt begin, of which these are the tokens, padding included."""
    if in_pieces or tokens.is_floating_point():
        raise CompressionError(
            f"The method {eviction.compression.method.name} reads the words of a prompt from its token ids, and it "
            f"came {'in pieces' if in_pieces else 'as embeddings'}; pass its ids in one forward (in generate() "
            "without prefill_chunk_size), with no earlier turn in the cache."
        )
    assert eviction.tokenizer is not None
    found = []
    for group in rows:
        own = tokens[group.of_batch, group.padding :]
        starts = torch.stack([starts_of_words(eviction.tokenizer, row) for row in own])
        found.append(replace(group, word_starts=starts))
    return found
