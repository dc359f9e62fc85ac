"""Tune: data in, profiles out. Captures every prompt once, and at each size searches and judges on the captures."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from filelock import FileLock

from clusterprof.data import Dataset
from clusterprof.errors import ClusterprofError
from clusterprof.methods import METHODS, MethodConfig, default_method
from clusterprof.profile import Compression, DatasetRecord, ModelIdentity, Profile, Search
from clusterprof.profiling.capture_files import VERSION as CAPTURE_VERSION
from clusterprof.profiling.collect import Captured, capture_all
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.judge import Judgement, judge
from clusterprof.profiling.objective import VERSION as SCORES_VERSION
from clusterprof.profiling.origin import FOR_PEOPLE, Origin, hash_text
from clusterprof.profiling.record import dataset_record, environment_record, results_record
from clusterprof.profiling.samples import Samples, draw_samples
from clusterprof.profiling.search import finished, open_study, search
from clusterprof.profiling.settings import TuneListener, TuneSettings
from clusterprof.profiling.spaces import SearchSpace, search_space
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import plain_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a tuned method has to be no worse than, tuned itself.
_RIVAL = "snapkv"


@dataclass(frozen=True)
class TuneResult:
    """What a tune found at one size.

    Attributes
    ----------
    samples : dict of str to int
        Rows of the dataset; prompts sampled to tune on, of them fitting in the size, cut, dropped and used; and
        prompts that judged the result, 0 if it was judged on those it was tuned on.
    timings : dict of str to float
        Seconds of capture (shared by all sizes) and search, finished trials, and replays run.
    interrupted : bool
        A search was stopped by Ctrl-C; the result rests on the trials finished until then.
    """

    profile: Profile
    judgement: Judgement
    samples: dict[str, int]
    timings: dict[str, float]
    interrupted: bool


@dataclass(frozen=True)
class _Found:
    """What a search found: the best point, and the study it is from."""

    best: Compression
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

    Captures and finished trials are kept in ``cache_dir``: a run that was interrupted goes on where it was. After
    a result that was interrupted there comes no other.

    Raises
    ------
    DataError
        If every prompt fits in a size, so there is nothing to compress.
    ClusterprofError
        If a library that the method needs is missing, no sample can be captured, or the study belongs to
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
    longer = samples.longer_than(min(settings.sizes))
    listener.prepared(longer.tuning, longer.held_out, len(samples.tuning) - len(longer.tuning))
    # Built before the work, so that what a profile cannot hold is refused before it.
    identity = ModelIdentity.of(model, tokenizer)
    records = {
        size: dataset_record(dataset, samples, size=size, seed=settings.seed, tokens=settings.tokens)
        for size in sorted(set(settings.sizes))
    }
    tuner = _Tuner(model, tokenizer, dataset, settings, identity, cache_dir, listener)
    yield from tuner.run(longer, records)


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
        self.origin = Origin.of(self.model, self.tokenizer, decode_tokens=self.settings.decode_tokens)
        self.store = CaptureStore(self.cache_dir / "captures", self.origin, self.settings.capture_memory)

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
        for size, data in records.items():
            tuning, held_out = (captured.usable(part, size) for part in (samples.tuning, samples.held_out))
            result = self._tune(data, tuning, held_out, size, capture_s)
            yield result
            if result.interrupted:
                return

    def _tune(
        self, data: DatasetRecord, tuning: Captured, held_out: Captured, size: int, capture_s: float
    ) -> TuneResult:
        if not tuning.captures:
            raise ClusterprofError(
                f"No sample could be captured for --size {size}; the last one failed with: "
                f"{tuning.dropped[-1].reason}"
            )
        started = time.monotonic()
        evaluator = Evaluator(self.model, tuning.captures)
        found = self._find(self.settings.method, size, tuning, evaluator)
        rival, interrupted = self._rival(found, tuning, evaluator)
        seen = evaluator.scores(found.best)
        judging = Evaluator(self.model, held_out.captures) if held_out.captures else evaluator
        judgement = judge(
            judging,
            found.best,
            rival,
            held_out=judging is not evaluator,
            objective=self.settings.objective,
            seed=self.settings.seed,
            listener=self.listener,
        )
        search_s = time.monotonic() - started
        trials = len(finished(found.study))
        profile = Profile(
            schema_version=1,
            model=self.identity,
            dataset=data,
            compression=found.best,
            results=results_record(seen, judgement, self.settings.objective, self.settings.seed),
            search=self._search_record(found, trials, capture_s + search_s, tuning, held_out),
            environment=environment_record(self.model),
        )
        sampled = len(data.sampled_ids)
        return TuneResult(
            profile=profile,
            judgement=judgement,
            samples={
                "dataset": data.rows,
                "sampled": sampled,
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
        )

    def _rival(
        self, found: _Found, tuning: Captured, evaluator: Evaluator
    ) -> tuple[MethodConfig | None, bool]:
        """SnapKV as the same search finds it, and whether Ctrl-C came in between."""
        if found.interrupted or self.settings.method == _RIVAL:
            return None, found.interrupted
        rival = self._find(_RIVAL, found.best.size, tuning, evaluator)
        return (None, True) if rival.interrupted else (rival.best.method, False)

    def _find(self, method: str, size: int, tuning: Captured, evaluator: Evaluator) -> _Found:
        """Search a method's parameters, and say whether Ctrl-C ended it; what was finished by then counts."""
        settings = self.settings
        space = search_space(method, tuning.captures, size, settings.window, settings.objective)
        study = self._open_study(space, tuning)
        points = space.points()
        self.listener.searching(
            size,
            method,
            study.study_name,
            self._storage,
            len(finished(study)),
            settings.trials if points is None else min(settings.trials, len(points)),
        )
        interrupted = False
        try:
            search(
                study,
                evaluator,
                space,
                objective=settings.objective,
                trials=settings.trials,
                timeout=settings.timeout,
                seed=settings.seed,
                on_trial=lambda trial: self.listener.tried(
                    trial, study.best_trial if finished(study) else None
                ),
            )
        except KeyboardInterrupt:
            interrupted = True
            if not finished(study):
                raise
        if not finished(study):
            raise ClusterprofError(
                "No trial finished, so there is no profile; give the search a longer --timeout."
            )
        return _Found(space.compression(study.best_params), space, study, interrupted)

    def _open_study(self, space: SearchSpace, tuning: Captured) -> optuna.Study:
        """Open the study of exactly this model, these prompts, this space and these settings."""
        settings, method = self.settings, space.default.name
        prompts = [(prompt.input_ids, prompt.query_length) for prompt in tuning.prompts]
        made_with: dict[str, str | int] = {
            "method": method,
            "method_version": METHODS[method].version,
            "size": space.size,
            "window": settings.window,
            "objective": settings.objective,
            "seed": settings.seed,
            "prompts": hash_text(repr(prompts)),
            **{f"range_of_{name}": json.dumps(ends) for name, ends in space.ranges().items()},
            **asdict(self.origin),
            "version_of_captures": CAPTURE_VERSION,
            "version_of_scores": SCORES_VERSION,
        }
        compared = {part: value for part, value in made_with.items() if part not in FOR_PEOPLE}
        digest = hash_text(json.dumps(compared)).removeprefix("sha256:")
        suffix = "" if method == "clusterattn" else f"-{method}"
        name = f"{Path(self.dataset.name).stem}-{space.size}{suffix}-{digest[:8]}"
        if settings.study is not None:
            # A study of the user's name for each search of the run.
            name = settings.study if method == settings.method else f"{settings.study}{suffix}"
            name = name if len(settings.sizes) == 1 else f"{name}-{space.size}"
        # Optuna tells about every study and trial on stderr; the listener does that here.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            # Two processes that create the tables of the same database at once get in each other's way.
            with FileLock(self.cache_dir / "studies.lock"):
                return open_study(name, self._storage, settings.objective, made_with)
        finally:
            optuna.logging.set_verbosity(verbosity)

    @property
    def _storage(self) -> str:
        return self.settings.storage or f"sqlite:///{self.cache_dir / 'studies.db'}"

    def _search_record(
        self, found: _Found, trials: int, duration_s: float, tuning: Captured, held_out: Captured
    ) -> Search:
        return Search(
            sampler="tpe" if found.space.distributions else "none",
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
