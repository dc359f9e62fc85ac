"""Words and their neighbours, the paper's n-gram baseline (appendix F.3, Table 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from clusterprof.methods.base import Method, Need

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class NGram(Method):
    """Keep whole words, those with the most important token first, each with its n - 1 neighbours.

    Attributes
    ----------
    n : int
        Words that are kept together: the word, (n - 1) // 2 before it and n // 2 after it. The paper tries 1 to 4
        and finds 2 the best.
    """

    name: Literal["ngram"] = "ngram"
    title: ClassVar[str] = "n-gram"
    n: int = Field(default=2, ge=1, le=4)

    needs: ClassVar[frozenset[Need]] = frozenset({"words"})

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`."""
        import torch

        from clusterprof.methods.ranking import keep_highest

        importance = observation.importance
        assert observation.word_starts is not None
        # The first token belongs to a word even if the word began before it.
        word = observation.word_starts[:, 1:].cumsum(dim=-1)
        word = torch.nn.functional.pad(word, (1, 0))[:, None].expand_as(importance)
        # There are at most as many words as tokens; what has no word stays 0, the lowest score.
        score = torch.zeros_like(importance).scatter_reduce(-1, word, importance, "amax")
        # A word is kept for any word that brings it along: one of n // 2 before it or (n - 1) // 2 after it.
        score = torch.nn.functional.pad(score, (self.n // 2, (self.n - 1) // 2))
        score = torch.nn.functional.max_pool1d(score, self.n, stride=1)
        return keep_highest(score.gather(-1, word), budget)
