"""The compressed KV cache: full positions outside, `size` prompt tokens per head inside."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from clusterprof.errors import CompressionError, UnsupportedModelError
from clusterprof.profile import Compression, Profile

# Decoded tokens per head that a buffer grows by: one copy of the cache in so many steps, and at most so many
# slots allocated in vain.
GROWTH = 64


class CompressedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One full-attention layer's cache, from which tokens are evicted inside `compress()`.

    To the model it keeps its full length, so that positions and masks of later tokens are right. `keys` and
    `values` are buffers, ``(batch, kv_heads, capacity, head_dim)``, whose first `stored` slots are in use.

    Attributes
    ----------
    stored, evicted : int
        Tokens per head that are in the cache, and that no longer are.
    prompt, evicted_of_prompt : int
        Slots at the front that hold what is left of the prompt, and what it lost; decoded tokens come after them.
    settled : int
        Slots at the front that the last eviction left; they cannot be cropped.
    queries : Tensor, optional
        The latest queries, ``(batch, heads, at most window, head_dim)``, while an eviction may need them.
    observed : int
        Tokens that `compress()` has seen pass, up to the last of `queries`. What it has not seen, it could not evict.
    accumulated : Tensor, optional
        Attention that each stored token has received, float32 ``(batch, kv_heads, stored)``, while an eviction may
        need it; of another length once some came that were not counted.
    continued : bool
        Whether more tokens came after the first ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forget()

    def _forget(self) -> None:
        self.stored = self.evicted = self.settled = 0
        self.prompt = self.evicted_of_prompt = 0
        self.queries: Tensor | None = None
        self.accumulated: Tensor | None = None
        self.observed, self.continued = 0, False

    @classmethod
    def holding(cls, keys: Tensor, values: Tensor, *, of: int) -> Self:
        """A layer as it is after a prompt of so many tokens, of which these keys and values are left."""
        layer = cls()
        layer.update(keys, values)
        layer.evicted = of - layer.stored
        layer.settled = layer.stored if layer.evicted else 0
        layer.observed = of
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens, ``(batch, kv_heads, new_tokens, head_dim)`` each; returns all that is stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.stored == 0:
            # Most of it is about to be evicted: a copy would be in vain.
            self.keys, self.values = key_states, value_states
        else:
            if self.observed == 0:
                raise CompressionError(
                    "The prompt of this cache was prefilled outside compress(), so nothing was compressed; "
                    "run the prefill inside `with compress(model, profile):`."
                )
            self.continued = True
            self._append(key_states, value_states)
        self.stored += key_states.shape[-2]
        return stored(self)

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        _check_shape(self.keys, key_states)
        end = self.stored + key_states.shape[-2]
        # What was allocated in inference mode may only be written there.
        writable = not self.keys.is_inference() or torch.is_inference_mode_enabled()
        if end > self.keys.shape[-2] or not writable:
            capacity = self.stored + -(-key_states.shape[-2] // GROWTH) * GROWTH
            self.keys, self.values = (buffer_with(tensor, capacity) for tensor in stored(self))
        self.keys[..., self.stored : end, :] = key_states
        self.values[..., self.stored : end, :] = value_states

    def keep(self, positions: Tensor, end: int | None = None) -> None:
        """Evict all of the first ``end`` slots (by default, of all) but these.

        Parameters
        ----------
        positions : Tensor
            int64 ``(batch, kv_heads, kept)``, sorted.
        """
        keys, values = stored(self)
        kept, end = positions.shape[-1], self.stored if end is None else end
        if self.accumulated is not None:
            known = self.accumulated.shape[-1] == end
            self.accumulated = self.accumulated.gather(2, positions) if known else None
        if end < self.stored:
            fresh = torch.arange(end, self.stored, device=positions.device)
            positions = torch.cat([positions, fresh.expand(*positions.shape[:2], -1)], dim=-1)
        index = positions[..., None]
        self.keys = keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1]))
        self.values = values.gather(2, index.expand(-1, -1, -1, values.shape[-1]))
        self.settled, self.stored = kept, positions.shape[-1]
        self.evicted += end - kept

    def finish_prompt(self, end: int) -> None:
        """Say that the prompt is in the first ``end`` slots, evicted as far as it will be."""
        self.prompt, self.evicted_of_prompt = end, self.evicted
        # A view of something larger, as of Phi-3's joint projection, would keep all of that.
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = _owned(self.keys), _owned(self.values)

    def get_seq_length(self) -> int:
        """Tokens seen so far, the evicted ones included."""
        return self.stored + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: its last slots belong to what is still stored."""
        return self.stored + query_length, self.evicted

    def reset(self) -> None:
        """Forget everything; the next prompt is compressed again."""
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, given as a number below zero, as far as no eviction depended on them."""
        if tokens_to_remove >= 0 or not self.is_initialized:
            super().crop(tokens_to_remove)
            return
        left = max(self.stored + tokens_to_remove, 0)
        if left < self.settled:
            raise CompressionError(
                f"Only the last {self.stored - self.settled} tokens of the cache can be taken back, not "
                f"{-tokens_to_remove}: those before them were compressed."
            )
        # The queries of tokens that are no longer there must not observe for those that take their place, and
        # what they looked at cannot be told from the rest.
        self.stored, self.queries, self.accumulated = left, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row go on from another one, as beam search does."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._of_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._of_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        super().batch_select_indices(indices)
        self._of_rows(lambda tensor: tensor[indices])

    def _of_rows(self, changed: Callable[[Tensor], Tensor]) -> None:
        """Do to what is known of each row what was done to its keys and values."""
        self.queries = None if self.queries is None else changed(self.queries)
        self.accumulated = None if self.accumulated is None else changed(self.accumulated)


def compression_of(profile: Profile | Compression) -> Compression:
    """What a profile compresses to."""
    compression = profile.compression if isinstance(profile, Profile) else profile
    if not isinstance(compression, Compression):
        raise TypeError(f"expected a Profile or a Compression, not {type(compression).__name__}")
    return compression


def plain_layers(config: PreTrainedConfig) -> list[DynamicLayer]:
    """Empty cache layers of a model: :class:`DynamicLayer` for full attention, a subclass for sliding windows.

    A window that no prompt can outgrow, as Phi-3's with 128k, is full attention.

    Raises
    ------
    CompressionError
        If some layer has no KV cache (linear attention), or no layer has full attention.
    """
    layers: list[DynamicLayer] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"A model in which {_kind_of(layer)} cannot be compressed: every layer must have full or "
                "sliding-window attention and a KV cache of its own."
            )
        window = getattr(layer, "sliding_window", None)
        outgrown = window is None or window < config.get_text_config(decoder=True).max_position_embeddings
        layers.append(layer if outgrown else DynamicLayer())  # type: ignore[arg-type, no-untyped-call]
    if not any(has_full_attention(layer) for layer in layers):
        raise UnsupportedModelError(
            "Every layer of this model has sliding-window attention, whose cache is bounded already; "
            "there is nothing to compress."
        )
    return layers


def _kind_of(layer: object) -> str:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "some layers have linear attention"
    if isinstance(layer, DummyLayer):
        return "some layers share another layer's cache"
    return f"some layers have a {type(layer).__name__}"


def has_full_attention(layer: DynamicLayer) -> bool:
    """Whether a cache layer keeps every token."""
    return not layer.is_sliding


def stored(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer holds, ``(batch, kv_heads, stored, head_dim)`` each."""
    assert layer.keys is not None
    assert layer.values is not None
    if isinstance(layer, CompressedLayer):
        return layer.keys[..., : layer.stored, :], layer.values[..., : layer.stored, :]
    return layer.keys, layer.values


def check_keys(layer: DynamicLayer, layer_idx: int, key: Tensor) -> None:
    """Raise a CompressionError if the keys that a layer attends to are not those that its cache holds."""
    if layer.keys is None:
        raise CompressionError(
            f"Layer {layer_idx} left its cache empty, as in training with gradient checkpointing; "
            "call model.train(False) first."
        )
    if key.shape[1] != layer.keys.shape[1]:
        raise UnsupportedModelError(
            f"Layer {layer_idx} attends to {key.shape[1]} heads of keys and caches {layer.keys.shape[1]}, so it is not "
            "known which belong together; use a model that leaves grouped heads to the attention interface."
        )


def check_finite(importance: Tensor, layer_idx: int) -> None:
    """Raise a CompressionError that names the layer if its importance is not finite."""
    if not torch.isfinite(importance).all():
        raise CompressionError(
            f"The attention of layer {layer_idx} is not finite, so its importance is unknown; "
            "run the model in a wider dtype (bfloat16 or float32)."
        )


def cache_bytes(cache: Cache) -> int:
    """Bytes allocated for the keys and values of a cache, free slots of its buffers included."""
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_shape(keys: Tensor, new_keys: Tensor) -> None:
    held, given = ((t.shape[0], t.shape[1], t.shape[3]) for t in (keys, new_keys))
    if held != given:
        raise CompressionError(
            f"The cache holds {held[0]} rows of {held[1]} KV heads with {held[2]} dimensions, and is given {given[0]} "
            f"of {given[1]} with {given[2]}; use a cache for this model and this batch only."
        )


def _owned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def buffer_with(tensor: Tensor, capacity: int) -> Tensor:
    """Room for ``capacity`` tokens, the first of which are those of ``(batch, kv_heads, tokens, head_dim)``."""
    buffer = tensor.new_empty((*tensor.shape[:2], capacity, tensor.shape[-1]))
    buffer[..., : tensor.shape[-2], :] = tensor
    return buffer
