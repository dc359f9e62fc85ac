"""Importance: how much the observation window looks at each prefix token."""

import torch
from torch import Tensor


def window_importance(query: Tensor, key: Tensor, *, scaling: float) -> tuple[Tensor, Tensor]:
    """Mean and peak of the window's attention, per KV head, over the prefix (paper section 3.2).

    The mean over the window, not the paper's sum: theta then does not depend on the window's length. Query
    heads that share a KV head are taken together, so the cache stays at KV heads.

    Parameters
    ----------
    query : Tensor
        The last ``window`` queries, after RoPE, ``(batch, heads, window, head_dim)``.
    key : Tensor
        All keys, after RoPE, not repeated and without padding, ``(batch, kv_heads, length, head_dim)``.
    scaling : float
        What the model multiplies its attention scores with.

    Returns
    -------
    mean, peak : Tensor
        Over the window's queries and the query heads of a KV head, float32 ``(batch, kv_heads, length - window)``.
    """
    batch, heads, window, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.float().reshape(batch, kv_heads, -1, head_dim) * scaling
    scores = grouped @ key.float().transpose(-1, -2)
    scores = scores.view(batch, kv_heads, heads // kv_heads, window, length)
    # The window is causal inside itself.
    future = torch.ones(window, window, dtype=torch.bool, device=key.device).triu(1)
    scores[..., length - window :].masked_fill_(future, -torch.inf)
    attention = scores.softmax(dim=-1)[..., : length - window]
    return attention.mean(dim=(2, 3)), attention.amax(dim=(2, 3))


# Most elements of a block of scores: 16 MiB in float32, which the last cache of a CPU can hold, or 64 MiB.
_CPU_BLOCK, _GPU_BLOCK = 1 << 22, 1 << 24


def accumulated_attention(query: Tensor, key: Tensor, *, scaling: float) -> Tensor:
    """Attention that each token received from all queries together, per KV head (H2O, section 4.1).

    Summed over the queries block by block, so no matrix of prompt by prompt is built; mean over the query heads
    that share a KV head.

    Parameters
    ----------
    query : Tensor
        The last queries of a sequence, after RoPE, ``(batch, heads, queries, head_dim)``; all of them at first.
    key : Tensor
        All keys, after RoPE, not repeated and without padding, ``(batch, kv_heads, length, head_dim)``.
    scaling : float
        What the model multiplies its attention scores with.

    Returns
    -------
    Tensor
        float32 ``(batch, kv_heads, length)``.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    keys = key.float().transpose(-1, -2)
    positions = torch.arange(length, device=key.device)
    total = key.new_zeros((batch, kv_heads, length), dtype=torch.float32)
    elements = _CPU_BLOCK if key.device.type == "cpu" else _GPU_BLOCK
    block = max(1, elements // (batch * heads * length))
    for start in range(0, queries, block):
        part = query[:, :, start : start + block].float() * scaling
        # What comes after the block's last query is not seen by any of it.
        seen = length - queries + start + part.shape[2]
        scores = part.reshape(batch, kv_heads, -1, head_dim) @ keys[..., :seen]
        scores = scores.view(batch, kv_heads, heads // kv_heads, -1, seen)
        future = positions[:seen] > positions[seen - part.shape[2] : seen, None]
        attention = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
        total[..., :seen] += attention.sum(dim=3).mean(dim=2)
    return total
