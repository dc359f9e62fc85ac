"""Search: Optuna chooses a method's parameters on captured samples."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from clusterprof.errors import ClusterprofError, CompressionError, spares_the_run
from clusterprof.profile.fields import without_credentials
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.interrupt import held_back_interrupt
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores, mean_scores
from clusterprof.profiling.origin import FOR_PEOPLE
from clusterprof.profiling.spaces import Point, SearchSpace


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that have a value."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def open_study(
    name: str, storage: str, objective: ObjectiveName, made_with: Mapping[str, str | int]
) -> optuna.Study:
    """Create a study or go on with it.

    Parameters
    ----------
    made_with : mapping of str to str or int
        All that the values of its trials depend on, in parts; kept as the study's user attribute of that name.

    Raises
    ------
    ClusterprofError
        If the storage cannot be opened, or the study of that name is about something else.
    """
    # A password in the URL is for the database, not for messages.
    shown = without_credentials(storage)
    try:
        connect_args = {"timeout": 60} if storage.startswith("sqlite") else {}
        backend = optuna.storages.RDBStorage(storage, engine_kwargs={"connect_args": connect_args})
        study = optuna.create_study(
            study_name=name, storage=backend, direction=DIRECTIONS[objective], load_if_exists=True
        )
        known = study.user_attrs.get("made_with")
        is_new = (
            not study.get_trials(deepcopy=False) and study.direction.name.lower() == DIRECTIONS[objective]
        )
    except Exception as error:  # whatever the database driver raises
        reason = str(error).splitlines()[0]
        raise ClusterprofError(
            f"The study storage {shown} cannot be opened ({reason}); name another one with --storage."
        ) from error
    if known is None and is_new:
        study.set_user_attr("made_with", dict(made_with))
        return study
    if not isinstance(known, dict):
        raise ClusterprofError(
            f"The study {name!r} in {shown} does not say what it was made with (another program made it, or another "
            "version of this one), so its trials cannot be continued; choose another name with --study."
        )
    differences = what_differs(known, made_with)
    if differences:
        raise ClusterprofError(
            f"The study {name!r} in {shown} was made with {'; '.join(differences)}, so its trials cannot be "
            "continued; choose another name with --study."
        )
    return study


def what_differs(known: Mapping[str, object], now: Mapping[str, str | int]) -> list[str]:
    """What a study was made with and is not so now, such as "window 32, now 64" and "other prompts"."""
    # Whatever it is called.
    same_model = known.get("weights") == now.get("weights")
    differences = []
    for part in {**now, **known}:
        before, after = known.get(part, "none"), now.get(part, "none")
        if before != after and not (same_model and part in FOR_PEOPLE):
            name = part.replace("_", " ")
            hashed = str(after).startswith("sha256:")
            differences.append(f"other {name}" if hashed else f"{name} {before}, now {after}")
    return differences


def search(
    study: optuna.Study,
    evaluator: Evaluator,
    space: SearchSpace,
    *,
    objective: ObjectiveName,
    trials: int,
    timeout: float | None,
    seed: int,
    on_trial: Callable[[FrozenTrial], None],
) -> None:
    """Run trials until the study has ``trials`` finished ones, or one at each point of a finite space.

    The paper's values come first. Ctrl-C ends it when the trial under way is over, a second one at once.

    Parameters
    ----------
    trials : int
        Finished trials of the study in the end, those of earlier runs included.
    timeout : float, optional
        Seconds after which no new trial starts.
    on_trial : callable
        Called after each trial, finished or failed.
    """
    _enqueue(study, space.first)
    sampler = _UntriedPoints(space, seed)
    study.sampler = sampler
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    failures = 0
    with held_back_interrupt() as check_interrupt:
        while len(finished(study)) < trials and sampler.has_more(study) and time.monotonic() < deadline:
            trial = study.ask(dict(space.distributions))
            try:
                scores = mean_scores(evaluator.scores(space.compression(trial.params)))
                value = _checked(scores, objective)
            except Exception as error:
                if not spares_the_run(error):
                    raise
                trial.set_user_attr("error", str(error))
                study.tell(trial, state=TrialState.FAIL)
                sampler.failed.append(trial.params)
                failures += 1
                if failures >= 3 or not (finished(study) or sampler.has_more(study)):
                    which = "Three trials in a row" if failures >= 3 else "All trials"
                    raise ClusterprofError(f"{which} failed, the last one with: {error}") from error
            else:
                failures = 0
                for name in DIRECTIONS:
                    trial.set_user_attr(name, scores[name])
                study.tell(trial, value)
            on_trial(study.get_trials(deepcopy=False)[trial.number])
            check_interrupt()


class _UntriedPoints(optuna.samplers.BaseSampler):
    """TPE that, where a space has finitely many points, tries each of them at most once.

    TPE alone repeats itself there: of 50 draws from 64 points, a third to a half had been drawn before. Every trial
    draws from a seed of its own, so neither a resumed search nor one that joins it repeats a draw.

    Attributes
    ----------
    failed : list of dict
        Points that this run cannot evaluate; a later one tries them again.
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._space, self._points, self._seed = space, space.points(), seed
        self._tpe: optuna.samplers.TPESampler
        self.failed: list[Point] = []

    def has_more(self, study: optuna.Study) -> bool:
        """Whether there is a point left to try."""
        return self._points is None or bool(self._untried(study))

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start the random numbers of this trial."""
        (seed,) = np.random.SeedSequence((self._seed, trial.number)).generate_state(1)
        self._tpe = optuna.samplers.TPESampler(seed=int(seed))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What TPE proposes."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Sample all parameters of a point together, if there are finitely many."""
        return {} if self._points is None else dict(self._space.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Point:
        """The point that TPE proposes, or the nearest one that was not tried."""
        if self._points is None:
            return {}
        proposed = {
            name: self.sample_independent(study, trial, name, distribution)
            for name, distribution in search_space.items()
        }
        wanted = self._points.index(proposed)
        return self._points[min(self._untried(study), key=lambda i: abs(i - wanted), default=wanted)]

    def _untried(self, study: optuna.Study) -> list[int]:
        tried = [trial.params for trial in finished(study)] + self.failed
        return [i for i, point in enumerate(self._points or []) if point not in tried]


def _enqueue(study: optuna.Study, point: Point) -> None:
    """Let a point be the next to try, unless it has a value or waits already.

    Optuna's own `skip_if_exists` also counts the trial of a process that was killed in the middle of it.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    known = [trial.params for trial in finished(study)]
    known += [trial.system_attrs.get("fixed_params", {}) for trial in waiting]
    if point not in known:
        study.enqueue_trial(point)


def _checked(scores: Scores, objective: ObjectiveName) -> float:
    value = scores[objective]
    # Optuna would make +inf the best trial.
    if not math.isfinite(value):
        raise CompressionError(f"The objective {objective} is {value}.")
    return value
