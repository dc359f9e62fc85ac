"""Forwards: a prefill and decode steps, called directly on the model, without what `generate` does around them."""

from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof.runtime.transformers_names import CACHE


@dataclass(frozen=True)
class Prefilled:
    """A prompt's cache, and the tokens to go on with, int64 ``(rows, 1)``."""

    cache: DynamicCache
    tokens: Tensor

    def repeated(self, times: int) -> "Prefilled":
        """A copy with every row so many times, that can be decoded while this one stays as it is."""
        cache = deepcopy(self.cache)
        cache.batch_repeat_interleave(times)
        return Prefilled(cache, self.tokens.repeat_interleave(times, dim=0))


@torch.inference_mode()
def prefill(model: PreTrainedModel, prompt: Tensor) -> Prefilled:
    """Read a prompt, int64 ``(rows, length)`` without padding, into a new cache."""
    cache = DynamicCache(config=model.config)
    return Prefilled(cache, _next_tokens(model, prompt, _options(model, cache)))


@torch.inference_mode()
def decode(model: PreTrainedModel, prefilled: Prefilled, steps: int) -> Prefilled:
    """Go on greedily for so many steps, whatever tokens come, in the same cache."""
    tokens, options = prefilled.tokens, _options(model, prefilled.cache)
    for _ in range(steps):
        tokens = _next_tokens(model, tokens, options)
    return Prefilled(prefilled.cache, tokens)


def _options(model: PreTrainedModel, cache: DynamicCache) -> dict[str, Any]:
    options: dict[str, Any] = {CACHE: cache, "use_cache": True}
    # As generate() does: logits over the vocabulary for every token of a long prompt would dwarf its cache.
    if "logits_to_keep" in signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    return options


def _next_tokens(model: PreTrainedModel, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    logits: Tensor = model(input_ids=tokens, **options).logits
    return logits[:, -1:].argmax(dim=-1)
