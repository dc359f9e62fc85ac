"""Replay: what compressions do to a captured run, at the cost of one forward of the decoded tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import Cache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profiling.attention import attention_outputs, decode_scores
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import NEGLIGIBLE_KL
from clusterprof.runtime.attention import Observer, observe_attention
from clusterprof.runtime.transformers_names import CACHE


@dataclass(frozen=True)
class Replay:
    """A compressed run against the full one, both fed the full run's greedy tokens.

    Attributes
    ----------
    cosine : Tensor
        Cosine similarity of the attention distributions at the positions both runs have (the paper's
        objective, section 3.4), float32 ``(layers, heads, decoded)``.
    cosine_padded : Tensor
        The same over all positions, with evicted ones counted as 0.
    attention_output : Tensor
        Cosine similarity of the attention's outputs, before the heads are mixed, shaped as ``cosine``.
    kl : Tensor
        KL(full || compressed) of the next-token distributions, in nats, ``(decoded,)``.
    agreement : Tensor
        1 where both runs prefer the same next token, ``(decoded,)``.
    loss : Tensor
        -log p of the compressed run for the full run's next token, in nats, ``(decoded,)``.
    log_kl : Tensor
        ln(KL + ``NEGLIGIBLE_KL``), ``(decoded,)``; its mean is not that of a few tokens that went far astray.
    """

    cosine: Tensor
    cosine_padded: Tensor
    attention_output: Tensor
    kl: Tensor
    agreement: Tensor
    loss: Tensor
    log_kl: Tensor


@dataclass
class _Comparer:
    """Computes each layer's attention over compressed caches, and compares it with the full one's.

    Attributes
    ----------
    cosine, cosine_padded, attention_output : list of Tensor
        By full-attention layer, ``(rows, heads, decoded)``.
    """

    capture: Capture
    cosine: list[Tensor] = field(default_factory=list)
    cosine_padded: list[Tensor] = field(default_factory=list)
    attention_output: list[Tensor] = field(default_factory=list)

    def begin(self, cache: Cache | None, attention_mask: Tensor | None, tokens: Tensor) -> Observer:
        return lambda layer_idx, query, key, scaling: None

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        layer = self.capture.layers.get(layer_idx)
        if layer is None:
            return None
        device = key.device
        kept = key.shape[2] - query.shape[2]
        compressed = decode_scores(query, key, scaling).softmax(dim=-1)
        outputs = attention_outputs(compressed, value)
        # The kept keys are the full run's own; only the keys of the decoded tokens differ between the runs.
        decoded_keys = layer.decoded_keys.to(device).expand(key.shape[0], -1, -1, -1)
        full_keys = torch.cat([key[:, :, :kept], decoded_keys], dim=2)
        full_scores = decode_scores(layer.queries.to(device), full_keys, scaling)
        full = full_scores.sub_(layer.logsumexp.to(device)[..., None]).exp_()
        full_norm = full.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        product = full.mul_(compressed).sum(dim=-1) / compressed.norm(dim=-1)
        self.cosine.append(product / full_norm)
        self.cosine_padded.append(product / layer.norm.to(device))
        self.attention_output.append(cosine_similarity(outputs, layer.outputs.to(device), dim=-1))
        return outputs.transpose(1, 2).to(query.dtype)


def replay(model: PreTrainedModel, capture: Capture, kept: Tensor) -> Replay:
    """Replay one kept set, int64 ``(layers, kv_heads, size)``; see :func:`replay_all`.

    Raises
    ------
    CompressionError
        If a result is not finite; it names the layer.
    """
    (result,) = replay_all(model, capture, kept[None])
    if isinstance(result, CompressionError):
        raise result
    return result


@torch.inference_mode()
def replay_all(model: PreTrainedModel, capture: Capture, kept: Tensor) -> list[Replay | CompressionError]:
    """Run the decoded tokens of a capture over compressed caches, in one forward, and compare.

    One causal forward of all tokens equals single steps, because the tokens are given.

    Parameters
    ----------
    model : PreTrainedModel
        The model that was captured.
    capture : Capture
        Of one prompt.
    kept : Tensor
        int64 ``(rows, layers, kv_heads, size)``, sorted prompt positions per full-attention layer: a row for each
        compression.

    Returns
    -------
    list of Replay or CompressionError
        By row, on the model's device; an error, which names the layer, where a result is not finite.
    """
    rows = kept.shape[0]
    cache = capture.prompt_cache.compressed(model, kept)
    comparer = _Comparer(capture)
    tokens = capture.tokens.to(model.device)
    # The model's own attention would give no distributions, and computing it besides would cost as much again.
    with observe_attention(model, comparer.begin, comparer.attend):
        logits = model(input_ids=tokens[:-1].expand(rows, -1), use_cache=True, **{CACHE: cache}).logits
    full = capture.log_probs.to(model.device)
    by_row = zip(
        torch.stack(comparer.cosine, dim=1),
        torch.stack(comparer.cosine_padded, dim=1),
        torch.stack(comparer.attention_output, dim=1),
        logits,
        strict=True,
    )
    return [_result(list(capture.layers), tokens, full, *row) for row in by_row]


def _result(
    layers: list[int],
    tokens: Tensor,
    full: Tensor,
    cosine: Tensor,
    cosine_padded: Tensor,
    attention_output: Tensor,
    logits: Tensor,
) -> Replay | CompressionError:
    finite = torch.isfinite(cosine).flatten(1).all(dim=1)
    for i, layer_finite in zip(layers, finite.tolist(), strict=True):
        if not layer_finite:
            return CompressionError(f"The compressed attention of layer {i} is not finite.")
    compressed = logits.float().log_softmax(dim=-1)
    kl = (full - compressed).mul_(full.exp()).sum(dim=-1)
    # A single logit that is not finite makes it so, too, and asking all of them takes longer than the rest.
    if not torch.isfinite(kl).all():
        return CompressionError("The logits over the compressed cache are not finite.")
    # The full run's preferences, as it decoded greedily.
    targets = tokens[1:]
    return Replay(
        cosine=cosine,
        cosine_padded=cosine_padded,
        attention_output=attention_output,
        kl=kl,
        agreement=(compressed.argmax(dim=-1) == targets).float(),
        loss=-compressed.gather(1, targets[:, None])[:, 0],
        log_kl=kl.clamp(min=0).add(NEGLIGIBLE_KL).log(),
    )
