"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., ICLR 2024, arXiv 2309.17453)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class StreamingLLM(Method):
    """Keep the first tokens and the last ones, whatever they say.

    Attributes
    ----------
    initial_tokens : int
        How many tokens at the start of the prompt are kept; 4 in the paper.
    evict_while_decoding : bool
        Hold the cache at its size at every decode step, as the paper does, instead of compressing the prompt only.
    """

    name: Literal["streaming_llm"] = "streaming_llm"
    title: ClassVar[str] = "StreamingLLM"
    initial_tokens: int = Field(default=4, ge=0, le=1_000_000)
    evict_while_decoding: bool = False

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        import torch

        batch, heads, length = observation.importance.shape
        # A budget below the initial tokens goes to the earliest of them: then the slice is empty.
        kept = torch.arange(budget, device=observation.importance.device)
        kept[self.initial_tokens :] += length - budget
        return kept.expand(batch, heads, -1)
