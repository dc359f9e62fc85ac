"""Padding of a batch: how many slots at the start of each row hold no token."""

from torch import Tensor

from clusterprof.errors import CompressionError


def left_padding(attention_mask: Tensor | dict[str, Tensor] | None, length: int) -> Tensor | None:
    """Padded slots at the start of each row of a prompt.

    Parameters
    ----------
    attention_mask : Tensor, optional
        ``(batch, length)``, nonzero where there is a token. A dict of masks, one for each kind of layer,
        is refused.
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
    if attention_mask is None:
        return None
    if isinstance(attention_mask, dict) or attention_mask.shape[1:] != (length,):
        given = "a dict" if isinstance(attention_mask, dict) else tuple(attention_mask.shape)
        raise CompressionError(
            f"compress() needs one attention mask of shape (batch, {length}), not {given}; "
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
