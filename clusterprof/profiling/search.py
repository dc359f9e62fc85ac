"""Search: Optuna chooses num_block and theta of ClusterAttn on captured samples."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from clusterprof.errors import ClusterprofError, CompressionError, spares_the_run
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression, Window
from clusterprof.profile.fields import without_credentials
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores, mean_scores

NUM_BLOCK_RANGE = (1, 32)


@dataclass(frozen=True)
class SearchSpace:
    """Where to look: ClusterAttn at one size and window.

    Attributes
    ----------
    theta_range : (float, float)
        Searched on a log scale.
    """

    size: int
    window: Window
    theta_range: tuple[float, float]

    def compression(self, num_block: int, theta: float) -> Compression:
        """The candidate at a point."""
        return Compression(
            size=self.size, window=self.window, method=ClusterAttn(num_block=num_block, theta=theta)
        )


def theta_range(captures: Sequence[Capture], size: int) -> tuple[float, float]:
    """Range of theta in which ClusterAttn clusters and filters on these captures, the paper's default included.

    Centres are the peaks of blocks. Below the low end, nearly all of them survive: nothing is filtered. At
    the high end, the highest peak of one head in 20 is filtered too; such a head falls back to plain top-k,
    another method, from which the cosine cannot tell clustering (see docs/how-it-works.md). Ends are
    rounded outwards to one digit, so that they do not depend on the last bits of the captures.
    """
    default = ClusterAttn.paper_default(size)
    peaks, highest = [], []
    for capture in captures:
        block = max(1, (size - capture.window) // default.num_block)
        importance = capture.observation.importance
        peaks.append(torch.nn.functional.max_pool1d(importance, block, ceil_mode=True).flatten())
        highest.append(importance.amax(dim=-1).flatten())
    # torch's quantile takes no more than 16 million numbers, and many long prompts have more.
    low = float(np.quantile(torch.cat(peaks).double().numpy(), 0.05))
    high = float(np.quantile(torch.cat(highest).double().numpy(), 0.05))
    return _rounded(min(max(low, 1e-7), default.theta), math.floor), _rounded(
        min(max(high, default.theta), 1.0), math.ceil
    )


def _rounded(value: float, direction: Callable[[float], int]) -> float:
    digit = 10.0 ** math.floor(math.log10(value))
    return float(f"{direction(value / digit) * digit:.1e}")


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that have a value."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def open_study(name: str, storage: str, objective: ObjectiveName, fingerprint: str) -> optuna.Study:
    """Create a study or go on with it.

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
        known = study.user_attrs.get("fingerprint")
        is_new = (
            not study.get_trials(deepcopy=False) and study.direction.name.lower() == DIRECTIONS[objective]
        )
    except Exception as error:  # whatever the database driver raises
        reason = str(error).splitlines()[0]
        raise ClusterprofError(
            f"The study storage {shown} cannot be opened ({reason}); name another one with --storage."
        ) from error
    if known is None and is_new:
        study.set_user_attr("fingerprint", fingerprint)
    elif known != fingerprint:
        raise ClusterprofError(
            f"The study {name!r} in {shown} was made with another model, data, window, size, decode length or "
            "objective, so its trials cannot be continued; choose another name with --study."
        )
    return study


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
    """Run trials until the study has ``trials`` finished ones; the paper's values come first.

    Parameters
    ----------
    trials : int
        Finished trials of the study in the end, those of earlier runs included.
    timeout : float, optional
        Seconds after which no new trial starts.
    on_trial : callable
        Called after each trial, finished or failed.
    """
    default = ClusterAttn.paper_default(space.size)
    _enqueue(study, {"num_block": default.num_block, "theta": default.theta})
    # A resumed study must not draw the same start-up points again.
    draws = seed * 100_003 + len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=draws % 2**32)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    failures = 0
    while len(finished(study)) < trials and time.monotonic() < deadline:
        trial = study.ask()
        num_block = trial.suggest_int("num_block", *NUM_BLOCK_RANGE)
        theta = trial.suggest_float("theta", *space.theta_range, log=True)
        try:
            scores = mean_scores(evaluator.scores(space.compression(num_block, theta)))
            value = _checked(scores, objective)
        except Exception as error:
            if not spares_the_run(error):
                raise
            trial.set_user_attr("error", str(error))
            study.tell(trial, state=TrialState.FAIL)
            failures += 1
            if failures >= 3:
                raise ClusterprofError(f"Three trials in a row failed, the last one with: {error}") from error
        else:
            failures = 0
            for name in DIRECTIONS:
                trial.set_user_attr(name, scores[name])
            study.tell(trial, value)
        on_trial(study.get_trials(deepcopy=False)[trial.number])


def _enqueue(study: optuna.Study, params: dict[str, int | float]) -> None:
    """Let a point be the next to try, unless it has a value or waits already.

    Optuna's own `skip_if_exists` also counts the trial of a process that was killed in the middle of it.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    known = [trial.params for trial in finished(study)]
    known += [trial.system_attrs.get("fixed_params", {}) for trial in waiting]
    if params not in known:
        study.enqueue_trial(params)


def _checked(scores: Scores, objective: ObjectiveName) -> float:
    value = scores[objective]
    # Optuna would make +inf the best trial.
    if not math.isfinite(value):
        raise CompressionError(f"The objective {objective} is {value}.")
    return value
