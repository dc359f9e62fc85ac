"""ClusterAttn: keep whole runs of tokens around the peaks of attention (ACL 2025, 2025.acl-long.703)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from clusterprof.methods.base import Method, Pooling, Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


@dataclass(frozen=True)
class Clusters:
    """What ClusterAttn finds in a prefix, before the budget is spent.

    Attributes
    ----------
    centres : Tensor
        Where each block has its highest importance, int64 ``(batch, kv_heads, blocks)``.
    survives : Tensor
        Whether a centre has enough of it to be no noise, bool, shaped as ``centres``.
    covered : Tensor
        Positions inside the neighbourhood of a surviving centre, bool ``(batch, kv_heads, prefix_length)``.
    """

    centres: Tensor
    survives: Tensor
    covered: Tensor


class ClusterAttn(Method):
    """Density-based attention clustering (the paper's Algorithm 1).

    Attributes
    ----------
    num_block : int
        Granularity: the prefix is searched for one centre in every ``budget // num_block`` tokens.
    theta : float
        Centres with less importance than this (attention per window query) are noise; at 1 all of them are, so that
        nothing is clustered whatever the attention.
    gap_pool : int
        Odd; what the clusters leave of the budget goes to the gaps by importance pooled over this many tokens. 1
        is the plain top-k of the paper's text. In a head without a centre above theta all of the prefix is a gap,
        and it keeps what SnapKV with the same pooling keeps.
    gap_pooling : str
        "avg" or "max" of them.
    importance : str
        "mean" of the window's attention to each token, as in the paper, or "max": a token that a single query of
        a single head looks for is then not outvoted by the others.
    """

    name: Literal["clusterattn"] = "clusterattn"
    title: ClassVar[str] = "ClusterAttn"
    version: ClassVar[int] = 2
    num_block: int = Field(ge=1, le=1_000_000)
    theta: float = Field(ge=0, le=1)
    gap_pool: int = Field(default=15, ge=1, le=1023)
    gap_pooling: Pooling = "avg"
    importance: Reduction = "mean"

    @field_validator("gap_pool")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("gap_pool must be odd, so that its window is centred")
        return value

    @classmethod
    def paper_default(cls, size: int) -> ClusterAttn:
        """The paper's values for a compression size (Table 1, Figure 12), log-linear in between."""
        return cls(num_block=8, theta=_paper_theta(size))

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        from clusterprof.methods.ranking import keep_highest, pooled

        importance = observation.reduced(self.importance)
        covered = self.clusters(importance, budget).covered
        # A head without a single centre is one gap.
        score = importance.where(covered, pooled(importance, self.gap_pool, self.gap_pooling))
        return keep_highest(score, budget, first=covered)

    def clusters(self, importance: Tensor, budget: int) -> Clusters:
        """Find the centres and their neighbourhoods (Algorithm 1, up to its top-k).

        Parameters
        ----------
        importance : Tensor
            Float32 ``(batch, kv_heads, prefix_length)``.
        budget : int
            Prefix tokens to keep per head.
        """
        import torch

        length = importance.shape[-1]
        block = max(1, budget // self.num_block)
        # A short last block is filled up with -1, below every importance and every theta.
        peaks = torch.nn.functional.pad(importance, (0, -length % block), value=-1)
        peaks = peaks.view(*peaks.shape[:-1], -1, block)
        centre_importance, offset = peaks.max(dim=-1)
        centres = offset + torch.arange(0, peaks.shape[-2] * block, block, device=offset.device)
        # A token with all of a query's attention has an importance of 1, give or take a rounding.
        survives = (centre_importance >= self.theta) & (self.theta < 1)
        survivors = survives.sum(dim=-1, keepdim=True)

        width = (budget // survivors.clamp(min=1)).clamp(min=1)
        start = centres - (width - 1) // 2
        end = start + width
        # Coverage of all neighbourhoods at once: +1 where one starts, -1 where it ends, running sum.
        edges = importance.new_zeros((*importance.shape[:-1], length + 1), dtype=torch.int32)
        step = survives.to(torch.int32)
        edges.scatter_add_(-1, start.clamp(0, length), step)
        edges.scatter_add_(-1, end.clamp(0, length), -step)
        return Clusters(centres, survives, covered=edges.cumsum(dim=-1)[..., :length] > 0)


def _paper_theta(size: int) -> float:
    """Table 1 of the paper, log-linear in between and constant outside."""
    import numpy as np

    log_theta = np.interp(np.log(size), np.log([1024, 2048, 4096]), np.log([2e-3, 1e-3, 8e-4]))
    # Six digits: the logarithms would leave 0.0020000000000000005 of the table's 2e-3.
    return float(f"{np.exp(log_theta):.6g}")
