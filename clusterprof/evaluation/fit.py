"""Fit: how close attention over a compressed cache stays to the full one's, head by head (paper, Figures 6 and 12)."""

from dataclasses import fields

from pydantic import JsonValue
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.evaluation.records import numbers
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.replay import Replay, replay


def measure(
    model: PreTrainedModel, capture: Capture, kept: Tensor
) -> tuple[dict[str, float], dict[str, JsonValue]]:
    """Replay what a compression keeps on a capture.

    Parameters
    ----------
    model : PreTrainedModel
        The model that was captured.
    capture : Capture
        Of one prompt.
    kept : Tensor
        Its positions that survive, int64 ``(layers, kv_heads, size)``.

    Returns
    -------
    scores : dict of str to float
        Means over steps, heads and layers of all that a :class:`Replay` has.
    curves : dict of str to JSON value
        "cosine_by_head" by layer and query head, a mean over steps; "layers", the indices of the layers, which
        are those with full attention.

    Raises
    ------
    CompressionError
        If a result is not finite; it names the layer.
    """
    result = replay(model, capture, kept)
    scores = {field.name: float(getattr(result, field.name).mean()) for field in fields(Replay)}
    by_head = numbers(result.cosine.mean(dim=-1).tolist())
    return scores, {"cosine_by_head": by_head, "layers": list(capture.layers)}
