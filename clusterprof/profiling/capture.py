"""Capture: one full run of a prompt, and all that replaying it under any compression needs (the paper's A_full)."""

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from clusterprof.errors import CompressionError
from clusterprof.profiling.attention import decode_scores
from clusterprof.runtime.attention import Observer, decoder_of, observe_attention
from clusterprof.runtime.cache import check_finite, check_keys, has_full_attention, plain_layers, stored
from clusterprof.runtime.importance import window_importance
from clusterprof.runtime.transformers_names import CACHE


@dataclass(frozen=True)
class LayerCapture:
    """What one full-attention layer leaves behind.

    Attributes
    ----------
    keys, values : Tensor
        Of the prompt, ``(kv_heads, prompt_length, head_dim)``.
    importance : Tensor
        Float32 ``(kv_heads, prompt_length - window)``.
    queries : Tensor
        Of the decoded tokens, ``(heads, decoded, head_dim)``.
    decoded_keys : Tensor
        ``(kv_heads, decoded, head_dim)``.
    logsumexp, norm : Tensor
        Of each decoded token's scores over prompt and decoded tokens, and the 2-norm of that attention
        distribution, float32 ``(heads, decoded)``.
    """

    keys: Tensor
    values: Tensor
    importance: Tensor
    queries: Tensor
    decoded_keys: Tensor
    logsumexp: Tensor
    norm: Tensor


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
    """

    layers: dict[int, LayerCapture]
    sliding: dict[int, tuple[Tensor, Tensor]]
    prompt_length: int
    window: int
    tokens: Tensor
    log_probs: Tensor
    scaling: float

    @property
    def importance(self) -> Tensor:
        """Of all layers, ``(layers, kv_heads, prompt_length - window)``."""
        return torch.stack([layer.importance for layer in self.layers.values()])

    @property
    def full_loss(self) -> float:
        """Mean next-token loss of the full run on its own greedy tokens, in nats."""
        return float(-self.log_probs.gather(1, self.tokens[1:, None]).mean())


@dataclass
class _Recorder:
    """Collects importance during the prefill and queries during decoding."""

    window: int
    full_layers: dict[int, DynamicLayer]
    importance: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    scaling: float = 0.0

    def begin(self, cache: Cache | None, attention_mask: Tensor | None, shape: torch.Size) -> Observer:
        return self.prefill if not self.importance else self.decode

    def prefill(self, layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        if layer_idx in self.full_layers:
            self.scaling = scaling
            check_keys(self.full_layers[layer_idx], layer_idx, key)
            importance = window_importance(query[:, :, -self.window :], key, scaling=scaling)[0]
            check_finite(importance, layer_idx)
            self.importance[layer_idx] = importance

    def decode(self, layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        if layer_idx in self.full_layers:
            self.queries.setdefault(layer_idx, []).append(query[0])


@torch.inference_mode()
def capture_prompt(
    model: PreTrainedModel, input_ids: Tensor, *, window: int, decode_tokens: int, end_tokens: set[int]
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

    Returns
    -------
    Capture
        On the CPU.

    Raises
    ------
    CompressionError
        If the model ends its answer at once, or its attention or logits are not finite.
    """
    layers = plain_layers(decoder_of(model).config)
    cache = Cache(layers=list(layers))
    full_layers = {i: layer for i, layer in enumerate(layers) if has_full_attention(layer)}
    recorder = _Recorder(window, full_layers)
    # A prompt's logits at every position would take gigabytes; only the last are needed.
    last_only = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    )

    def next_token_log_probs(tokens: Tensor) -> Tensor:
        output = model(input_ids=tokens, use_cache=True, **{CACHE: cache}, **last_only)
        logits: Tensor = output.logits[0, -1]
        if not torch.isfinite(logits).all():
            raise CompressionError("The model's logits are not finite.")
        return logits.float().log_softmax(dim=-1)

    with observe_attention(model, recorder.begin):
        tokens = [next_token_log_probs(input_ids).argmax()]
        sliding = {
            i: (stored(layer)[0][0].cpu().clone(), stored(layer)[1][0].cpu().clone())
            for i, layer in enumerate(layers)
            if i not in full_layers
        }
        log_probs: list[Tensor] = []
        while len(log_probs) < decode_tokens and int(tokens[-1]) not in end_tokens:
            log_probs.append(next_token_log_probs(tokens[-1].view(1, 1)))
            tokens.append(log_probs[-1].argmax())
    if not log_probs:
        raise CompressionError(
            "The model ended its answer with the first token, so there is nothing to compare."
        )

    length = input_ids.shape[1]
    captured = {}
    for i in sorted(full_layers):
        captured[i] = _layer_capture(layers[i], recorder, i, length)
        layers[i].reset()
    return Capture(
        layers=captured,
        sliding=sliding,
        prompt_length=length,
        window=window,
        tokens=torch.stack(tokens).cpu(),
        log_probs=torch.stack(log_probs).cpu(),
        scaling=recorder.scaling,
    )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer: those of the generation settings, with the tokenizer's own if that is one or none."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {int(i) for i in ids if i is not None}


def _layer_capture(layer: DynamicLayer, recorder: _Recorder, index: int, prompt_length: int) -> LayerCapture:
    queries = torch.cat(recorder.queries[index], dim=1)
    keys, values = (tensor[0] for tensor in stored(layer))
    scores = decode_scores(queries, keys, recorder.scaling)
    logsumexp = scores.logsumexp(dim=-1)
    norm = (scores - logsumexp[..., None]).exp().norm(dim=-1)
    return LayerCapture(
        keys=keys[:, :prompt_length].cpu(),
        values=values[:, :prompt_length].cpu(),
        importance=recorder.importance[index].cpu(),
        queries=queries.cpu(),
        decoded_keys=keys[:, prompt_length:].cpu(),
        logsumexp=logsumexp.cpu(),
        norm=norm.cpu(),
    )
