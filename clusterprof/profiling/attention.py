"""Attention of decoded tokens over what a cache holds, computed from queries, keys and values."""

import torch
from torch import Tensor


def decode_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Attention scores of decoded tokens, causal among themselves.

    Parameters
    ----------
    query : Tensor
        ``(..., heads, decoded, head_dim)``, after RoPE.
    key : Tensor
        ``(..., kv_heads, stored + decoded, head_dim)``: what was stored before decoding, then the decoded tokens.
    scaling : float
        What the model multiplies its attention scores with.

    Returns
    -------
    Tensor
        float32 ``(..., heads, decoded, stored + decoded)``; -inf where a token lies in the future.
    """
    heads, decoded, head_dim = query.shape[-3:]
    grouped = (query.float() * scaling).reshape(*query.shape[:-3], key.shape[-3], -1, head_dim)
    scores = grouped @ key.float().transpose(-1, -2)
    scores = scores.view(*scores.shape[:-3], heads, decoded, -1)
    future = torch.ones(decoded, decoded, dtype=torch.bool, device=key.device).triu(1)
    scores[..., scores.shape[-1] - decoded :].masked_fill_(future, -torch.inf)
    return scores


def attention_outputs(attention: Tensor, values: Tensor) -> Tensor:
    """Values weighted by attention, per query head.

    Parameters
    ----------
    attention : Tensor
        float32 ``(..., heads, decoded, stored + decoded)``.
    values : Tensor
        ``(..., kv_heads, stored + decoded, head_dim)``.

    Returns
    -------
    Tensor
        float32 ``(..., heads, decoded, head_dim)``.
    """
    *rows, heads, decoded, tokens = attention.shape
    grouped = attention.reshape(*rows, values.shape[-3], -1, tokens)
    return (grouped @ values.float()).view(*rows, heads, decoded, -1)
