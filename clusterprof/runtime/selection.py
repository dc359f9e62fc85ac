"""Kept set: which positions of each KV head stay in the cache."""

import torch
from torch import Tensor

from clusterprof.methods import Method, Observation


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
