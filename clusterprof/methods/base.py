"""What every compression method is: validated parameters and a rule from what was observed to kept positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

# What a method may need to know beyond the observation window's attention.
Need = Literal["accumulated", "words"]
# How the attention of a window's queries becomes one importance.
Reduction = Literal["mean", "max"]
# What stands for a token's neighbourhood: the average of its importance, or the highest.
Pooling = Literal["avg", "max"]


@dataclass(frozen=True)
class Observation:
    """What is known of a prompt's prefix when a method chooses from it. Rows hold no padding.

    Attributes
    ----------
    importance : Tensor
        Attention that the observation window pays to each prefix token, the mean over its queries and the query
        heads that share a KV head, float32 and non-negative, ``(batch, kv_heads, prefix_length)``.
    window : int
        Tokens that come after the prefix and stay whatever is chosen from it.
    accumulated : Tensor, optional
        Attention that all queries of the prompt together paid to each prefix token, shaped as ``importance``;
        there for methods that need "accumulated".
    word_starts : Tensor, optional
        Whether a word begins with this token, bool ``(batch, prefix_length)``; there for methods that need "words".
    peak : Tensor, optional
        The highest attention instead of the mean, shaped as ``importance``; not there without a window.
    """

    importance: Tensor
    window: int
    accumulated: Tensor | None = None
    word_starts: Tensor | None = None
    peak: Tensor | None = None

    def reduced(self, how: Reduction) -> Tensor:
        """Importance as the mean or the maximum over the window's queries."""
        if how == "mean":
            return self.importance
        assert self.peak is not None
        return self.peak

    def of(self, rows: slice) -> Observation:
        """Of these rows of the batch alone."""
        peak, sums, words = self.peak, self.accumulated, self.word_starts
        return replace(
            self,
            importance=self.importance[rows],
            peak=None if peak is None else peak[rows],
            accumulated=None if sums is None else sums[rows],
            word_starts=None if words is None else words[rows],
        )


class Method(BaseModel):
    """A compression method with its hyperparameters.

    Subclasses add their parameters as fields, a ``name`` literal and a :attr:`title`, say what they :attr:`needs`, and
    fill in :meth:`select`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # As tables and sentences call it.
    title: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    # Raise it in a subclass when the same parameters select other positions than before.
    version: ClassVar[int] = 1

    @classmethod
    def paper_default(cls, size: int) -> Self:
        """The method with its paper's values, for most methods the same at every compression size."""
        return cls()

    def check_installed(self) -> None:
        """Raise a ClusterprofError if the method needs a library that is not installed."""

    def select(self, observation: Observation, budget: int) -> Tensor:
        """Choose which prefix tokens survive.

        Parameters
        ----------
        observation : Observation
            Of a prefix.
        budget : int
            Prefix tokens to keep per head, at most the prefix's length.

        Returns
        -------
        Tensor
            ``(batch, kv_heads, budget)`` positions, int64, sorted ascending.
        """
        raise NotImplementedError
