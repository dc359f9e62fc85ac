"""Padding of a batch: how many slots at the start of each row hold no token."""

import torch
from torch import Tensor

from clusterprof.errors import CompressionError


def left_padding(attention_mask: Tensor | dict[str, Tensor | None] | None, length: int) -> Tensor | None:
    """Padded slots at the start of each row of a prompt.

    Parameters
    ----------
    attention_mask : Tensor, optional
        ``(batch, length)``, nonzero where there is a token; or as attention takes it, ``(batch, heads or 1,
        new tokens, length)``; or a dict of masks, one for each kind of layer.
    length : int
        Tokens of the prompt, padding included.

    Returns
    -------
    Tensor or None
        int64 ``(batch,)``, or None when no row is padded.

    Raises
    ------
    CompressionError
        If rows are padded on the right or in the middle, a row is empty, or the mask has another shape.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return None
    if attention_mask.ndim == 4:
        # What the last query of each row sees: a boolean mask is True there, an additive one 0.
        seen = attention_mask[:, 0, -1]
        attention_mask = seen if seen.dtype == torch.bool else seen >= 0
    if attention_mask.shape[1:] != (length,):
        raise CompressionError(
            f"compress() needs an attention mask of shape (batch, {length}), not {tuple(attention_mask.shape)}; "
            "leave it out if nothing is padded."
        )
    tokens = attention_mask != 0
    if tokens.all():
        return None
    if not tokens[:, -1].all() or (tokens[:, :-1] & ~tokens[:, 1:]).any():
        raise CompressionError(
            "The batch is padded on the right or in the middle of a row; "
            'compress() needs padding on the left (tokenizer.padding_side = "left").'
        )
    return length - tokens.sum(dim=1)
