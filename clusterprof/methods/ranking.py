"""Exact, deterministic choice of the highest scores, shared by all methods."""

import torch
from torch import Tensor

from clusterprof.methods.base import Pooling

_POSITION_BITS = 31


def keep_highest(score: Tensor, budget: int, *, first: Tensor | None = None) -> Tensor:
    """Positions of the ``budget`` highest scores per head, sorted ascending.

    Ties go to the lower position, so the result does not depend on the device's top-k.

    Parameters
    ----------
    score : Tensor
        Non-negative float32, ``(batch, kv_heads, length)``.
    budget : int
        How many to keep.
    first : Tensor, optional
        Boolean, broadcastable to ``score``: these positions come before all others, whatever their score.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, budget)``.
    """
    # The bits of non-negative floats order like the floats, so (first, score, position) packs into one
    # unique integer key: no precision is lost and no two keys are equal.
    key: Tensor = score.float().abs().contiguous().view(torch.int32).to(torch.int64)
    if first is not None:
        key = key + (first.to(torch.int64) << 31)
    positions = torch.arange(score.shape[-1], device=score.device)
    key = (key << _POSITION_BITS) + (2**_POSITION_BITS - 1 - positions)
    return key.topk(budget, dim=-1, sorted=False).indices.sort(dim=-1).values


def pooled(score: Tensor, width: int, pooling: Pooling) -> Tensor:
    """Average or maximum of ``score`` over the ``width`` (odd) tokens around each position.

    At the edges over those that exist. Shapes as in :func:`keep_highest`.
    """
    half = width // 2
    if pooling == "max":
        return torch.nn.functional.max_pool1d(score, width, stride=1, padding=half)
    return torch.nn.functional.avg_pool1d(score, width, stride=1, padding=half, count_include_pad=False)
