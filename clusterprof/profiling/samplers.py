"""Samplers: which points of a search space a search tries, and in which order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from clusterprof.profiling.settings import SamplerName
from clusterprof.profiling.spaces import Point, SearchSpace


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that were evaluated: on all samples, or until it was shown that they are not the best."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def first_points(space: SearchSpace, start: Point | None) -> list[Point]:
    """What a search tries before all else, and is held against: the paper's values and, if there is one, its start."""
    return [space.first] if start is None or start == space.first else [space.first, start]


def points_to_try(
    space: SearchSpace, sampler: SamplerName, trials: int, start: Point | None
) -> list[Point] | None:
    """All points that a search may try, or None if there are infinitely many; arguments as for
    :func:`clusterprof.profiling.search.search`.
    """
    if sampler != "grid":
        return space.points()
    first = first_points(space, start)
    grid = space.grid(max(1, trials - len(first)))
    return [*first, *(point for point in grid if point not in first)]


def trials_in_the_end(
    study: optuna.Study, space: SearchSpace, sampler: SamplerName, trials: int, start: Point | None
) -> int:
    """How many finished trials a study will have, those of earlier runs included; arguments as above.

    The first points are tried even if the study has all its trials: with another start it is another comparison.
    """
    tried = [trial.params for trial in finished(study)]

    def with_all_of(points: Sequence[Point]) -> int:
        return len(tried) + sum(point not in tried for point in points)

    most = max(trials, with_all_of(first_points(space, start)))
    points = points_to_try(space, sampler, trials, start)
    return most if points is None else min(most, with_all_of(points))


class PointSampler(optuna.samplers.BaseSampler):
    """TPE, GP or a grid, after some points to begin with; each of finitely many points is tried at most once.

    TPE alone repeats itself there: of 50 draws from 64 points, a third to a half had been drawn before. Every trial
    draws from a seed of its own, so neither a resumed search nor one that joins it repeats a draw.

    Attributes
    ----------
    asked : list of dict
        Points of this run; those that failed are tried again by a later one.
    """

    def __init__(
        self, space: SearchSpace, name: SamplerName, trials: int, start: Point | None, seed: int
    ) -> None:
        self._space, self._name, self._seed = space, name, seed
        self._first = first_points(space, start)
        self._points = points_to_try(space, name, trials, start)
        self._inner: optuna.samplers.BaseSampler
        self.asked: list[Point] = []

    def has_more(self, study: optuna.Study) -> bool:
        """Whether there is a point left to try."""
        return self._points is None or bool(self._untried(study, self._points))

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start the random numbers of this trial."""
        (seed,) = np.random.SeedSequence((self._seed, trial.number)).generate_state(1)
        if self._name == "gp":
            self._inner = optuna.samplers.GPSampler(seed=int(seed))
        else:
            self._inner = optuna.samplers.TPESampler(seed=int(seed))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What the sampler proposes for one parameter."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Sample all parameters of a point together, if it is one of the first or there are finitely many."""
        if self._points is None and not self._untried(study, self._first):
            return self._inner.infer_relative_search_space(study, trial)
        return dict(self._space.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Point:
        """The first points, then what the sampler proposes, or the nearest one that was not tried."""
        first = self._untried(study, self._first)
        if first:
            return self._first[first[0]]
        if self._points is None:
            return self._inner.sample_relative(study, trial, search_space)
        untried = self._untried(study, self._points)
        if self._name == "grid":
            place = int(np.random.default_rng((self._seed, trial.number)).integers(max(1, len(untried))))
            return self._points[untried[place] if untried else 0]
        proposed = self._inner.sample_relative(study, trial, search_space)
        for name, distribution in search_space.items():
            if name not in proposed:
                proposed[name] = self.sample_independent(study, trial, name, distribution)
        wanted = self._points.index(proposed)
        return self._points[min(untried, key=lambda i: abs(i - wanted), default=wanted)]

    def _untried(self, study: optuna.Study, points: Sequence[Point]) -> list[int]:
        tried = [trial.params for trial in finished(study)] + self.asked
        return [i for i, point in enumerate(points) if point not in tried]
