"""The compressed cache in tensors of fixed shape and place, for decoding with `torch.compile`."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import StaticSlidingWindowLayer

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression, Profile
from clusterprof.runtime.cache import (
    CompressedLayer,
    compression_of,
    has_full_attention,
    plain_layers,
    stored,
)


class StaticCompressedLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """A compressed layer whose tensors keep shape and place once its prompt is there, as torch.compile wants.

    Parameters
    ----------
    size, max_new_tokens : int
        Slots per head for the prompt, and for what is decoded.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, size: int, max_new_tokens: int) -> None:
        self.size, self.capacity = size, size + max_new_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None
        super().__init__()

    def _forget(self) -> None:
        super()._forget()
        # The slot that the next token goes to; a tensor, so that compiled code does not depend on its value.
        self._next: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in a plain layer until the prompt is there; then returns all slots, for the mask to hide the free ones."""
        if self._next is None:
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        slots = torch.arange(key_states.shape[-2], device=key_states.device) + self._next
        self._next.add_(key_states.shape[-2])
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def finish_prompt(self, end: int) -> None:
        """Move the prompt into the buffers; the next prompt, after a reset, finds them in the same place."""
        super().finish_prompt(end)
        # No later turn will ask for it.
        self.accumulated = None
        keys, values = stored(self)
        shape = (*keys.shape[:2], self.capacity)
        if self._buffers is None or self._buffers[0].shape[:3] != shape:
            # Made in inference mode they could only be written there, and the next prompt may come outside of it.
            with torch.inference_mode(False):
                self._buffers = (
                    keys.new_zeros((*shape, keys.shape[-1])),
                    values.new_zeros((*shape, values.shape[-1])),
                )
            _mark_static(*self._buffers)
        for buffer, tensor in zip(self._buffers, (keys, values), strict=True):
            buffer[..., : self.stored, :] = tensor
        self.keys, self.values = self._buffers
        with torch.inference_mode(False):
            self._next = torch.tensor(self.stored, device=keys.device)
        _mark_static(self._next)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back, as transformers' `is_croppable` says."""
        raise CompressionError("Tokens of a StaticCompressedCache cannot be taken back; use a DynamicCache.")

    def get_seq_length(self) -> int:
        """Tokens seen so far, the evicted ones included; a tensor once the prompt is there."""
        return super().get_seq_length() if self._next is None else self._next + self.evicted  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask, which covers free slots too: they are in the future."""
        if self._next is None:
            return super().get_mask_sizes(query_length)
        if not torch.compiler.is_compiling() and int(self._next) + query_length > self.capacity:
            raise CompressionError(
                f"The StaticCompressedCache is full: it was made for {self.capacity - self.prompt} tokens after the "
                "prompt; make it with a higher max_new_tokens, or call its reset() before the next prompt."
            )
        return self.capacity, self.evicted


class _StaticSlidingLayer(StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding-window layer for prompts of any batch size, in any gradient mode."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.cumulative_length_int == 0 and self.keys is not None and len(self.keys) != len(key_states):
            self.is_initialized = False
        return super().update(key_states, value_states, *args, **kwargs)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with torch.inference_mode(False):
            super().lazy_initialization(key_states, value_states)


class StaticCompressedCache(DynamicCache):
    """A compressed cache of fixed shapes, for one prompt at a time and decoding with ``torch.compile``.

    Its prompt must be prefilled inside `compress()`, and not in a compiled forward. ``reset()`` makes room for
    the next prompt, in the same memory.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's configuration; sliding-window layers get a static cache of their own.
    profile : Profile or Compression
        What prompts will be compressed to.
    max_new_tokens : int
        How many tokens there is room for after the prompt.

    Raises
    ------
    CompressionError
        If the model cannot be compressed, or there is no room for a token.
    """

    def __init__(
        self, config: PreTrainedConfig, profile: Profile | Compression, *, max_new_tokens: int
    ) -> None:
        if max_new_tokens < 1:
            raise CompressionError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        super().__init__(config=config)
        size = compression_of(profile).size
        self.layers = [
            StaticCompressedLayer(size, max_new_tokens)
            if has_full_attention(layer)
            else _StaticSlidingLayer(layer.sliding_window, layer.sliding_window)  # type: ignore[attr-defined]
            for layer in plain_layers(config)
        ]


def _mark_static(*tensors: Tensor) -> None:
    """Let CUDA graphs write into the tensors; not possible from inside compiled code, which then makes no graphs."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
