"""Hit rate: how much of what decoded tokens look at, the observation window had looked at before (paper, Figure 4)."""

import torch
from pydantic import JsonValue
from torch import Tensor

from clusterprof.evaluation.decode_attention import decode_attention
from clusterprof.evaluation.records import numbers
from clusterprof.profiling.capture import Capture
from clusterprof.runtime.cache import check_finite

# The paper's.
THETA, MU = 5e-4, 5e-5


@torch.inference_mode()
def measure(
    capture: Capture, *, theta: float = THETA, mu: float = MU, bin_steps: int = 64
) -> tuple[dict[str, float], dict[str, JsonValue]]:
    """The paper's hit rate H = sum(T_win and T_cur) / sum(T_cur), over all decoded tokens.

    T_win marks the prefix tokens to which the window's queries together pay more than ``theta``: the paper's sum,
    where importance is a mean. T_cur marks those to which a decoded token pays more than ``mu``. Importance is per
    KV head, so each query head is held against what its KV head's group looked at. A head that looks at nothing
    above ``mu`` in a step has no rate there and is left out of the means; where none of a layer has one in any
    step of a bin, nothing was missed and the rate is 1.

    Parameters
    ----------
    capture : Capture
        Of one prompt.
    theta, mu : float
        The paper's thresholds of attention.
    bin_steps : int
        Decoded tokens that share a mean; the last bin may have fewer.

    Returns
    -------
    scores : dict of str to float
        "hit_rate", the mean over layers, heads and steps; "window_share", the mean share of the prefix that
        T_win marks, without which a hit rate says little: marking everything hits everything.
    curves : dict of str to JSON value
        "hit_rate" by layer and bin, a mean over heads and steps; "bin_steps", the step each bin begins with;
        "layers", the indices of the layers, which are those with full attention.

    Raises
    ------
    CompressionError
        If a layer's attention is not finite; it names the layer.
    """
    rates, shares = [], []
    for i, layer in capture.layers.items():
        check_finite(layer.importance, i)
        seen = layer.importance * capture.window > theta
        shares.append(float(seen.float().mean()))
        rates.append(_rates(capture, i, seen, mu))
    bins = range(0, rates[0].shape[1], bin_steps)
    by_layer = [[_mean(layer[:, start : start + bin_steps]) for start in bins] for layer in rates]
    scores = {
        "hit_rate": _mean(torch.cat([layer.flatten() for layer in rates])),
        "window_share": sum(shares) / len(shares),
    }
    return scores, {"hit_rate": numbers(by_layer), "bin_steps": list(bins), "layers": list(capture.layers)}


def _rates(capture: Capture, layer: int, seen: Tensor, mu: float) -> Tensor:
    """By head and step, ``(heads, decoded)``; NaN where a head looks at nothing above ``mu``."""
    rates = []
    for attention in decode_attention(capture, layer):
        heads, steps, prefix = attention.shape
        looked_at = (attention > mu).view(seen.shape[0], -1, prefix)
        hits = (looked_at & seen[:, None]).sum(dim=-1)
        rates.append((hits / looked_at.sum(dim=-1)).view(heads, steps))
    return torch.cat(rates, dim=1)


def _mean(rates: Tensor) -> float:
    return float(rates.nanmean().nan_to_num(1.0))
