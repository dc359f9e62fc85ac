"""Search: Optuna chooses a method's parameters on captured samples."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import wilcoxon

from clusterprof.errors import ClusterprofError, CompressionError, spares_the_run
from clusterprof.profile import Compression
from clusterprof.profile.fields import without_credentials
from clusterprof.profiling.choice import values_by_sample
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.interrupt import held_back_interrupt
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores, mean_scores
from clusterprof.profiling.origin import FOR_PEOPLE
from clusterprof.profiling.samplers import PointSampler, finished, first_points, trials_in_the_end
from clusterprof.profiling.settings import SamplerName
from clusterprof.profiling.spaces import Point, SearchSpace
from clusterprof.profiling.storage import open_storage, unusable

# Candidates that are tried together.
_ROUND = 4
# A candidate is given up where chance alone would put it as far behind with at most this probability: three samples,
# all of them worse. What other values cost and lose: benchmarks/giving_up.py.
SHOWN_WORSE = 1 / 8


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
    backend = open_storage(storage)
    try:
        study = optuna.create_study(
            study_name=name, storage=backend, direction=DIRECTIONS[objective], load_if_exists=True
        )
        known = study.user_attrs.get("made_with")
        is_new = (
            not study.get_trials(deepcopy=False) and study.direction.name.lower() == DIRECTIONS[objective]
        )
    except Exception as error:  # whatever the database driver raises
        raise unusable(storage, error) from error
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
    sampler: SamplerName,
    objective: ObjectiveName,
    trials: int,
    timeout: float | None,
    seed: int,
    on_round: Callable[[Sequence[FrozenTrial]], None],
    on_interrupt: Callable[[], None],
    start: Point | None = None,
) -> None:
    """Run trials until the study has ``trials`` finished ones, or one at each point of a finite space.

    The paper's values come first, then ``start``, whatever ``trials`` is. Candidates are tried in rounds, so that a
    capture is read once for all of a round. One that the samples so far show to be behind the best is given up; its
    trial is pruned. Ctrl-C ends the search when the round under way is over, a second one at once.

    Parameters
    ----------
    sampler : str
        "tpe", "gp" (Gaussian process) or "grid", which tries at most ``trials`` points at even distances in
        random order.
    trials : int
        Finished trials of the study in the end, those of earlier runs included.
    timeout : float, optional
        Seconds after which no new round starts.
    on_round : callable
        Called after each round with its trials, finished or failed.
    on_interrupt : callable
        Called when Ctrl-C comes.
    """
    choice = PointSampler(space, sampler, trials, start, seed)
    in_the_end = trials_in_the_end(study, space, sampler, trials, start)
    study.sampler = choice
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    failures: list[Exception] = []
    with held_back_interrupt(on_interrupt) as check_interrupt:
        while time.monotonic() < deadline:
            candidates: list[_Candidate] = []
            while len(candidates) < min(_ROUND, in_the_end - len(finished(study))) and choice.has_more(study):
                trial = study.ask(dict(space.distributions))
                choice.asked.append(trial.params)
                is_first = trial.params in first_points(space, start)
                candidates.append(_Candidate(trial, space.compression(trial.params), is_first))
            if not candidates:
                return
            # Optuna's GP learns nothing from a trial that was pruned, and would try the same again.
            known_best = None if sampler == "gp" or not finished(study) else study.best_trial
            best = None if known_best is None else values_by_sample(known_best)
            _evaluate(candidates, evaluator, objective, best)
            for candidate in candidates:
                candidate.tell(study, objective)
                failures = [*failures, candidate.error] if candidate.error else []
            known = study.get_trials(deepcopy=False)
            on_round([known[candidate.trial.number] for candidate in candidates])
            if len(failures) >= 3 or (failures and not (finished(study) or choice.has_more(study))):
                which = "All trials" if not finished(study) else f"{len(failures)} trials in a row"
                raise ClusterprofError(f"{which} failed, the last one with: {failures[-1]}") from failures[-1]
            check_interrupt()


@dataclass
class _Candidate:
    """A point that is being tried.

    Attributes
    ----------
    is_first : bool
        It is one that the result is held against, on all samples: it is not given up.
    scores : list of Scores
        Of the samples so far.
    given_up : bool
        They show that it is not the best.
    error : Exception, optional
        What ended it.
    """

    trial: optuna.Trial
    compression: Compression
    is_first: bool
    scores: list[Scores] = field(default_factory=list)
    given_up: bool = False
    error: Exception | None = None

    def tell(self, study: optuna.Study, objective: ObjectiveName) -> None:
        """Tell the study what came of it."""
        if self.error is not None:
            self.trial.set_user_attr("error", str(self.error))
            study.tell(self.trial, state=TrialState.FAIL)
            return
        for step, scores in enumerate(self.scores):
            self.trial.report(scores[objective], step)
        if self.given_up:
            study.tell(self.trial, state=TrialState.PRUNED)
            return
        mean = mean_scores(self.scores)
        for name in DIRECTIONS:
            self.trial.set_user_attr(name, mean[name])
        study.tell(self.trial, mean[objective])


def _evaluate(
    candidates: Sequence[_Candidate],
    evaluator: Evaluator,
    objective: ObjectiveName,
    best: Sequence[float] | None,
) -> None:
    for i in range(len(evaluator.captures)):
        left = [candidate for candidate in candidates if not (candidate.given_up or candidate.error)]
        if not left:
            return
        results: Sequence[Scores | Exception]
        try:
            results = evaluator.sample_scores(i, [candidate.compression for candidate in left])
        except Exception as error:
            if not spares_the_run(error):
                raise
            results = [error] * len(left)
        for candidate, result in zip(left, results, strict=True):
            if isinstance(result, Exception):
                candidate.error = result
            elif not math.isfinite(result[objective]):
                # Optuna would make +inf the best trial.
                candidate.error = CompressionError(f"The objective {objective} is {result[objective]}.")
            else:
                candidate.scores.append(result)
                if best is not None and not candidate.is_first and i + 1 < len(evaluator.captures):
                    values = [scores[objective] for scores in candidate.scores]
                    gains = np.subtract(values, best[: i + 1])
                    candidate.given_up = is_behind(gains if DIRECTIONS[objective] == "maximize" else -gains)


def is_behind(gains: NDArray[np.float64], chance: float = SHOWN_WORSE) -> bool:
    """Whether gains over the best on paired samples show that a candidate is worse (Wilcoxon's signed-rank test)."""
    # Optuna's WilcoxonPruner does not prune where the samples so far are easier than the rest.
    if len(gains) < 2 or not gains.any():
        return False
    return bool(wilcoxon(gains, alternative="less", zero_method="zsplit").pvalue <= chance)
