"""Kept set: which prompt positions of each KV head stay in the cache."""

import torch
from torch import Tensor

from clusterprof.profile import Compression


def kept_positions(compression: Compression, importance: Tensor, padding: Tensor | None = None) -> Tensor:
    """Sorted prompt positions that survive, the observation window included.

    Parameters
    ----------
    compression : Compression
        Method, size and window.
    importance : Tensor
        Float32 ``(batch, kv_heads, prefix_length)`` with ``prefix_length > size - window``.
    padding : Tensor, optional
        ``(batch,)`` int64: how many positions at the start of each row are padding.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, size)``. A row with fewer tokens than ``size`` keeps all of them; padding
        fills the front, where the attention mask of later steps hides it.
    """
    prefix_length = importance.shape[-1]
    budget = compression.size - compression.window
    if padding is None:
        prefix = compression.method.select(importance, budget)
    else:
        # Blocks and neighbourhoods must start at a row's first token, as they do in a batch of one.
        shift = padding.clamp(max=prefix_length)[:, None, None]
        positions = torch.arange(prefix_length, device=importance.device)
        left_aligned = importance.gather(-1, ((positions + shift) % prefix_length).expand_as(importance))
        prefix = compression.method.select(left_aligned, budget, prefix_length - shift[:, 0, 0])
        prefix = ((prefix + shift) % prefix_length).sort(dim=-1).values
    window = torch.arange(compression.window, device=importance.device) + prefix_length
    return torch.cat([prefix, window.expand(*prefix.shape[:-1], -1)], dim=-1)
