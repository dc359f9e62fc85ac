"""Owns the naive trial: two fresh runs of a stock model, one token at a time, attention compared directly."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from clusterprof.runtime.transformers_names import CACHE


@dataclass(frozen=True)
class NaiveTrial:
    """What a compressed run kept of the full run, in float64; step i is the forward of forced token i.

    Attributes
    ----------
    cosine
        (layers, query_heads, steps): cosine of the two attention distributions on the kept prompt
        positions and the generated ones, the current token included.
    cosine_padded
        (layers, query_heads, steps): the same over all positions, where evicted ones are 0 in the
        compressed run.
    attention_output
        (layers, query_heads, steps): cosine of what each head gives to the output projection.
    kl
        (steps,): KL(full || compressed) of the next-token distributions, in nats.
    agreement
        (steps,): 1 where both runs have the same most likely next token, else 0.
    loss
        (steps,): minus the compressed run's log-probability, in nats, of the full run's most likely
        next token.
    log_kl
        (steps,): natural logarithm of the KL and a thousandth of a nat.
    """

    cosine: Tensor
    cosine_padded: Tensor
    attention_output: Tensor
    kl: Tensor
    agreement: Tensor
    loss: Tensor
    log_kl: Tensor


@dataclass(frozen=True)
class Decoded:
    """The attention distributions, their outputs and next-token log-probabilities of one run."""

    attention: list[Tensor]  # one per step: (layers, query_heads, tokens in the cache at that step)
    outputs: Tensor  # (steps, layers, query_heads, head_dim), float64
    log_probs: Tensor  # (steps, vocabulary), float64


@torch.no_grad()
def naive_trial(
    model: PreTrainedModel, input_ids: Tensor, forced_tokens: Sequence[int], kept: Tensor
) -> NaiveTrial:
    """Run the prompt twice, with the full and with the compressed cache, and compare every step.

    Parameters
    ----------
    model
        A decoder in which every layer attends to the whole prompt (no sliding windows), in eval mode.
    input_ids
        (1, L): the prompt, without padding.
    forced_tokens
        The tokens both runs are fed after the prompt, usually the full run's greedy continuation; at
        least one.
    kept
        (layers, kv_heads, size), int64: the prompt positions that survive, ascending.

    Returns
    -------
    NaiveTrial
        One value per layer, query head and step, or per step.
    """
    return trial_against(full_run(model, input_ids, forced_tokens), model, input_ids, forced_tokens, kept)


@torch.no_grad()
def full_run(model: PreTrainedModel, input_ids: Tensor, forced_tokens: Sequence[int]) -> Decoded:
    """Prefill with the full cache and feed the tokens one at a time; arguments as :func:`naive_trial`."""
    return _decode(model, _prefill(model, input_ids), forced_tokens)


@torch.no_grad()
def trial_against(
    full: Decoded, model: PreTrainedModel, input_ids: Tensor, forced_tokens: Sequence[int], kept: Tensor
) -> NaiveTrial:
    """The compressed half of :func:`naive_trial`: prefill again, compress, decode, compare with ``full``."""
    compressed_cache = _gather(_prefill(model, input_ids), kept)
    compressed = _decode(model, compressed_cache, forced_tokens, first_position=input_ids.shape[1])

    cosines, padded = [], []
    for full_step, compressed_step in zip(full.attention, compressed.attention, strict=True):
        cosine, cosine_padded = _cosines(
            full_step.double(), compressed_step.double(), kept, input_ids.shape[1]
        )
        cosines.append(cosine)
        padded.append(cosine_padded)

    greedy_next = full.log_probs.argmax(-1)
    kl = (full.log_probs.exp() * (full.log_probs - compressed.log_probs)).sum(-1)
    return NaiveTrial(
        cosine=torch.stack(cosines, dim=-1),
        cosine_padded=torch.stack(padded, dim=-1),
        attention_output=torch.cosine_similarity(full.outputs, compressed.outputs, dim=-1).permute(1, 2, 0),
        kl=kl,
        agreement=(compressed.log_probs.argmax(-1) == greedy_next).double(),
        loss=-compressed.log_probs.gather(-1, greedy_next[:, None])[:, 0],
        log_kl=(kl + 1e-3).log(),
    )


@torch.no_grad()
def greedy(model: PreTrainedModel, input_ids: Tensor, steps: int, eos_ids: Collection[int]) -> list[int]:
    """Continue a (1, L) prompt greedily without a cache, everything recomputed for each token.

    Stops after `steps` tokens or at the first of `eos_ids`, which is the last token returned, as
    `generate()` does.
    """
    tokens: list[int] = []
    for _ in range(steps):
        so_far = torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)
        tokens.append(int(model(so_far, use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens


def _prefill(model: PreTrainedModel, input_ids: Tensor) -> DynamicCache:
    # The model's own backend does this part: eager weights of a long prompt would not fit in memory.
    cache = DynamicCache()
    model(input_ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return cache


def _gather(cache: DynamicCache, kept: Tensor) -> DynamicCache:
    gathered = DynamicCache()
    for index, (layer, positions) in enumerate(zip(cache.layers, kept, strict=True)):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        slots = positions[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        gathered.update(layer.keys.gather(2, slots), layer.values.gather(2, slots), index)
    return gathered


def _decode(
    model: PreTrainedModel,
    cache: DynamicCache,
    forced_tokens: Sequence[int],
    first_position: int | None = None,
) -> Decoded:
    """Feed the tokens singly; with `first_position` they sit there and see every slot of the cache."""
    attention, outputs, log_probs = [], [], []
    with _eager_attention(model), _projected(model) as projected:
        for step, token in enumerate(forced_tokens):
            placement = {}
            if first_position is not None:
                slots = cache.get_seq_length() + 1
                placement = {
                    "position_ids": torch.tensor([[first_position + step]], device=model.device),
                    "attention_mask": torch.zeros(1, 1, 1, slots, dtype=model.dtype, device=model.device),
                }
            output = model(
                torch.tensor([[token]], device=model.device),
                use_cache=True,
                output_attentions=True,
                **{CACHE: cache},
                **placement,
            )
            attention.append(torch.stack([weights[0, :, 0] for weights in output.attentions]))
            heads = attention[-1].shape[1]
            outputs.append(torch.stack([each.view(heads, -1).double() for each in projected]))
            projected.clear()
            log_probs.append(output.logits[0, -1].double().log_softmax(-1))
    return Decoded(attention, torch.stack(outputs), torch.stack(log_probs))


def _cosines(full: Tensor, compressed: Tensor, kept: Tensor, prompt_length: int) -> tuple[Tensor, Tensor]:
    query_heads_per_kv_head = full.shape[1] // kept.shape[1]
    positions = kept.repeat_interleave(query_heads_per_kv_head, dim=1)
    full_kept = torch.cat(
        [full[..., :prompt_length].gather(-1, positions), full[..., prompt_length:]], dim=-1
    )
    dot = (full_kept * compressed).sum(-1)
    norm = compressed.norm(dim=-1)
    return dot / (full_kept.norm(dim=-1) * norm), dot / (full.norm(dim=-1) * norm)


@contextmanager
def _projected(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what each layer's output projection is given, one token's heads side by side."""
    given: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0, -1]))
        for name, module in model.named_modules()
        if name.endswith("o_proj")
    ]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
