"""Capture: one full run of a prompt, and all that replaying it under any compression needs (the paper's A_full)."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from clusterprof.errors import CompressionError
from clusterprof.methods import Observation
from clusterprof.profiling.attention import attention_outputs, decode_scores
from clusterprof.profiling.prefill import Prefill, next_token_log_probs, prefill_prompt
from clusterprof.profiling.prompt_cache import PromptCache
from clusterprof.runtime.attention import Observer, observe_attention
from clusterprof.runtime.cache import stored


@dataclass(frozen=True)
class LayerCapture:
    """What one full-attention layer leaves behind.

    Attributes
    ----------
    keys, values : Tensor
        Of the prompt, ``(kv_heads, prompt_length, head_dim)``.
    importance, peak : Tensor
        Mean and highest attention of the window, float32 ``(kv_heads, prompt_length - window)``.
    queries : Tensor
        Of the decoded tokens, ``(heads, decoded, head_dim)``.
    decoded_keys : Tensor
        ``(kv_heads, decoded, head_dim)``.
    logsumexp, norm : Tensor
        Of each decoded token's scores over prompt and decoded tokens, and the 2-norm of that attention
        distribution, float32 ``(heads, decoded)``.
    outputs : Tensor
        Values weighted by that attention, float32 ``(heads, decoded, head_dim)``.
    accumulated : Tensor, optional
        Attention from all queries of the prompt, shaped as ``importance``, for methods that need it.
    """

    keys: Tensor
    values: Tensor
    importance: Tensor
    peak: Tensor
    queries: Tensor
    decoded_keys: Tensor
    logsumexp: Tensor
    norm: Tensor
    outputs: Tensor
    accumulated: Tensor | None = None


@dataclass(frozen=True)
class Capture:
    """One prompt's full run.

    Attributes
    ----------
    layers : dict of int to LayerCapture
        By layer index; full-attention layers only.
    sliding : dict of int to (Tensor, Tensor)
        Keys and values of each sliding-window layer's cache at the end of the prefill.
    prompt_length, window : int
        In tokens.
    tokens : Tensor
        int64 ``(decoded + 1,)``: the tokens fed one by one, and the greedy token after the last of them.
    log_probs : Tensor
        Float32 ``(decoded, vocabulary)``: the full run's next-token log-probabilities.
    scaling : float
        What the model multiplies its attention scores with.
    word_starts : Tensor, optional
        Whether a word begins with each token of the prompt, bool ``(prompt_length,)``.
    """

    layers: dict[int, LayerCapture]
    sliding: dict[int, tuple[Tensor, Tensor]]
    prompt_length: int
    window: int
    tokens: Tensor
    log_probs: Tensor
    scaling: float
    word_starts: Tensor | None = None

    @cached_property
    def observation(self) -> Observation:
        """Of the prefix; the batch is the full-attention layers."""
        layers = list(self.layers.values())
        sums = [layer.accumulated for layer in layers if layer.accumulated is not None]
        prefix = self.prompt_length - self.window
        return Observation(
            torch.stack([layer.importance for layer in layers]),
            window=self.window,
            peak=torch.stack([layer.peak for layer in layers]),
            accumulated=torch.stack(sums) if sums else None,
            word_starts=None
            if self.word_starts is None
            else self.word_starts[:prefix].expand(len(layers), -1),
        )

    @property
    def prompt_cache(self) -> PromptCache:
        """What the prefill left in the cache."""
        full = {i: (layer.keys, layer.values) for i, layer in self.layers.items()}
        return PromptCache(full, self.sliding, self.prompt_length)

    @property
    def full_loss(self) -> float:
        """Mean next-token loss of the full run on its own greedy tokens, in nats."""
        return float(-self.log_probs.gather(1, self.tokens[1:, None]).mean())


@dataclass
class _Queries:
    """Collects the queries of decoded tokens."""

    full_layers: list[int]
    queries: dict[int, list[Tensor]] = field(default_factory=dict)

    def begin(self, cache: Cache | None, attention_mask: Tensor | None, tokens: Tensor) -> Observer:
        return self.record

    def record(self, layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        if layer_idx in self.full_layers:
            self.queries.setdefault(layer_idx, []).append(query[0])


@torch.inference_mode()
def capture_prompt(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    window: int,
    decode_tokens: int,
    end_tokens: set[int],
    accumulate: bool = False,
    word_starts: Tensor | None = None,
) -> Capture:
    """Run a prompt in full: prefill, then decode greedily until a token of ``end_tokens``.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with at least one full-attention layer.
    input_ids : Tensor
        int64 ``(1, prompt_length)`` on the model's device, longer than ``window``.
    window : int
        Tokens of the observation window.
    decode_tokens : int
        At most this many tokens are decoded.
    end_tokens : set of int
        What comes after one of these is noise; it is neither fed nor followed.
    accumulate, word_starts
        For methods that need them, see :func:`clusterprof.profiling.prefill.prefill_prompt`.

    Returns
    -------
    Capture
        On the CPU.

    Raises
    ------
    CompressionError
        If the model ends its answer at once, or its attention or logits are not finite.
    """
    prefill = prefill_prompt(
        model, input_ids, observed=window, accumulate=accumulate, word_starts=word_starts
    )
    observation = prefill.observation(window)
    layers, full_layers = prefill.layers, list(prefill.queries)
    sliding = {
        i: (stored(layer)[0][0].cpu().clone(), stored(layer)[1][0].cpu().clone())
        for i, layer in enumerate(layers)
        if i not in full_layers
    }
    recorder = _Queries(full_layers)
    cache = Cache(layers=list(layers))
    tokens = [prefill.log_probs.argmax()]
    log_probs: list[Tensor] = []
    with observe_attention(model, recorder.begin):
        while len(log_probs) < decode_tokens and int(tokens[-1]) not in end_tokens:
            log_probs.append(next_token_log_probs(model, tokens[-1].view(1, 1), cache)[0])
            tokens.append(log_probs[-1].argmax())
    if not log_probs:
        raise CompressionError(
            "The model ended its answer with the first token, so there is nothing to compare."
        )

    captured = {}
    for position, i in enumerate(full_layers):
        queries = torch.cat(recorder.queries[i], dim=1)
        captured[i] = _layer_capture(layers[i], queries, prefill, observation, position)
        layers[i].reset()
    return Capture(
        layers=captured,
        sliding=sliding,
        prompt_length=prefill.prompt_length,
        window=window,
        tokens=torch.stack(tokens).cpu(),
        log_probs=torch.stack(log_probs).cpu(),
        scaling=prefill.scaling,
        word_starts=None if word_starts is None else word_starts.cpu(),
    )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer: those of the generation settings, with the tokenizer's own if that is one or none."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {int(i) for i in ids if i is not None}


def _layer_capture(
    layer: DynamicLayer, queries: Tensor, prefill: Prefill, observation: Observation, position: int
) -> LayerCapture:
    """Capture the full-attention layer that is at ``position`` in the observation's batch."""
    keys, values = (tensor[0] for tensor in stored(layer))
    scores = decode_scores(queries, keys, prefill.scaling)
    logsumexp = scores.logsumexp(dim=-1)
    attention = scores.sub_(logsumexp[..., None]).exp_()
    length, peak, accumulated = prefill.prompt_length, observation.peak, observation.accumulated
    assert peak is not None
    return LayerCapture(
        keys=keys[:, :length].cpu(),
        values=values[:, :length].cpu(),
        importance=observation.importance[position].cpu(),
        peak=peak[position].cpu(),
        queries=queries.cpu(),
        decoded_keys=keys[:, length:].cpu(),
        logsumexp=logsumexp.cpu(),
        norm=attention.norm(dim=-1).cpu(),
        outputs=attention_outputs(attention, values).cpu(),
        accumulated=None if accumulated is None else accumulated[position].cpu(),
    )
