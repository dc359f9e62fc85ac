"""Kept set: which positions of each KV head stay in the cache."""

from collections.abc import Collection
from itertools import groupby

import torch
from torch import Tensor

from clusterprof.errors import CompressionError
from clusterprof.methods import Method, Observation
from clusterprof.profile import Compression


def kept_positions(method: Method, observation: Observation, size: int) -> Tensor:
    """Sorted positions that survive: those of the prefix that a method selects, and the whole window after it.

    Parameters
    ----------
    method : Method
        Chooses from the prefix.
    observation : Observation
        Of a prefix of more than ``size - window`` tokens.
    size : int
        Tokens to keep per KV head, the window included.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, size)``.
    """
    prefix = method.select(observation, size - observation.window)
    importance = observation.importance
    tail = torch.arange(observation.window, device=importance.device) + importance.shape[-1]
    return torch.cat([prefix, tail.expand(*prefix.shape[:-1], -1)], dim=-1)


def kept_by_layer(compression: Compression, observation: Observation, layers: Collection[int]) -> Tensor:
    """Kept positions of one prompt in all its layers, each by the layer's own method.

    Parameters
    ----------
    compression : Compression
        How many stay, and which method chooses them in which layer.
    observation : Observation
        The batch is the layers.
    layers : collection of int
        Their indices in the model: all that have full attention.

    Returns
    -------
    Tensor
        int64 ``(layers, kv_heads, size)``.

    Raises
    ------
    CompressionError
        If there is an override for another layer.
    """
    check_overrides(compression, layers)
    kept, start = [], 0
    # Neighbours with the same method together: without overrides that is one selection for all.
    for method, alike in groupby(layers, compression.method_of):
        end = start + len(list(alike))
        kept.append(kept_positions(method, observation.of(slice(start, end)), compression.size))
        start = end
    return torch.cat(kept)


def check_overrides(compression: Compression, layers: Collection[int]) -> None:
    """Raise a CompressionError if a layer with an override is not one of these, the full-attention layers."""
    for override in compression.overrides:
        for layer in override.layers:
            if layer not in layers:
                raise CompressionError(
                    f"The profile has values for layer {layer}, which is no full-attention layer of this model (they "
                    f"are {', '.join(map(str, layers))}); tune one for this model."
                )
