"""Plain top-k: the tokens the window looks at most, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class TopK(Method):
    """Keep the highest importance, no clustering and no pooling."""

    name: Literal["topk"] = "topk"
    title: ClassVar[str] = "top-k"

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        from clusterprof.methods.ranking import keep_highest

        return keep_highest(observation.importance, budget)
