"""Captures for benchmarks, and what a stock model's full attention matrices say of them."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.profiling.capture import Capture
from tests.profiling.subjects import random_prompt


@torch.no_grad()
def attention_matrices(model: PreTrainedModel, found: Capture) -> list[Tensor]:
    """By layer, ``(heads, tokens, tokens)`` over the prompt of ``random_prompt()`` and all tokens that were fed."""
    tokens = torch.cat([random_prompt(), found.tokens[None, :-1]], dim=1)
    model.set_attn_implementation("eager")
    return [weights[0] for weights in model(tokens, output_attentions=True, use_cache=False).attentions]


def spoiled(found: Capture, *, layer: int, part: str) -> Capture:
    """With one number of one layer not finite."""
    tensor = getattr(found.layers[layer], part).clone()
    tensor.view(-1)[0] = torch.nan
    return replace(found, layers={**found.layers, layer: replace(found.layers[layer], **{part: tensor})})
