"""H2O: heavy hitters of the accumulated attention, and recent tokens (Zhang et al., NeurIPS 2023, arXiv 2306.14048)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from clusterprof.methods.base import Method, Need

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class H2O(Method):
    """Keep the most recent tokens, and of those before them the ones that all queries together looked at most.

    Attributes
    ----------
    recent_share : float
        Share of the size that goes to recent tokens, the observation window among them; the paper's
        experiments give half to them and half to the heavy hitters.
    evict_while_decoding : bool
        Hold the cache at its size at every decode step, as the paper does, instead of compressing the prompt only.
    """

    name: Literal["h2o"] = "h2o"
    title: ClassVar[str] = "H2O"
    recent_share: float = Field(default=0.5, ge=0, le=1)
    evict_while_decoding: bool = False

    needs: ClassVar[frozenset[Need]] = frozenset({"accumulated"})

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        import torch

        from clusterprof.methods.ranking import keep_highest

        accumulated = observation.accumulated
        assert accumulated is not None
        length = accumulated.shape[-1]
        recent = round((budget + observation.window) * self.recent_share) - observation.window
        # Below zero where the window has more than its share: then nothing of the prefix counts as recent.
        is_recent = torch.arange(length, device=accumulated.device) >= length - recent
        return keep_highest(accumulated, budget, first=is_recent)
