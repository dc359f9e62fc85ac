"""`clusterprof tune`: find a method's values for a model and a workload at each size, and write the profiles."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._data import load_rows
from clusterprof.cli._files import check_writable
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import ModelChoice
from clusterprof.cli._shell import FAILED, as_sentence, print_json
from clusterprof.errors import ClusterprofError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from clusterprof.data import Dataset
    from clusterprof.profiling.settings import TuneSettings
    from clusterprof.profiling.tune import TuneResult
    from clusterprof.report.progress import TuneProgress


@with_groups
def tune(
    *,
    dataset: opt.DatasetName,
    sizes: opt.Sizes,
    method: opt.Method = "clusterattn",
    model: opt.Model = None,
    running: opt.Running,
    tokens: opt.Tokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    fraction: opt.Fraction = None,
    samples: opt.Samples = None,
    holdout: opt.Holdout = None,
    window: opt.Window = 32,
    decode_tokens: opt.DecodeTokens = 64,
    objective: opt.Objective = "cosine",
    sampler: opt.Sampler = "tpe",
    per_layer: opt.PerLayer = False,
    trials: opt.Trials = 50,
    timeout: opt.Timeout = None,
    seed: opt.Seed = 0,
    capture_memory: opt.CaptureMemory = "20GiB",
    study: opt.Study = None,
    storage: opt.Storage = None,
    output: opt.Output = None,
    as_json: opt.Json = False,
) -> None:
    """Find a compression method's values for a model, a dataset and each size, and write the profiles."""
    from clusterprof.report.console import message_console, say
    from clusterprof.text import one_line

    sizes = sorted(set(sizes))
    if window != "query" and sizes[0] <= window:
        raise typer.BadParameter(f"{sizes[0]} is not above --window {window}.", param_hint="--size")
    if samples is not None and fraction is not None:
        raise typer.BadParameter("give --fraction or --samples, not both.", param_hint="--samples")
    if per_layer and holdout == 0:
        raise typer.BadParameter(
            "held-out prompts decide whether its values stay; raise --holdout.", param_hint="--per-layer"
        )
    if output is not None:
        _check_output(output, sizes)
    load = partial(load_rows, dataset, tokens, seed, data_dir, templates)
    rows = load(None)
    console = message_console()
    say(console, f"Loading {one_line(model or 'the default model')}")

    # From here on it takes seconds, for torch alone.
    from clusterprof.models import default_model
    from clusterprof.profile import profile_path
    from clusterprof.profiling.settings import TuneSettings
    from clusterprof.profiling.storage import open_storage

    settings = TuneSettings(
        sizes=tuple(sizes),
        method=method,
        window=window,
        decode_tokens=decode_tokens,
        sampler=sampler,
        trials=trials,
        timeout=timeout,
        fraction=0.2 if fraction is None else fraction,
        samples=samples,
        holdout=holdout,
        seed=seed,
        objective=objective,
        capture_memory=capture_memory,
        study=study,
        storage=storage,
        tokens=tokens,
        per_layer=per_layer,
    )
    choice = ModelChoice(model or default_model(), running)
    paths = {
        size: profile_path(choice.id.removeprefix("builtin:"), _short_name(dataset), size, method)
        for size in sizes
    }
    if output is not None:
        paths = {size: output / path.name if len(sizes) > 1 else output for size, path in paths.items()}
    for path in paths.values():
        check_writable(path)
    if storage is not None:
        open_storage(storage).remove_session()
    interrupted = _tune(choice, rows, load, settings, paths, console, as_json=as_json)
    if interrupted:
        raise typer.Exit(FAILED)


def _check_output(output: Path, sizes: Sequence[int]) -> None:
    """Refuse early what cannot hold the profiles: a folder for one, a file for several."""
    if len(sizes) == 1:
        check_writable(output)
    elif output.exists() and not output.is_dir():
        raise ClusterprofError(
            f"cannot write {len(sizes)} profiles to {output}: it is a file; name a folder with --output."
        )


def _tune(
    choice: ModelChoice,
    rows: "Dataset | None",
    load: "Callable[[PreTrainedTokenizerBase], Dataset | None]",
    settings: "TuneSettings",
    paths: Mapping[int, Path],
    console: "Console",
    *,
    as_json: bool,
) -> bool:
    """Tune, show, write the profiles; returns whether Ctrl-C cut the search short.

    What was finished is shown although an error comes after it.
    """
    from clusterprof.cache import cache_dir
    from clusterprof.report.console import say
    from clusterprof.report.methods import sizes_table
    from clusterprof.report.progress import TuneProgress

    progress = TuneProgress(console, settings)
    results: list[TuneResult] = []
    failure: Exception | None = None
    try:
        for result in _run(choice, rows, load, settings, cache_dir(), progress, console):
            # Before the profile is written, so that a full disk does not take the numbers along.
            _report(result, settings, console)
            path = paths[result.profile.compression.size]
            result.profile.save(path)
            results.append(result)
            _say_written(path, settings, console)
            if not as_json:
                typer.echo(path)
    except KeyboardInterrupt:
        failure = ClusterprofError(progress.interruption())
    except Exception as error:
        failure = error
    if len(results) > 1:
        console.print(sizes_table([(it.profile.compression.size, it.judgement) for it in results]))
    if as_json and results:
        document: dict[str, Any] = {
            "profiles": [_document(it, paths[it.profile.compression.size]) for it in results]
        }
        if failure is not None:
            document["error"] = as_sentence(failure)
        print_json(document)
    if failure is not None:
        raise failure
    interrupted = results[-1].interrupted
    left = [str(size) for size in paths if size > results[-1].profile.compression.size]
    if interrupted and left:
        say(console, f"Not tuned yet: size {', '.join(left)}.", style="yellow")
    return interrupted


def _say_written(path: Path, settings: "TuneSettings", console: "Console") -> None:
    from clusterprof.report.console import say

    say(console, f"Profile written to {path}; try it with")
    question = " --question TEXT" if settings.window == "query" else ""
    trial = f"apply --profile {shlex.quote(str(path))} --prompt-file PROMPT.txt{question} --compare"
    say(console, f"  clusterprof {trial}")


def _short_name(dataset: str) -> str:
    """A dataset's name as a part of a file name: of a local file, without folder and ending."""
    path = Path(dataset)
    return path.stem if path.is_file() else dataset


def _run(
    choice: ModelChoice,
    rows: "Dataset | None",
    load: "Callable[[PreTrainedTokenizerBase], Dataset | None]",
    settings: "TuneSettings",
    cache: Path,
    progress: "TuneProgress",
    console: "Console",
) -> "Iterator[TuneResult]":
    from clusterprof.profiling.tune import tune
    from clusterprof.report.console import say
    from clusterprof.report.numbers import window_text
    from clusterprof.text import one_line

    model, tokenizer = choice.load(console)
    if rows is None:
        say(console, "Generating prompts")
    dataset = rows or load(tokenizer)
    assert dataset is not None
    repeated = f", {dataset.duplicates} repeated ones left out" if dataset.duplicates else ""
    say(
        console,
        one_line(f"data     {dataset.name} from {dataset.source}: {len(dataset.rows)} rows{repeated}"),
    )
    say(console, f"method   {settings.method}")
    say(
        console,
        f"sizes    {', '.join(map(str, settings.sizes))} tokens kept per head, the prompt's "
        f"{window_text(settings.window)} included "
        "as the window; "
        f"up to {settings.decode_tokens} decoded tokens per prompt",
    )
    with progress:
        yield from tune(model, tokenizer, dataset, settings, cache_dir=cache, listener=progress)


def _report(result: "TuneResult", settings: "TuneSettings", console: "Console") -> None:
    from clusterprof.report.console import say
    from clusterprof.report.methods import differences_table, methods_table, per_layer_verdict, verdict

    judgement = result.judgement
    space = result.profile.search.space
    console.print(methods_table(judgement, size=result.profile.compression.size, space=space))
    console.print(differences_table(judgement, settings.objective))
    for sentence in verdict(judgement, space=space, objective=settings.objective):
        say(console, sentence)
    if result.per_layer is not None:
        say(console, per_layer_verdict(judgement, result.per_layer, settings.objective))
    if result.interrupted:
        say(
            console,
            f"Interrupted: the result rests on the {result.timings['trials']:,} trials finished by then; "
            "run the same command again to go on from there.",
            style="yellow",
        )


def _document(result: "TuneResult", path: Path) -> dict[str, Any]:
    results = result.profile.results
    return {
        "profile": str(path),
        "best": {
            "method": result.profile.compression.method.model_dump(),
            "overrides": [override.model_dump() for override in result.profile.compression.overrides],
            "objective": results.tuning.objective,
            "tuning": results.tuning.value,
            "held_out": None if results.held_out is None else results.held_out.value,
        },
        "judged_on": "held out" if result.judgement.held_out else "tuning",
        "methods": [
            {
                "label": scored.label,
                "method": scored.method.model_dump() if scored.method else None,
                "overrides": [override.model_dump() for override in scored.overrides],
                **asdict(scored.scores),
                "difference": None if scored.behind is None else asdict(scored.behind),
            }
            for scored in result.judgement.methods
        ],
        "per_layer": None
        if result.per_layer is None
        else {"tried": result.per_layer.tried, "replays": result.per_layer.replays},
        "samples": result.samples,
        "timings": result.timings,
        "interrupted": result.interrupted,
    }
