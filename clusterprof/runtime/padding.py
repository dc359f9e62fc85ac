"""Rows of a batch: how many slots at the start of each hold no token, and which rows are alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from clusterprof.errors import CompressionError


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a batch that are compressed together.

    Attributes
    ----------
    of_batch : slice
        Which rows.
    padding : int
        Padded positions at the start of each.
    window : int
        Length of their observation window, in tokens.
    word_starts : Tensor, optional
        Whether a word begins with each token of their prompts, bool ``(rows, tokens)``, for methods that need it.
    """

    of_batch: slice
    padding: int
    window: int
    word_starts: Tensor | None = field(default=None, compare=False)


def alike(padding: Sequence[int], windows: Sequence[int]) -> list[Rows]:
    """Neighbouring rows with the same padding and the same window, in order."""
    groups, start = [], 0
    for (padded, window), rows in groupby(zip(padding, windows, strict=True)):
        stop = start + len(list(rows))
        groups.append(Rows(slice(start, stop), padded, window))
        start = stop
    return groups


def left_padding(
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    batch: int,
    length: int,
    *,
    unfinished: bool = False,
) -> list[int]:
    """Padded slots at the start of each row of a prompt.

    Parameters
    ----------
    attention_mask : Tensor, optional
        ``(batch, length)``, nonzero where there is a token; or as attention takes it, ``(batch, heads or 1,
        new tokens, length)``; or a dict of masks, one for each kind of layer.
    batch, length : int
        Rows, and tokens of each, padding included.
    unfinished : bool
        More of the prompt is to come, so a row may be all padding as yet.

    Raises
    ------
    CompressionError
        If rows are padded on the right or in the middle, a row is empty, or the mask has another shape.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return [0] * batch
    if attention_mask.ndim == 4:
        # What the last query of each row sees: a boolean mask is True there, an additive one 0.
        seen = attention_mask[:, 0, -1]
        attention_mask = seen if seen.dtype == torch.bool else seen >= 0
    if attention_mask.shape[1:] != (length,):
        raise CompressionError(
            f"compress() needs an attention mask of shape (batch, {length}), not {tuple(attention_mask.shape)}; "
            "leave it out if nothing is padded."
        )
    tokens = (attention_mask != 0).expand(batch, -1)
    if tokens.all():
        return [0] * batch
    if not unfinished and not tokens.any(dim=1).all():
        raise CompressionError(
            "A row of the batch is empty: its attention mask marks no token; leave it out."
        )
    ends = unfinished or bool(tokens[:, -1].all())
    if not ends or (tokens[:, :-1] & ~tokens[:, 1:]).any():
        raise CompressionError(
            "The batch is padded on the right or in the middle of a row; "
            'compress() needs padding on the left (tokenizer.padding_side = "left").'
        )
    padding: list[int] = (length - tokens.sum(dim=1)).tolist()
    return padding
