"""Target: a goal for most prompts, and whether held-out prompts show that a size meets it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterprof.errors import ClusterprofError
from clusterprof.profiling.objective import (
    DEFAULT,
    DIRECTIONS,
    NEGLIGIBLE_KL,
    OF_ATTENTION,
    ObjectiveName,
    Scores,
)

SHARE = 0.8
CONFIDENCE = 0.95
# Least and largest value that a goal can have.
RANGES: dict[ObjectiveName, tuple[float, float]] = {
    "cosine": (-1, 1),
    "cosine_padded": (-1, 1),
    "attention_output": (-1, 1),
    "kl": (0, math.inf),
    "agreement": (0, 1),
    "loss": (0, math.inf),
    # The full cache's own, as tables show it.
    "log_kl": (round(math.log(NEGLIGIBLE_KL), 4), math.inf),
}
# Least and largest share of prompts: a smaller one is shown by a single prompt, a larger one takes over 30,000.
SHARES = (0.01, 0.9999)
# Scores are means in float32: 19 of 20 equal tokens are 0.94999999, and have to meet 0.95.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class TargetResult:
    """What the prompts of one size show of a goal.

    Attributes
    ----------
    prompts, meeting : int
        Prompts that counted, and those among them whose own score meets the goal.
    lower_bound : float
        The share of all such prompts that, with 95 % confidence, at least meets the goal; 0 without prompts.
    reached : float, optional
        The hardest goal that these prompts would show, for the share that was asked for; None if they are too few
        to show any.
    met : bool
        Whether the share that was asked for is shown to meet the goal.
    """

    prompts: int
    meeting: int
    lower_bound: float
    reached: float | None
    met: bool


@dataclass(frozen=True)
class Target:
    """A goal: a share of the prompts shall have a score of at least ``value``, of KL and loss at most.

    It is tested without any assumption on how the scores are distributed, for every objective alike: each prompt
    meets the goal or does not, so how many of them do is binomial, and the exact (Clopper-Pearson) bound of a
    proportion applies. The same bound read as an order statistic says which goal the prompts would show.

    Several sizes are tested from the largest down, until the first that fails. In such a fixed sequence every size
    is tested at the full 95 %, and still all sizes found to meet the goal do, with 95 % confidence: a wrong finding
    takes a first size that does not meet it, and that one is tested once (Westfall and Krishen 2001, J. Stat. Plan.
    Inference 99, 25-40; Angelopoulos et al. 2021, arXiv:2110.01052, fixed sequence testing).

    Attributes
    ----------
    share : float
        Of all prompts like the held-out ones, in ``SHARES``.

    Raises
    ------
    ClusterprofError
        If the objective is none, or a number is out of its range.
    """

    objective: ObjectiveName
    value: float
    share: float = SHARE

    def __post_init__(self) -> None:
        if self.objective not in RANGES:
            raise ClusterprofError(
                f"A target cannot name {self.objective!r}; choose one of {', '.join(RANGES)}."
            )
        low, high = RANGES[self.objective]
        # Written this way round, NaN is out of range too.
        if not (low <= self.value <= high and math.isfinite(self.value)):
            allowed = f"at least {low}" if high == math.inf else f"in the range {low:g}<=x<={high:g}"
            raise ClusterprofError(
                f"A target of {self.value} for {self.objective} cannot be; it must be {allowed}."
            )
        least, most = SHARES
        if not least <= self.share <= most:
            raise ClusterprofError(
                f"A target's share of prompts is {self.share}; it must be in the range {least}<=x<={most}."
            )

    @property
    def searched_by(self) -> ObjectiveName:
        """The objective that finds best what a target on it asks for, on prompts that the search has not seen.

        Agreement and loss on other prompts are predicted better by the default than by themselves, in 11 of 12 rows of
        docs/objective.md; agreement, above all, is the same for many points.
        """
        return self.objective if self.objective in OF_ATTENTION else DEFAULT

    def __str__(self) -> str:
        return f"{self.objective}={self.value}"

    @property
    def at_most(self) -> bool:
        """Whether less is better."""
        return DIRECTIONS[self.objective] == "minimize"

    @property
    def prompts_needed(self) -> int:
        """How many prompts show the goal if all of them meet it; fewer can never."""
        from scipy.stats import geom

        # The first prompt that fails comes later than this with a chance of 5 %, if just the share meets the goal.
        return int(geom.ppf(CONFIDENCE, 1 - self.share))

    def met_by(self, score: float) -> bool:
        """Whether one prompt's score meets the goal."""
        return score <= self.value + _ROUNDING if self.at_most else score >= self.value - _ROUNDING

    def check(self, scores: Sequence[Scores]) -> TargetResult:
        """Test the goal on prompts that the search did not see.

        Parameters
        ----------
        scores : sequence of Scores
            One for each prompt.
        """
        from scipy.stats import binomtest

        if not scores:
            return TargetResult(0, 0, 0.0, None, met=False)
        values = [each[self.objective] for each in scores]
        meeting = sum(map(self.met_by, values))
        test = binomtest(meeting, len(values), alternative="greater")
        bound = float(test.proportion_ci(CONFIDENCE).low)
        return TargetResult(len(values), meeting, bound, self._reached(values), met=bound >= self.share)

    def _reached(self, values: Sequence[float]) -> float | None:
        from scipy.stats import quantile_test

        sign = -1 if self.at_most else 1
        test = quantile_test([sign * value for value in values], p=1 - self.share, alternative="greater")
        interval: Any = test.confidence_interval(CONFIDENCE)
        reached = sign * float(interval.low)
        return None if math.isnan(reached) else reached


def smallest_met(results: Mapping[int, TargetResult]) -> int | None:
    """Return the smallest size that meets the goal, of those tested."""
    return min((size for size, result in results.items() if result.met), default=None)
