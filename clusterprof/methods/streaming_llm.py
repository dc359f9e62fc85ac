"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., ICLR 2024, arXiv 2309.17453)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor


class StreamingLLM(Method):
    """Keep the first tokens and the last ones, whatever they say.

    Attributes
    ----------
    initial_tokens : int
        How many tokens at the start of the prompt are kept; 4 in the paper.
    """

    name: Literal["streaming_llm"] = "streaming_llm"
    initial_tokens: int = Field(default=4, ge=0, le=1_000_000)

    def select(self, importance: Tensor, budget: int, lengths: Tensor | None = None) -> Tensor:
        """See :meth:`Method.select`."""
        import torch

        from clusterprof.methods.ranking import keep_highest, valid_positions

        positions = torch.arange(importance.shape[-1], device=importance.device, dtype=torch.float32)
        return keep_highest(
            positions.expand_as(importance),
            budget,
            # A budget below the initial tokens goes to the earliest of them.
            first=positions < min(self.initial_tokens, budget),
            valid=valid_positions(importance, lengths),
        )
