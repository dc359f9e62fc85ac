"""Attention of decoded tokens over a prompt's prefix, computed anew from a capture, some steps at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from clusterprof.errors import CompressionError
from clusterprof.profiling.capture import Capture, LayerCapture

# Most elements of a block of attention: 16 MiB in float32.
_BLOCK_ELEMENTS = 1 << 22


def full_attention_layer(capture: Capture, layer: int) -> LayerCapture:
    """What a layer left behind, by its index in the model.

    Raises
    ------
    CompressionError
        If there is no such layer, or it slides.
    """
    if layer not in capture.layers:
        layers = ", ".join(map(str, capture.layers))
        raise CompressionError(
            f"The model has no full attention in a layer {layer}; it has some in {layers}."
        )
    return capture.layers[layer]


def decode_attention(capture: Capture, layer: int) -> Iterator[Tensor]:
    """Attention of every decoded token over the prefix, in blocks of consecutive steps.

    Yields
    ------
    Tensor
        float32 ``(heads, steps, prefix_length)``, after a softmax over prompt and decoded tokens.

    Raises
    ------
    CompressionError
        If the layer has no full attention, or its attention is not finite.
    """
    captured = full_attention_layer(capture, layer)
    heads, decoded, head_dim = captured.queries.shape
    prefix = capture.prompt_length - capture.window
    keys = captured.keys[:, :prefix].float().transpose(-1, -2)
    block = max(1, _BLOCK_ELEMENTS // (heads * prefix))
    for start in range(0, decoded, block):
        queries = captured.queries[:, start : start + block].float() * capture.scaling
        scores = (queries.reshape(keys.shape[0], -1, head_dim) @ keys).view(heads, -1, prefix)
        attention = scores.sub_(captured.logsumexp[:, start : start + block, None]).exp_()
        if not torch.isfinite(attention).all():
            raise CompressionError(
                f"The attention of decoded tokens in layer {layer} is not finite; run the model in a wider dtype "
                "(bfloat16 or float32)."
            )
        yield attention


@torch.inference_mode()
def summed_decode_attention(capture: Capture, layer: int) -> Tensor:
    """Attention that each prefix token got from all decoded tokens together (paper, Figure 5).

    Returns
    -------
    Tensor
        float32 ``(heads, prefix_length)``.

    Raises
    ------
    CompressionError
        As :func:`decode_attention`.
    """
    heads, prefix = (
        full_attention_layer(capture, layer).queries.shape[0],
        capture.prompt_length - capture.window,
    )
    total = torch.zeros(heads, prefix)
    for attention in decode_attention(capture, layer):
        total += attention.sum(dim=1)
    return total
