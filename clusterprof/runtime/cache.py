"""The compressed KV cache: full positions outside, `size` prompt tokens per head inside."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from clusterprof.errors import CompressionError, UnsupportedModelError
from clusterprof.profile import Compression, Profile
from clusterprof.runtime.importance import window_importance
from clusterprof.runtime.selection import kept_positions


class CompressedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One full-attention layer's cache, which shrinks to ``size`` tokens per KV head after the prefill.

    To the model it keeps the prompt's full length, so that positions and masks of later tokens are right.

    Attributes
    ----------
    evicted : int
        Prompt tokens per head that are no longer stored.
    """

    def __init__(self, compression: Compression) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compression = compression
        self.evicted = 0
        self.awaits_observation = True
        self.decoding = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens: ``(batch, kv_heads, new_tokens, head_dim)`` each."""
        if self.get_seq_length() > 0:
            if self.awaits_observation:
                raise CompressionError(
                    "The prompt of this cache was prefilled outside compress(), so nothing was compressed; "
                    "run the prefill inside `with compress(model, profile):`."
                )
            self.decoding = True
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens seen so far, the evicted ones included."""
        return super().get_seq_length() + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: the last slots of it belong to what is still stored."""
        return super().get_seq_length() + query_length, self.evicted

    def reset(self) -> None:
        """Forget everything; the next prompt is compressed again."""
        super().reset()
        self.evicted = 0
        self.awaits_observation = True
        self.decoding = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, given as a number below zero, as far as they are not compressed."""
        if self.evicted and super().get_seq_length() + tokens_to_remove < self.compression.size:
            raise CompressionError(
                "Tokens of a compressed prompt cannot be taken back, as assisted generation and prompt lookup do; "
                "generate without them inside compress()."
            )
        super().crop(tokens_to_remove)

    def compress(self, layer_idx: int, query: Tensor, scaling: float, padding: Tensor | None) -> None:
        """Shrink the prompt that was just prefilled to ``size`` tokens per head; shorter ones stay whole.

        Parameters
        ----------
        layer_idx : int
            For messages.
        query : Tensor
            The new tokens' queries after RoPE, ``(batch, heads, new_tokens, head_dim)``.
        scaling : float
            What the model multiplies its attention scores with.
        padding : Tensor, optional
            ``(batch,)``: padded positions at the start of each row.
        """
        self.awaits_observation = False
        keys, _ = stored(self)
        size, window = self.compression.size, self.compression.window
        if keys.shape[-2] <= size:
            return
        importance = window_importance(query[:, :, -window:], keys, scaling=scaling, padding=padding)
        check_finite(importance, layer_idx)
        # A later turn may be shorter than the window; then it observes what lies before the window all the same.
        prefix = importance[..., : keys.shape[-2] - window]
        self.keep(kept_positions(self.compression, prefix, padding))

    def keep(self, positions: Tensor) -> None:
        """Store only these positions: int64 ``(batch, kv_heads, size)``, sorted."""
        batch, kv_heads, size = positions.shape
        rows = torch.arange(batch, device=positions.device)[:, None, None]
        heads = torch.arange(kv_heads, device=positions.device)[:, None]
        keys, values = stored(self)
        self.evicted += keys.shape[-2] - size
        self.keys, self.values = keys[rows, heads, positions], values[rows, heads, positions]


class CompressedCache(DynamicCache):
    """A cache to pass by hand, for instance to keep a conversation: ``generate(..., cache=cache)``.

    It is compressed when its prompt is prefilled inside ``with compress(model, profile):`` and may be decoded
    from anywhere afterwards.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's configuration; sliding-window layers keep their own cache.
    compression : Profile or Compression
        What to compress to.

    Raises
    ------
    CompressionError
        If no layer of the model has full attention, or some layer has no KV cache at all.
    """

    def __init__(self, config: PreTrainedConfig, compression: Profile | Compression) -> None:
        super().__init__(config=config)
        compress_layers(self, config, compression_of(compression))


def compression_of(profile: Profile | Compression) -> Compression:
    """What a profile compresses to."""
    compression = profile.compression if isinstance(profile, Profile) else profile
    if not isinstance(compression, Compression):
        raise TypeError(f"expected a Profile or a Compression, not {type(compression).__name__}")
    return compression


def plain_layers(config: PreTrainedConfig) -> list[DynamicLayer]:
    """Empty cache layers of a model: :class:`DynamicLayer` for full attention, a subclass for sliding windows.

    Raises
    ------
    CompressionError
        If some layer has no KV cache (linear attention), or no layer has full attention.
    """
    layers: list[DynamicLayer] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"A model with {type(layer).__name__} caches cannot be compressed: clusterprof supports "
                "full and sliding-window attention layers only."
            )
        layers.append(layer)  # type: ignore[arg-type]
    if not any(has_full_attention(layer) for layer in layers):
        raise UnsupportedModelError(
            "Every layer of this model has sliding-window attention, whose cache is bounded already; "
            "there is nothing to compress."
        )
    return layers


def has_full_attention(layer: DynamicLayer) -> bool:
    """Whether a cache layer keeps every token."""
    return not layer.is_sliding


def compress_layers(cache: DynamicCache, config: PreTrainedConfig, compression: Compression) -> None:
    """Give an empty cache layers that will compress, in place; sliding-window layers stay what they are."""
    cache.layers = [
        CompressedLayer(compression) if has_full_attention(layer) else layer for layer in plain_layers(config)
    ]


def stored(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer holds, ``(batch, kv_heads, stored, head_dim)`` each."""
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def check_finite(importance: Tensor, layer_idx: int) -> None:
    """Raise a CompressionError that names the layer if its importance is not finite."""
    if not torch.isfinite(importance).all():
        raise CompressionError(
            f"The attention of layer {layer_idx} is not finite, so its importance is unknown; "
            "run the model in a wider dtype (bfloat16 or float32)."
        )


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values that the cache holds."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    tensors = [tensor for layer in layers for tensor in stored(layer)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
