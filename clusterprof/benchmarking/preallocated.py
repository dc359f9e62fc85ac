"""The full cache without the copy that transformers makes of it at every token."""

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from clusterprof.runtime.cache import buffer_with


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer's whole cache, with room for the tokens to come.

    What `DynamicLayer` does by concatenation, and a `StaticLayer` with a mask over the room that is still empty,
    this does with neither: the fairest opponent of a compressed cache.

    Parameters
    ----------
    filled : DynamicLayer
        The layer after the prefill.
    room : int
        How many tokens more it shall take.
    """

    def __init__(self, filled: DynamicLayer, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert filled.keys is not None
        assert filled.values is not None
        self.device = filled.keys.device
        self.length = filled.get_seq_length()
        self.keys = buffer_with(filled.keys, self.length + room)
        self.values = buffer_with(filled.values, self.length + room)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens, ``(batch, kv_heads, new_tokens, head_dim)`` each, into the room."""
        assert self.keys is not None
        assert self.values is not None
        start, new = self.length, key_states.shape[-2]
        self.keys.narrow(2, start, new).copy_(key_states)
        self.values.narrow(2, start, new).copy_(value_states)
        self.length += new
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Tokens written so far."""
        return self.length


def preallocate(cache: DynamicCache, room: int) -> None:
    """Give the full-attention layers of a prefilled cache room for more tokens, in place."""
    cache.layers = [
        PreallocatedLayer(layer, room) if type(layer) is DynamicLayer and layer.is_initialized else layer
        for layer in cache.layers
    ]
