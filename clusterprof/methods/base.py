"""What every compression method is: validated parameters and a rule from importance to kept positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from torch import Tensor


class Method(BaseModel):
    """A compression method with its hyperparameters.

    Subclasses add their parameters as fields and a ``name`` literal, and fill in :meth:`select`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def select(self, importance: Tensor, budget: int) -> Tensor:
        """Choose which prefix tokens survive.

        Parameters
        ----------
        importance : Tensor
            Attention that the observation window pays to each prefix token, float32 and non-negative,
            ``(batch, kv_heads, prefix_length)``. Rows hold no padding.
        budget : int
            Prefix tokens to keep per head, at most ``prefix_length``.

        Returns
        -------
        Tensor
            ``(batch, kv_heads, budget)`` positions, int64, sorted ascending.
        """
        raise NotImplementedError
