"""Tune: data in, profiles out. Captures every prompt once, and at each size searches and judges on the captures."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from clusterprof.data import Dataset
from clusterprof.errors import ClusterprofError
from clusterprof.methods import METHODS, MethodConfig, default_method
from clusterprof.profile import Compression, DatasetRecord, ModelIdentity, Profile, Search
from clusterprof.profiling.choice import choose
from clusterprof.profiling.collect import Captured, capture_all
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.judge import Judgement, judge
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.per_layer import PerLayer, most_steps, search_per_layer
from clusterprof.profiling.record import dataset_record, environment_record, results_record
from clusterprof.profiling.samplers import finished, first_points, trials_in_the_end
from clusterprof.profiling.samples import Samples, draw_samples
from clusterprof.profiling.search import search
from clusterprof.profiling.settings import TuneListener, TuneSettings
from clusterprof.profiling.spaces import SearchSpace, search_space
from clusterprof.profiling.store import CaptureStore
from clusterprof.profiling.study import Studies
from clusterprof.profiling.target import TargetResult
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import plain_layers
from clusterprof.statistics import FEWEST_TO_TELL, Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a tuned method has to be no worse than, tuned itself.
_RIVAL = "snapkv"


@dataclass(frozen=True)
class SetAside:
    """Values that a search found best and that are not taken.

    Attributes
    ----------
    value : float
        Their objective on the tuning prompts.
    difference : Estimate
        Minus that of the values taken, prompt by prompt.
    """

    method: MethodConfig
    value: float
    difference: Estimate


@dataclass(frozen=True)
class TuneResult:
    """What a tune found at one size.

    Attributes
    ----------
    samples : dict of str to int
        Rows of the dataset; prompts sampled to tune on, of them fitting in the size, cut, dropped and used; and
        prompts that judged the result, 0 if it was judged on those it was tuned on.
    timings : dict of str to float
        Seconds of capture (shared by all sizes) and of search and judging, finished trials of the method, and
        replays of its and SnapKV's search, each of one sample.
    interrupted : bool
        The search was stopped by Ctrl-C; the result rests on the trials finished until then.
    set_aside : SetAside, optional
        What the search found best, where the tuning prompts do not show it to be better than what it began with.
    per_layer : PerLayer, optional
        What the search for other values in groups of layers found, if it was asked for.
    target : TargetResult, optional
        What the held-out prompts show of the goal, if there is one.
    """

    profile: Profile
    judgement: Judgement
    samples: dict[str, int]
    timings: dict[str, float]
    interrupted: bool
    set_aside: SetAside | None = None
    per_layer: PerLayer | None = None
    target: TargetResult | None = None


@dataclass(frozen=True)
class _Found:
    """What a search found: the point that is taken, and the study it is from."""

    best: Compression
    set_aside: SetAside | None
    space: SearchSpace
    study: optuna.Study
    interrupted: bool


def tune(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Dataset,
    settings: TuneSettings,
    *,
    cache_dir: Path,
    listener: TuneListener,
) -> Iterator[TuneResult]:
    """Find a method's parameters for a model and a dataset, at one size after the other, the smallest first.

    With a target the largest comes first, and none follows on one that is not shown to meet it.

    Captures and finished trials are kept in ``cache_dir``: a run that was interrupted goes on where it was.

    Yields
    ------
    TuneResult
        For each size as soon as it is there; after one that was interrupted there comes no other.

    Raises
    ------
    DataError
        If every prompt fits in a size, so there is nothing to compress, or too few are held out for the target.
    ClusterprofError
        If a library that the method needs is missing, no sample can be used at a size, or the study belongs to
        something else.
    """
    # Refuses a bad size or window before any work is done.
    for size in settings.sizes:
        default = default_method(settings.method, size)
        Compression(size=size, window=settings.window, method=default)
        default.check_installed()
    # And a model that cannot be compressed.
    plain_layers(decoder_of(model).config)
    samples = draw_samples(model, tokenizer, dataset, settings)
    # Built before the work, so that what a profile cannot hold is refused before it.
    identity = ModelIdentity.of(model, tokenizer)
    records = {
        size: dataset_record(dataset, samples, size=size, seed=settings.seed, tokens=settings.tokens)
        # A fixed sequence of tests, see Target: from the easiest down.
        for size in sorted(set(settings.sizes), reverse=settings.target is not None)
    }
    listener.prepared(samples)
    tuner = _Tuner(model, tokenizer, dataset, settings, identity, cache_dir, listener)
    yield from tuner.run(samples.longer_than(min(settings.sizes)), records)


@dataclass
class _Tuner:
    """One run of :func:`tune`."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    dataset: Dataset
    settings: TuneSettings
    identity: ModelIdentity
    cache_dir: Path
    listener: TuneListener

    def __post_init__(self) -> None:
        origin = Origin.of(self.model, self.tokenizer, decode_tokens=self.settings.decode_tokens)
        self.store = CaptureStore(self.cache_dir / "captures", origin, self.settings.capture_memory)
        self.studies = Studies(self.settings, self.dataset.name, origin, self.cache_dir)

    def run(self, samples: Samples, records: dict[int, DatasetRecord]) -> Iterator[TuneResult]:
        """Capture, and tune at the size of each record."""
        started = time.monotonic()
        captured = capture_all(
            self.model,
            self.tokenizer,
            [*samples.tuning, *samples.held_out],
            self.settings,
            self.store,
            self.listener,
            needs=METHODS[self.settings.method].needs,
        )
        capture_s = time.monotonic() - started
        if self.settings.study is not None:
            # Those of that name that are about something else are refused now, not after hours at other sizes.
            for size in records:
                self._check_studies(size, captured.usable(samples.tuning, size))
        for size, data in records.items():
            tuning, held_out = (captured.usable(part, size) for part in (samples.tuning, samples.held_out))
            for sample in (*tuning.dropped, *held_out.dropped):
                if sample not in captured.dropped:
                    self.listener.left_out(sample)
            result = self._tune(data, tuning, held_out, size, capture_s)
            yield result
            if result.interrupted or (result.target is not None and not result.target.met):
                return

    def _tune(
        self, data: DatasetRecord, tuning: Captured, held_out: Captured, size: int, capture_s: float
    ) -> TuneResult:
        if not tuning.captures:
            raise ClusterprofError(
                f"No sample can be used for --size {size}; the last one failed with: {tuning.dropped[-1].reason}"
            )
        if self.settings.per_layer and len(held_out.captures) < FEWEST_TO_TELL:
            raise ClusterprofError(
                f"Of the held-out samples {len(held_out.captures)} can be used for --size {size}, and it takes "
                f"{FEWEST_TO_TELL} to decide whether the values of --per-layer stay; the last one that cannot failed "
                f"with: {held_out.dropped[-1].reason}"
            )
        started = time.monotonic()
        evaluator = Evaluator(self.model, tuning.captures)
        rival = self._rival(size, tuning, evaluator)
        found = self._find(self.settings.method, size, tuning, evaluator, rival)
        per_layer, interrupted = self._per_layer(found, evaluator)
        judgement = judge(
            Evaluator(self.model, held_out.captures) if held_out.captures else evaluator,
            found.best,
            rival,
            None if per_layer is None else per_layer.best,
            held_out=bool(held_out.captures),
            objective=self.settings.objective,
            seed=self.settings.seed,
            listener=self.listener,
        )
        best = found.best.model_copy(update={"overrides": judgement.methods[0].overrides})
        search_s = time.monotonic() - started
        trials = len(finished(found.study))
        target = self.settings.target
        profile = Profile(
            schema_version=1,
            model=self.identity,
            dataset=data,
            compression=best,
            results=results_record(
                evaluator.scores(best), judgement, self.settings.objective, self.settings.seed
            ),
            search=self._search_record(found, trials, capture_s + search_s, tuning, held_out),
            environment=environment_record(self.model),
        )
        return TuneResult(
            profile=profile,
            judgement=judgement,
            samples={
                "dataset": data.rows,
                "sampled": len(data.sampled_ids),
                "fitting": data.prompts_fitting,
                "cut": data.prompts_cut,
                "dropped": len(tuning.dropped),
                "used": len(tuning.captures),
                "held_out": len(held_out.captures),
            },
            timings={
                "capture_s": round(capture_s, 3),
                "search_s": round(search_s, 3),
                "trials": trials,
                "replays": evaluator.replays,
            },
            interrupted=interrupted,
            set_aside=found.set_aside,
            per_layer=per_layer,
            target=None if target is None else target.check(judgement.tuned if judgement.held_out else ()),
        )

    def _check_studies(self, size: int, tuning: Captured) -> None:
        if tuning.captures:
            for method in dict.fromkeys((self.settings.method, _RIVAL)):
                self.studies.open(self._space(method, size, tuning), tuning.prompts)

    def _rival(self, size: int, tuning: Captured, evaluator: Evaluator) -> MethodConfig | None:
        """SnapKV as the same search finds it; None if it is what is tuned.

        Raises
        ------
        KeyboardInterrupt
            If Ctrl-C came: its trials are kept, and there is nothing to tell of the method itself yet.
        """
        if self.settings.method == _RIVAL:
            return None
        rival = self._find(_RIVAL, size, tuning, evaluator)
        if rival.interrupted:
            raise KeyboardInterrupt
        return rival.best.method

    def _per_layer(self, found: _Found, evaluator: Evaluator) -> tuple[PerLayer | None, bool]:
        """Other values in groups of layers, if they are asked for, and whether Ctrl-C has come by then."""
        if found.interrupted or not self.settings.per_layer:
            return None, found.interrupted
        # Those that were given up were not replayed on all samples.
        trials = found.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        points = [found.space.compression(trial.params) for trial in trials]
        self.listener.searching_per_layer(most_steps(points, len(evaluator.captures[0].layers)))
        try:
            per_layer = search_per_layer(
                evaluator,
                found.best,
                points,
                objective=self.settings.objective,
                on_step=self.listener.tried_per_layer,
                on_interrupt=self.listener.interrupting,
            )
        except KeyboardInterrupt:
            return None, True
        return per_layer, False

    def _find(
        self,
        method: str,
        size: int,
        tuning: Captured,
        evaluator: Evaluator,
        rival: MethodConfig | None = None,
    ) -> _Found:
        """Search a method's parameters, and say whether Ctrl-C ended it; what was finished by then counts.

        Where the method can do what its rival does, the search begins there, and ends there, too, or at the paper's
        values, unless it finds what is shown to be better.
        """
        settings = self.settings
        space = self._space(method, size, tuning)
        study = self.studies.open(space, tuning.prompts)
        start = None if rival is None else space.like(rival)
        self.listener.searching(
            size,
            method,
            study.study_name,
            self.studies.storage,
            len(finished(study)),
            trials_in_the_end(study, space, settings.sampler, settings.trials, start),
        )
        interrupted = False
        try:
            search(
                study,
                evaluator,
                space,
                sampler=settings.sampler,
                objective=settings.objective,
                trials=settings.trials,
                timeout=settings.timeout,
                seed=settings.seed,
                start=start,
                on_round=lambda tried: self.listener.tried(
                    tried, study.best_trial if finished(study) else None
                ),
                on_interrupt=self.listener.interrupting,
            )
        except KeyboardInterrupt:
            interrupted = True
            if not finished(study):
                raise
        if not finished(study):
            raise ClusterprofError(
                "No trial finished, so there is no profile; give the search a longer --timeout."
            )
        known = [] if start is None else first_points(space, start)
        taken, difference = choose(study, known, seed=settings.seed)
        set_aside = None
        if difference is not None:
            set_aside = SetAside(space.compression(study.best_params).method, study.best_value, difference)
        return _Found(space.compression(taken.params), set_aside, space, study, interrupted)

    def _space(self, method: str, size: int, tuning: Captured) -> SearchSpace:
        return search_space(method, tuning.captures, size, self.settings.window, self.settings.objective)

    def _search_record(
        self, found: _Found, trials: int, duration_s: float, tuning: Captured, held_out: Captured
    ) -> Search:
        return Search(
            sampler=self.settings.sampler if found.space.distributions else "none",
            trials=trials,
            seed=self.settings.seed,
            study=found.study.study_name,
            # The default one is in the user's own cache folder, whose path is nobody else's concern.
            storage=self.settings.storage,
            duration_s=round(duration_s, 3),
            objective=self.settings.objective,
            space=found.space.ranges(),
            decode_tokens=self.settings.decode_tokens,
            dropped_samples=(*tuning.dropped, *held_out.dropped),
        )
