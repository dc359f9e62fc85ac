"""Prompt cache: what a prefill left in the cache, and caches as they are after compressing it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import CompressedLayer, plain_layers


@dataclass(frozen=True)
class PromptCache:
    """Keys and values of one prompt, ``(kv_heads, tokens, head_dim)`` each, by layer index.

    Attributes
    ----------
    full : mapping
        Of the full-attention layers: all tokens of the prompt.
    sliding : mapping
        Of the sliding-window layers: what their cache held at the end of the prefill.
    prompt_length : int
        In tokens.
    """

    full: Mapping[int, tuple[Tensor, Tensor]]
    sliding: Mapping[int, tuple[Tensor, Tensor]]
    prompt_length: int

    def compressed(self, model: PreTrainedModel, kept: Tensor | None) -> Cache:
        """A cache for decoding, as it is right after the prompt was compressed; this one stays as it is.

        Parameters
        ----------
        model : PreTrainedModel
            The model that made it; the new cache is on its device.
        kept : Tensor, optional
            int64 ``(rows, full-attention layers, kv_heads, size)``, sorted positions: a row of the new cache for each
            kept set. None keeps everything, in one row.
        """
        rows = 1 if kept is None else kept.shape[0]
        layers = plain_layers(decoder_of(model).config)
        for place, (i, pair) in enumerate(self.full.items()):
            keys, values = (
                (_rows(tensor, 1) if kept is None else _gathered(tensor, kept[:, place])).to(model.device)
                for tensor in pair
            )
            layers[i] = CompressedLayer.holding(keys, values, of=self.prompt_length)
        for i, (keys, values) in self.sliding.items():
            layer = layers[i]
            layer.update(_rows(keys, rows).to(model.device), _rows(values, rows).to(model.device))
            assert isinstance(layer, DynamicSlidingWindowLayer)
            layer.cumulative_length = self.prompt_length
        return Cache(layers=list(layers))


def _rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.expand(rows, *tensor.shape)


def _gathered(tensor: Tensor, kept: Tensor) -> Tensor:
    """What a layer holds, ``(kv_heads, tokens, head_dim)``, at positions ``(rows, kv_heads, size)``."""
    kv_heads, tokens, _ = tensor.shape
    places = kept + tokens * torch.arange(kv_heads, device=kept.device)[:, None]
    # Takes whole tokens; gather() takes number by number, and so long that it shows in a replay.
    return embedding(places, tensor.flatten(0, 1))
