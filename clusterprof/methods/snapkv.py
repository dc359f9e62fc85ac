"""SnapKV: top-k of the pooled window attention (Li et al., NeurIPS 2024, arXiv 2404.14469)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class SnapKV(Method):
    """Keep the tokens whose neighbourhood the window looks at most.

    Attributes
    ----------
    kernel_size : int
        Odd; tokens averaged around each position. 5 is kvpress's default.
    """

    name: Literal["snapkv"] = "snapkv"
    kernel_size: int = Field(default=5, ge=1, le=1023)

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("kernel_size must be odd, so that its window is centred")
        return value

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        from clusterprof.methods.ranking import keep_highest, local_mean

        return keep_highest(local_mean(observation.importance, self.kernel_size), budget)
