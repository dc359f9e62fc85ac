"""Exact, deterministic choice of the highest scores, shared by all methods."""

import torch
from torch import Tensor

_POSITION_BITS = 31


def valid_positions(importance: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Boolean ``(batch, 1, prefix_length)``, True where a row holds a token; None when every row is full."""
    if lengths is None:
        return None
    positions = torch.arange(importance.shape[-1], device=importance.device)
    return (positions < lengths[:, None])[:, None]


def keep_highest(
    score: Tensor, budget: int, *, first: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
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
    valid : Tensor, optional
        Boolean, broadcastable to ``score``: the others are kept only when there is nothing else left.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, budget)``.
    """
    length = score.shape[-1]
    # The bits of non-negative floats order like the floats, so (first, score, position) packs into one
    # unique integer key: no precision is lost and no two keys are equal.
    key = score.float().abs().contiguous().view(torch.int32).to(torch.int64)
    if first is not None:
        key = key + (first.to(torch.int64) << 31)
    positions = torch.arange(length, device=score.device)
    key = (key << _POSITION_BITS) + (2**_POSITION_BITS - 1 - positions)
    if valid is not None:
        key = torch.where(valid, key, -1 - positions)
    return key.topk(budget, dim=-1, sorted=False).indices.sort(dim=-1).values


def local_mean(score: Tensor, width: int, lengths: Tensor | None = None) -> Tensor:
    """Mean of ``score`` over the ``width`` (odd) tokens around each position, those that exist at the edges.

    Shapes as in :func:`keep_highest`; what lies behind a row's length must already be zero.
    """
    length, half = score.shape[-1], width // 2
    total = torch.nn.functional.avg_pool2d(
        score[:, :, None], (1, width), stride=1, padding=(0, half), divisor_override=1
    )[:, :, 0]
    positions = torch.arange(length, device=score.device)
    ends = torch.full((1, 1), length, device=score.device) if lengths is None else lengths[:, None]
    count = (positions + half + 1).minimum(ends) - (positions - half).clamp(min=0)
    return total / count.clamp(min=1)[:, None]
