"""Decoding after a prefill: one prompt's answers under several kept sets at once, each a row of a batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from clusterprof.errors import CompressionError
from clusterprof.profiling.prefill import next_token_log_probs
from clusterprof.runtime.transformers_names import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    cache: Cache,
    first: int,
    rows: int,
    *,
    max_new_tokens: int,
    end_tokens: Collection[int],
) -> list[list[int]]:
    """Decode every row greedily until it ends, without the token that ends it.

    Parameters
    ----------
    cache : Cache
        Of ``rows`` rows; it is used up.
    first : int
        The first token after the prompt, which all rows share: the prefill saw the whole prompt.

    Returns
    -------
    list of list of int
        The tokens of each row.
    """
    answers: list[list[int]] = [[first] for _ in range(rows)]
    running = list(range(rows))
    while True:
        going = [
            row
            for row in running
            if answers[row][-1] not in end_tokens and len(answers[row]) < max_new_tokens
        ]
        if not going:
            return [[token for token in answer if token not in end_tokens] for answer in answers]
        if len(going) < len(running):
            still = torch.tensor([running.index(row) for row in going], device=model.device)
            cache.batch_select_indices(still)
            running = going
        tokens = torch.tensor([[answers[row][-1]] for row in running], device=model.device)
        following = next_token_log_probs(model, tokens, cache).argmax(dim=-1).tolist()
        for row, token in zip(running, following, strict=True):
            answers[row].append(token)


@torch.inference_mode()
def answer_losses(
    model: PreTrainedModel, answer: Tensor, cache: Cache, rows: int, *, step: int
) -> list[float]:
    """Mean loss of a given answer in each row after its first token, in nats per token.

    The first token comes from the prefill, which saw the whole prompt: no compression can change its loss.

    Parameters
    ----------
    answer : Tensor
        int64 ``(tokens,)``, at least two.
    cache : Cache
        Of ``rows`` rows; it is used up.
    step : int
        Tokens that are fed at a time.

    Raises
    ------
    CompressionError
        If the logits are not finite.
    """
    total = torch.zeros(rows, device=answer.device)
    for start in range(0, len(answer) - 1, step):
        fed = answer[start : min(start + step, len(answer) - 1)]
        expected = answer[start + 1 : start + 1 + len(fed)]
        logits = model(input_ids=fed.expand(rows, -1), use_cache=True, **{CACHE: cache}).logits.float()
        if not torch.isfinite(logits).all():
            raise CompressionError("The model's logits are not finite.")
        log_probs = logits.log_softmax(dim=-1).gather(2, expected.expand(rows, -1)[..., None])
        total = total + log_probs.sum(dim=(1, 2))
    losses: list[float] = (-total / (len(answer) - 1)).tolist()
    return losses
