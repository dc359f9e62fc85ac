"""Samplers: which points of a search space a search tries, and in which order."""

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


def points_to_try(
    space: SearchSpace, sampler: SamplerName, trials: int, start: Point | None
) -> list[Point] | None:
    """All points that a search may try, or None if there are infinitely many; arguments as for
    :func:`clusterprof.profiling.search.search`.
    """
    if sampler != "grid":
        return space.points()
    first = [space.first] if start is None else [space.first, start]
    grid = space.grid(max(1, trials - len(first)))
    return [*first, *(point for point in grid if point not in first)]


class PointSampler(optuna.samplers.BaseSampler):
    """TPE, GP or a grid; where there are finitely many points, each of them is tried at most once.

    TPE alone repeats itself there: of 50 draws from 64 points, a third to a half had been drawn before. Every trial
    draws from a seed of its own, so neither a resumed search nor one that joins it repeats a draw.

    Attributes
    ----------
    asked : list of dict
        Points of this run; those that failed are tried again by a later one.
    """

    def __init__(self, space: SearchSpace, name: SamplerName, points: list[Point] | None, seed: int) -> None:
        self._space, self._name, self._points, self._seed = space, name, points, seed
        self._inner: optuna.samplers.BaseSampler
        self.asked: list[Point] = []

    def has_more(self, study: optuna.Study) -> bool:
        """Whether there is a point left to try."""
        return self._points is None or bool(self._untried(study))

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
        """Sample all parameters of a point together, if there are finitely many."""
        if self._points is None:
            return self._inner.infer_relative_search_space(study, trial)
        return dict(self._space.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Point:
        """The point that the sampler proposes, or the nearest one that was not tried."""
        if self._points is None:
            return self._inner.sample_relative(study, trial, search_space)
        untried = self._untried(study)
        if self._name == "grid":
            place = int(np.random.default_rng((self._seed, trial.number)).integers(max(1, len(untried))))
            return self._points[untried[place] if untried else 0]
        proposed = self._inner.sample_relative(study, trial, search_space)
        for name, distribution in search_space.items():
            if name not in proposed:
                proposed[name] = self.sample_independent(study, trial, name, distribution)
        wanted = self._points.index(proposed)
        return self._points[min(untried, key=lambda i: abs(i - wanted), default=wanted)]

    def _untried(self, study: optuna.Study) -> list[int]:
        tried = [trial.params for trial in finished(study)] + self.asked
        return [i for i, point in enumerate(self._points or []) if point not in tried]
