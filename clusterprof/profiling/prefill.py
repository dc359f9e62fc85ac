"""Prefill: one pass over a prompt, and all that choosing from it under any method and window needs."""

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from clusterprof.errors import CompressionError
from clusterprof.methods import Observation
from clusterprof.profiling.prompt_cache import PromptCache
from clusterprof.runtime.attention import Observer, decoder_of, observe_attention
from clusterprof.runtime.cache import check_finite, check_keys, has_full_attention, plain_layers, stored
from clusterprof.runtime.importance import accumulated_attention, window_importance
from clusterprof.runtime.transformers_names import CACHE


@dataclass(frozen=True)
class Prefill:
    """A prompt's whole cache, and how its tokens looked at one another.

    Attributes
    ----------
    layers : list of DynamicLayer
        The cache, on the model's device.
    queries : dict of int to Tensor
        By index of each full-attention layer: its last queries after RoPE, ``(1, heads, observed, head_dim)``.
    accumulated : dict of int to Tensor
        Where it was asked for, attention from all queries together, float32 ``(1, kv_heads, prompt_length)``.
    word_starts : Tensor, optional
        Whether a word begins with each token, bool ``(prompt_length,)``.
    prompt_length : int
        In tokens.
    log_probs : Tensor
        Float32 ``(vocabulary,)``, of the first token after the prompt.
    scaling : float
        What the model multiplies its attention scores with.
    """

    layers: list[DynamicLayer]
    queries: dict[int, Tensor]
    accumulated: dict[int, Tensor]
    word_starts: Tensor | None
    prompt_length: int
    log_probs: Tensor
    scaling: float

    @property
    def prompt_cache(self) -> PromptCache:
        """The cache by kind of layer; nothing may have been decoded from it."""
        held = {i: tuple(tensor[0] for tensor in stored(layer)) for i, layer in enumerate(self.layers)}
        return PromptCache(
            full={i: held[i] for i in self.queries},  # type: ignore[misc]
            sliding={i: pair for i, pair in held.items() if i not in self.queries},  # type: ignore[misc]
            prompt_length=self.prompt_length,
        )

    def observation(self, window: int) -> Observation:
        """What a window of so many tokens sees of the prefix; the batch is the full-attention layers."""
        prefix = self.prompt_length - window
        reductions = []
        for i, queries in self.queries.items():
            keys, _ = stored(self.layers[i])
            reductions.append(window_importance(queries[:, :, -window:], keys, scaling=self.scaling))
        mean, peak = map(torch.cat, zip(*reductions, strict=True))
        return Observation(
            mean,
            window=window,
            peak=peak,
            accumulated=torch.cat(list(self.accumulated.values()))[..., :prefix]
            if self.accumulated
            else None,
            word_starts=None
            if self.word_starts is None
            else self.word_starts[:prefix].expand(len(reductions), -1),
        )


@dataclass
class _Recorder:
    """Keeps the last queries of each full-attention layer, and sums its attention if that is asked for."""

    layers: list[DynamicLayer]
    observed: int
    accumulate: bool
    queries: dict[int, Tensor] = field(default_factory=dict)
    accumulated: dict[int, Tensor] = field(default_factory=dict)
    scaling: float = 0.0

    def begin(self, cache: Cache | None, attention_mask: Tensor | None, tokens: Tensor) -> Observer:
        return self.record

    def record(self, layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        if has_full_attention(self.layers[layer_idx]):
            self.scaling = scaling
            check_keys(self.layers[layer_idx], layer_idx, key)
            queries = query[:, :, -self.observed :].clone()
            # Importance is computed in float32, so it is finite where these are.
            for tensor in (queries, key):
                check_finite(tensor, layer_idx)
            self.queries[layer_idx] = queries
            if self.accumulate:
                self.accumulated[layer_idx] = accumulated_attention(query, key, scaling=scaling)


@torch.inference_mode()
def prefill_prompt(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    observed: int,
    accumulate: bool = False,
    word_starts: Tensor | None = None,
) -> Prefill:
    """Run a prompt in full.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with at least one full-attention layer.
    input_ids : Tensor
        int64 ``(1, prompt_length)`` on the model's device.
    observed : int
        Longest observation window that will be asked for, below the prompt's length.
    accumulate : bool
        Also sum the attention of all queries, which costs about as much as the attention itself.
    word_starts : Tensor, optional
        Kept for the observation, see :class:`Prefill`.

    Raises
    ------
    CompressionError
        If the model cannot be compressed, a layer's attention is not finite (it names the layer), or the logits.
    """
    layers = plain_layers(decoder_of(model).config)
    recorder = _Recorder(layers, observed, accumulate)
    with observe_attention(model, recorder.begin):
        log_probs = next_token_log_probs(model, input_ids, Cache(layers=list(layers)))
    return Prefill(
        layers=layers,
        queries=dict(sorted(recorder.queries.items())),
        accumulated=dict(sorted(recorder.accumulated.items())),
        word_starts=word_starts,
        prompt_length=input_ids.shape[1],
        log_probs=log_probs[0],
        scaling=recorder.scaling,
    )


def next_token_log_probs(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """Feed tokens ``(batch, new_tokens)``; return log-probabilities of the next, float32 ``(batch, vocabulary)``.

    Raises
    ------
    CompressionError
        If they are not finite.
    """
    # A prompt's logits at every position would take gigabytes; only the last are needed.
    last_only = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    )
    logits: Tensor = model(input_ids=tokens, use_cache=True, **{CACHE: cache}, **last_only).logits[:, -1]
    if not torch.isfinite(logits).all():
        raise CompressionError("The model's logits are not finite.")
    return logits.float().log_softmax(dim=-1)
