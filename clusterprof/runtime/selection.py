"""Kept set: which positions of each KV head stay in the cache."""

import torch
from torch import Tensor

from clusterprof.methods import Method
from clusterprof.profile import Compression


def kept_positions(compression: Compression, importance: Tensor, window: int) -> Tensor:
    """Sorted prompt positions that survive, the observation window included.

    Parameters
    ----------
    compression : Compression
        Method and size.
    importance : Tensor
        Float32 ``(batch, kv_heads, prefix_length)`` with ``prefix_length > size - window``.
    window : int
        Tokens of the observation window, which follows the prefix.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, size)``.
    """
    return select_before_window(compression.method, importance, compression.size, window)


def select_before_window(method: Method, importance: Tensor, size: int, window: int) -> Tensor:
    """``size`` sorted positions: those of the prefix that a method selects, and the whole window after it."""
    prefix = method.select(importance, size - window)
    tail = torch.arange(window, device=importance.device) + importance.shape[-1]
    return torch.cat([prefix, tail.expand(*prefix.shape[:-1], -1)], dim=-1)
