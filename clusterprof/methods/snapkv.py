"""SnapKV: top-k of the pooled window attention (Li et al., NeurIPS 2024, arXiv 2404.14469)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from clusterprof.methods.base import Method, Pooling, Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class SnapKV(Method):
    """Keep the tokens whose neighbourhood the window looks at most.

    The defaults are those of the authors' code (FasterDecoding/SnapKV, ``snapkv_utils.py``) and of kvpress; the
    example of the authors' LongBench script takes the maximum of 7.

    Attributes
    ----------
    kernel_size : int
        Odd; tokens pooled around each position.
    pooling : str
        "avg" or "max" of them.
    importance : str
        "mean" or "max" of the window's attention to each token.
    """

    name: Literal["snapkv"] = "snapkv"
    title: ClassVar[str] = "SnapKV"
    kernel_size: int = Field(default=5, ge=1, le=1023)
    pooling: Pooling = "avg"
    importance: Reduction = "mean"

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("kernel_size must be odd, so that its window is centred")
        return value

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        from clusterprof.methods.ranking import keep_highest, pooled

        importance = observation.reduced(self.importance)
        return keep_highest(pooled(importance, self.kernel_size, self.pooling), budget)
