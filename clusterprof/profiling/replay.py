"""Replay: what one compression does to a captured run, at the cost of one forward of the decoded tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import Cache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profiling.attention import attention_outputs, decode_scores
from clusterprof.profiling.capture import Capture
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
    """

    cosine: Tensor
    cosine_padded: Tensor
    attention_output: Tensor
    kl: Tensor
    agreement: Tensor
    loss: Tensor


@dataclass
class _Comparer:
    """Computes each layer's attention over the compressed cache, and compares it with the full one's."""

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
        compressed = decode_scores(query[0], key[0], scaling).softmax(dim=-1)
        outputs = attention_outputs(compressed, value[0])
        # The kept keys are the full run's own; only the keys of the decoded tokens differ between the runs.
        full_keys = torch.cat([key[0, :, :kept], layer.decoded_keys.to(device)], dim=1)
        full_scores = decode_scores(layer.queries.to(device), full_keys, scaling)
        full = full_scores.sub_(layer.logsumexp.to(device)[..., None]).exp_()
        full_norm = full.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        product = full.mul_(compressed).sum(dim=-1) / compressed.norm(dim=-1)
        self.cosine.append(product / full_norm)
        self.cosine_padded.append(product / layer.norm.to(device))
        self.attention_output.append(cosine_similarity(outputs, layer.outputs.to(device), dim=-1))
        return outputs.transpose(0, 1)[None].to(query.dtype)


@torch.inference_mode()
def replay(model: PreTrainedModel, capture: Capture, kept: Tensor) -> Replay:
    """Run the decoded tokens of a capture over a compressed cache, in one forward, and compare.

    One causal forward of all tokens equals single steps, because the tokens are given.

    Parameters
    ----------
    model : PreTrainedModel
        The model that was captured.
    capture : Capture
        Of one prompt.
    kept : Tensor
        int64 ``(layers, kv_heads, size)``, sorted prompt positions per full-attention layer.

    Returns
    -------
    Replay
        On the model's device.

    Raises
    ------
    CompressionError
        If a result is not finite; it names the layer.
    """
    cache = capture.prompt_cache.compressed(model, kept[None])
    comparer = _Comparer(capture)
    # The model's own attention would give no distributions, and computing it besides would cost as much again.
    with observe_attention(model, comparer.begin, comparer.attend):
        logits = model(
            input_ids=capture.tokens[None, :-1].to(model.device), use_cache=True, **{CACHE: cache}
        ).logits[0]

    cosine = torch.stack(comparer.cosine)
    finite = torch.isfinite(cosine).flatten(1).all(dim=1)
    for i, layer_finite in zip(capture.layers, finite.tolist(), strict=True):
        if not layer_finite:
            raise CompressionError(f"The compressed attention of layer {i} is not finite.")
    compressed, full = logits.float().log_softmax(dim=-1), capture.log_probs.to(model.device)
    kl = (full - compressed).mul_(full.exp()).sum(dim=-1)
    # A single logit that is not finite makes it so, too, and asking all of them takes longer than the rest.
    if not torch.isfinite(kl).all():
        raise CompressionError("The logits over the compressed cache are not finite.")
    # The full run's preferences, as it decoded greedily.
    targets = capture.tokens[1:].to(model.device)
    return Replay(
        cosine=cosine,
        cosine_padded=torch.stack(comparer.cosine_padded),
        attention_output=torch.stack(comparer.attention_output),
        kl=kl,
        agreement=(compressed.argmax(dim=-1) == targets).float(),
        loss=-compressed.gather(1, targets[:, None])[:, 0],
    )
