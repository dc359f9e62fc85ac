"""Tune: data in, profile out. Captures every sample once, searches on the captures, and compares methods."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from filelock import FileLock

from clusterprof.data import Dataset, Prompt, sample_rows
from clusterprof.errors import ClusterprofError
from clusterprof.methods import METHODS, MethodConfig, default_method
from clusterprof.profile import Compression, ModelIdentity, Profile, Search
from clusterprof.profiling.capture_files import VERSION as CAPTURE_VERSION
from clusterprof.profiling.collect import build_prompts, capture_all, longer_than_size
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import VERSION as SCORES_VERSION
from clusterprof.profiling.objective import Scores, mean_scores
from clusterprof.profiling.origin import FOR_PEOPLE, Origin, hash_text
from clusterprof.profiling.record import MethodResult, dataset_record, environment_record, results_record
from clusterprof.profiling.search import finished, open_study, search
from clusterprof.profiling.settings import TuneListener, TuneSettings
from clusterprof.profiling.spaces import SearchSpace, search_space
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import plain_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# As tables call them.
_LABELS = {
    "clusterattn": "ClusterAttn",
    "snapkv": "SnapKV",
    "topk": "top-k",
    "streaming_llm": "StreamingLLM",
    "h2o": "H2O",
    "kmeans": "K-means",
    "dbscan": "DBSCAN",
    "ngram": "n-gram",
}
_BASELINES = ("clusterattn", "snapkv", "topk", "streaming_llm")


@dataclass
class TuneResult:
    """What a tune found.

    Attributes
    ----------
    interrupted : bool
        The search was stopped by Ctrl-C; the result rests on the trials finished until then.
    """

    profile: Profile
    methods: list[MethodResult]
    samples: dict[str, int]
    timings: dict[str, float]
    interrupted: bool


def tune(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    dataset: Dataset,
    settings: TuneSettings,
    *,
    cache_dir: Path,
    listener: TuneListener,
) -> TuneResult:
    """Find a method's parameters for a model, a dataset and a size.

    Captures and finished trials are kept in ``cache_dir``: a run that was interrupted goes on where it was.

    Raises
    ------
    DataError
        If every prompt fits in ``size``, so there is nothing to compress.
    ClusterprofError
        If a library that the method needs is missing, no sample can be captured, or the study belongs to
        something else.
    """
    # Refuses a bad size or window before any work is done.
    default = default_method(settings.method, settings.size)
    Compression(size=settings.size, window=settings.window, method=default)
    default.check_installed()
    # And a model that cannot be compressed.
    plain_layers(decoder_of(model).config)
    rows = sample_rows(dataset, fraction=settings.fraction, samples=settings.samples, seed=settings.seed)
    sampled = build_prompts(model, tokenizer, rows, settings)
    prompts = longer_than_size(sampled, dataset, settings, listener)
    # Built before the work, so that what a profile cannot hold is refused before it.
    identity = ModelIdentity.of(model, tokenizer)
    data = dataset_record(
        dataset,
        sampled,
        size=settings.size,
        fraction=settings.fraction if settings.samples is None else len(sampled) / len(dataset.rows),
        seed=settings.seed,
        tokens=settings.tokens,
    )

    started = time.monotonic()
    origin = Origin.of(model, tokenizer, decode_tokens=settings.decode_tokens)
    store = CaptureStore(cache_dir / "captures", origin, settings.capture_memory)
    captured = capture_all(
        model, tokenizer, prompts, settings, store, listener, needs=METHODS[settings.method].needs
    )
    capture_s = time.monotonic() - started

    evaluator = Evaluator(model, captured.captures)
    space = search_space(settings.method, captured.captures, settings.size, settings.window)
    study = _open_study(settings, dataset, captured.prompts, space, origin, cache_dir)
    points = space.points()
    listener.searching(
        study.study_name,
        _storage(settings, cache_dir),
        len(finished(study)),
        settings.trials if points is None else min(settings.trials, len(points)),
    )
    interrupted = _search(study, evaluator, space, settings, listener)
    best = space.compression(study.best_params)
    methods, tuned = _compare(evaluator, best, listener)
    search_s = time.monotonic() - started - capture_s

    trials = len(finished(study))
    return TuneResult(
        profile=Profile(
            schema_version=1,
            model=identity,
            dataset=data,
            compression=best,
            results=results_record(methods[1:], tuned, settings.objective, settings.seed),
            search=Search(
                sampler="tpe" if space.distributions else "none",
                trials=trials,
                seed=settings.seed,
                study=study.study_name,
                # The default one is in the user's own cache folder, whose path is nobody else's concern.
                storage=settings.storage,
                duration_s=round(capture_s + search_s, 3),
                objective=settings.objective,
                space=space.ranges(),
                decode_tokens=settings.decode_tokens,
                dropped_samples=tuple(captured.dropped),
            ),
            environment=environment_record(model),
        ),
        methods=methods,
        samples={
            "dataset": len(dataset.rows),
            "sampled": len(sampled),
            "fitting": len(sampled) - len(prompts),
            "cut": sum(prompt.tokens_cut > 0 for prompt in sampled),
            "dropped": len(captured.dropped),
            "used": len(captured.captures),
        },
        timings={
            "capture_s": round(capture_s, 3),
            "search_s": round(search_s, 3),
            "trials": trials,
            "replays": evaluator.replays,
        },
        interrupted=interrupted,
    )


def _open_study(
    settings: TuneSettings,
    dataset: Dataset,
    prompts: Sequence[Prompt],
    space: SearchSpace,
    origin: Origin,
    cache_dir: Path,
) -> optuna.Study:
    """Open the study of exactly this model, these prompts, this space and these settings."""
    made_with: dict[str, str | int] = {
        "method": settings.method,
        "method_version": METHODS[settings.method].version,
        "size": settings.size,
        "window": settings.window,
        "objective": settings.objective,
        "seed": settings.seed,
        "prompts": hash_text(repr([(prompt.input_ids, prompt.query_length) for prompt in prompts])),
        **{f"range_of_{name}": json.dumps(ends) for name, ends in space.ranges().items()},
        **asdict(origin),
        "version_of_captures": CAPTURE_VERSION,
        "version_of_scores": SCORES_VERSION,
    }
    compared = {part: value for part, value in made_with.items() if part not in FOR_PEOPLE}
    digest = hash_text(json.dumps(compared)).removeprefix("sha256:")
    method = "" if settings.method == "clusterattn" else f"-{settings.method}"
    default_name = f"{Path(dataset.name).stem}-{settings.size}{method}-{digest[:8]}"
    name = settings.study or default_name
    # Optuna tells about every study and trial on stderr; the listener does that here.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        # Two processes that create the tables of the same database at once get in each other's way.
        with FileLock(cache_dir / "studies.lock"):
            return open_study(name, _storage(settings, cache_dir), settings.objective, made_with)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _storage(settings: TuneSettings, cache_dir: Path) -> str:
    return settings.storage or f"sqlite:///{cache_dir / 'studies.db'}"


def _search(
    study: optuna.Study,
    evaluator: Evaluator,
    space: SearchSpace,
    settings: TuneSettings,
    listener: TuneListener,
) -> bool:
    """Run the search and say whether Ctrl-C ended it; what was finished by then counts."""
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
            on_trial=lambda trial: listener.tried(trial, study.best_trial if finished(study) else None),
        )
    except KeyboardInterrupt:
        interrupted = True
        if not finished(study):
            raise
    if not finished(study):
        raise ClusterprofError(
            "No trial finished, so there is no profile; give the search a longer --timeout."
        )
    return interrupted


def _compare(
    evaluator: Evaluator, best: Compression, listener: TuneListener
) -> tuple[list[MethodResult], list[Scores]]:
    """Score the tuned method and its baselines at the same size and window; the tuned one per sample too."""
    methods = _rows(best)
    listener.comparing(len(methods))
    per_sample = {}
    for label, method in methods.items():
        per_sample[label] = evaluator.scores(best.model_copy(update={"method": method}))
        listener.compared(label)
    results = [
        MethodResult(label, method, mean_scores(per_sample[label])) for label, method in methods.items()
    ]
    results.append(MethodResult("full", None, mean_scores(evaluator.full_scores())))
    return results, per_sample["tuned"]


def _rows(best: Compression) -> dict[str, MethodConfig]:
    """The methods of the table by label: the tuned one, its paper's default, and the other baselines."""
    name = best.method.name
    default = "paper default" if name == "clusterattn" else f"{_LABELS[name]} default"
    return {
        "tuned": best.method,
        default: default_method(name, best.size),
        **{_LABELS[other]: default_method(other, best.size) for other in _BASELINES if other != name},
    }
