"""`compress`: run a model so that prompts are compressed right after their prefill."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression, Profile
from clusterprof.runtime.attention import Observer, decoder_of, observe_attention
from clusterprof.runtime.cache import (
    CompressedLayer,
    compress_layers,
    compression_of,
    has_full_attention,
    plain_layers,
)
from clusterprof.runtime.padding import left_padding


@contextmanager
def compress(
    model: PreTrainedModel, profile: Profile | Compression, *, force: bool = False
) -> Iterator[None]:
    """Compress the KV cache of every prompt that ``model`` prefills inside this context.

    The prefill runs on the model's own attention backend over the whole prompt. Right after each layer's
    attention its cache shrinks to ``size`` tokens per KV head; decoding goes on over that. A prompt of at
    most ``size`` tokens is left whole; the turn that makes it outgrow ``size`` is compressed instead. Later
    turns on a compressed cache are appended and not compressed again.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers. It is as before when the context ends.
    profile : Profile or Compression
        A tuned profile, or only what to compress to.
    force : bool
        Use a profile although it was made for another model.

    Raises
    ------
    ProfileError
        If the profile does not belong to the model.
    CompressionError
        If the model, or a cache passed to it, cannot be compressed.

    Examples
    --------
    >>> with compress(model, Profile.load("profiles/needle-256.json")):  # doctest: +SKIP
    ...     model.generate(**inputs, max_new_tokens=64)
    """
    compression = compression_of(profile)
    if isinstance(profile, Profile) and not force:
        profile.check(model)
    config = decoder_of(model).config
    # Says now, not in the middle of a generation, that a model cannot be compressed.
    full_attention = [has_full_attention(layer) for layer in plain_layers(config)]

    def begin(cache: Cache | None, attention_mask: Any, new_tokens: int) -> Observer | None:
        cache = _adopt(cache, config, compression)
        _check_made_for(cache, full_attention, compression)
        first = next(layer for layer in cache.layers if isinstance(layer, CompressedLayer))
        if first.get_seq_length() > 0:
            _refuse_chunk(first, new_tokens)
            if first.evicted or new_tokens == 1:
                return None
        padding = left_padding(attention_mask, first.get_seq_length() + new_tokens)

        def observer(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
            layer = cache.layers[layer_idx]
            if isinstance(layer, CompressedLayer):
                # A model may be spread over several devices.
                layer.compress(
                    layer_idx, query, scaling, None if padding is None else padding.to(query.device)
                )

        return observer

    with observe_attention(model, begin):
        yield


def _adopt(cache: Cache | None, config: PreTrainedConfig, compression: Compression) -> Cache:
    """Return a cache that compresses, turning an empty plain one into it."""
    if cache is None:
        raise CompressionError(
            "With use_cache=False there is no KV cache to compress; leave it on inside compress()."
        )
    if any(isinstance(layer, CompressedLayer) for layer in cache.layers):
        return cache
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"a {type(cache).__name__}"
        raise CompressionError(
            f"compress() cannot shrink {kind}; pass no cache, a plain DynamicCache or a CompressedCache."
        )
    # Sliding layers are told beforehand when a draft will be verified.
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        raise CompressionError("compress() does not work with assisted generation; generate without a draft.")
    if cache.get_seq_length() > 0:
        raise CompressionError(
            f"The cache passed to compress() already holds {cache.get_seq_length()} uncompressed tokens; "
            "prefill the whole prompt inside compress(), starting with an empty cache."
        )
    compress_layers(cache, config, compression)
    return cache


def _check_made_for(cache: Cache, full_attention: list[bool], compression: Compression) -> None:
    compressed = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    if [isinstance(layer, CompressedLayer) for layer in cache.layers] != full_attention:
        raise CompressionError(
            "The cache passed to compress() was made for another model; make it from this model's config."
        )
    # A cache that already holds a prompt was compressed by its own; nothing of that changes any more.
    if cache.get_seq_length() == 0 and any(layer.compression != compression for layer in compressed):
        raise CompressionError(
            "The cache passed to compress() was made for another profile; make it from the one compress() has."
        )


def _refuse_chunk(layer: CompressedLayer, new_tokens: int) -> None:
    # A second piece of a prompt would stay uncompressed. A new turn of a conversation comes after decoding.
    if new_tokens > 1 and not layer.decoding:
        raise CompressionError(
            f"The prompt came in pieces ({layer.get_seq_length()} tokens, then {new_tokens}); compress() needs "
            "it in one forward, without prefill_chunk_size and without assisted generation."
        )
