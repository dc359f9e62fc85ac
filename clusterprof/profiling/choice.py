"""Choice: which of a search's trials has the values that a tune takes."""

from collections.abc import Sequence

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from clusterprof.profiling.spaces import Point
from clusterprof.statistics import Estimate, paired_difference


def choose(study: optuna.Study, known: Sequence[Point], *, seed: int) -> tuple[FrozenTrial, Estimate | None]:
    """Take the best trial, unless what was known before is as good as far as the samples show.

    The best of many candidates is so in part by luck; benchmarks/choosing.py measures what comes of it on others.

    Parameters
    ----------
    study : optuna.Study
        With at least one finished trial.
    known : sequence of dict
        Points that were known before the search; without any, the best trial is taken.
    seed : int
        Of the interval.

    Returns
    -------
    trial : FrozenTrial
        The best one, or the best of the points known before.
    difference : Estimate, optional
        In the latter case, the objective of the best minus that of the one taken, over the samples.
    """
    best = study.best_trial
    # Those that were given up are shown to be worse than another.
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    before = [trial for trial in complete if trial.params in known]
    if not before or best in before:
        return best, None
    least = study.direction is StudyDirection.MINIMIZE
    taken = (min if least else max)(before, key=lambda trial: trial.values[0])
    difference = paired_difference(values_by_sample(best), values_by_sample(taken), seed=seed)
    return (best, None) if difference.excludes_zero else (taken, difference)


def values_by_sample(trial: FrozenTrial) -> list[float]:
    """The objective on each sample that a trial was evaluated on."""
    return [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
