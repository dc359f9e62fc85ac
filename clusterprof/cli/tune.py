"""`clusterprof tune`: find a method's values for a model and a workload at each size, and write the profiles."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._data import load_rows
from clusterprof.cli._files import check_writable, plot_file
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import ModelChoice
from clusterprof.cli._shell import FAILED, UNMET, print_json
from clusterprof.cli._target import TargetOptions
from clusterprof.cli._tuned import conclude, document, draw, size_of, tests_of
from clusterprof.errors import ClusterprofError, ProfileError
from clusterprof.statistics import FEWEST_TO_TELL

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from clusterprof.data import Dataset
    from clusterprof.profile import Profile
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
    objective: opt.Objective = None,
    sampler: opt.Sampler = "tpe",
    per_layer: opt.PerLayer = False,
    trials: opt.Trials = 50,
    timeout: opt.Timeout = None,
    seed: opt.Seed = 0,
    capture_memory: opt.CaptureMemory = "20GiB",
    study: opt.Study = None,
    storage: opt.Storage = None,
    target: TargetOptions,
    output: opt.Output = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=plot_file,
            metavar="FILE",
            help="Draw what the held-out prompts show over the sizes into a .svg or .png file.",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Find a compression method's values for a model, a dataset and each size, and write the profiles."""
    from clusterprof.report.console import message_console, say

    sizes = sorted(set(sizes))
    if window != "query" and sizes[0] <= window:
        raise typer.BadParameter(f"{sizes[0]} is not above --window {window}.", param_hint="--size")
    if samples is not None and fraction is not None:
        raise typer.BadParameter("give --fraction or --samples, not both.", param_hint="--samples")
    if per_layer and holdout is not None and holdout < FEWEST_TO_TELL:
        raise typer.BadParameter(
            f"{FEWEST_TO_TELL} held-out prompts or more decide whether its values stay; raise --holdout from "
            f"{holdout}.",
            param_hint="--per-layer",
        )
    chosen_target = target.chosen()
    if chosen_target is not None and per_layer:
        raise typer.BadParameter(
            "--per-layer decides by the held-out prompts whether its values stay, so they cannot show a target "
            "as well; give one of the two.",
            param_hint="--target",
        )
    if chosen_target is not None and holdout is not None and holdout < chosen_target.prompts_needed:
        raise typer.BadParameter(
            f"it takes at least {chosen_target.prompts_needed} held-out prompts to show it for "
            f"{100 * chosen_target.share:g} % of prompts; raise --holdout from {holdout}, or lower --target-share.",
            param_hint="--target",
        )
    if output is not None:
        _check_output(output, sizes)
    load = partial(load_rows, dataset, tokens, seed, data_dir, templates)
    rows = load(None)
    console = message_console()
    say(console, f"Loading {model or 'the default model'}")

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
        fraction=fraction,
        samples=samples,
        holdout=holdout,
        seed=seed,
        objective=objective or (chosen_target.searched_by if chosen_target else TuneSettings.objective),
        capture_memory=capture_memory,
        study=study,
        storage=storage,
        tokens=tokens,
        per_layer=per_layer,
        target=chosen_target,
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
        _profile_at(path)
        # Written last, it would take the profile's place.
        if plot is not None and plot.resolve() == path.resolve():
            raise typer.BadParameter(
                f"{plot} is where the profile goes; name another file.", param_hint="--plot"
            )
    if storage is not None:
        open_storage(storage).remove_session()
    code = _tune(choice, rows, load, settings, paths, console, plot=plot, as_json=as_json)
    if code:
        raise typer.Exit(code)


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
    plot: Path | None,
    as_json: bool,
) -> int:
    """Tune, show, write the profiles; returns the exit code.

    What was finished is shown although an error comes after it.
    """
    from clusterprof.cache import cache_dir
    from clusterprof.profiling.target import smallest_met
    from clusterprof.report.progress import TuneProgress

    progress = TuneProgress(console, settings)
    results: list[TuneResult] = []
    failure: Exception | None = None
    try:
        for result in _run(choice, rows, load, settings, cache_dir(), progress, console):
            # Before the profile is written, so that a full disk does not take the numbers along.
            _report(result, settings, console)
            path = paths[size_of(result)]
            before = _profile_at(path)
            result.profile.save(path)
            results.append(result)
            _say_written(path, before, result.profile, console)
            if not as_json:
                typer.echo(path)
    except KeyboardInterrupt:
        failure = ClusterprofError(progress.interruption())
    except Exception as error:
        failure = error
    # With a target they come from the largest size down.
    results.sort(key=size_of)
    if results:
        conclude(results, settings, paths, console)
    if plot is not None and results:
        try:
            draw(results, settings, plot, console)
        except Exception as error:
            # What came first is what there is to mend first.
            failure = failure or error
    if as_json and results:
        print_json(document(results, settings, paths, failure))
    if failure is not None:
        raise failure
    if any(it.interrupted for it in results):
        return FAILED
    return UNMET if settings.target and smallest_met(tests_of(results)) is None else 0


def _profile_at(path: Path) -> "Profile | None":
    """The profile that a new one replaces; anything else is not replaced."""
    from clusterprof.profile import Profile

    if not path.exists():
        return None
    try:
        return Profile.load(path)
    except ProfileError as error:
        raise ClusterprofError(
            f"{path} is there and is no profile that this release can read, so it is not replaced; name another file "
            "with --output, or move it away."
        ) from error


def _say_written(path: Path, before: "Profile | None", profile: "Profile", console: "Console") -> None:
    from clusterprof.report.console import say
    from clusterprof.report.profiles import outcome

    # Of the same study it is the same search, gone on with.
    if before is not None and before.search.study != profile.search.study:
        say(
            console,
            f"{path} held the result of another search ({outcome(before)}); it is replaced",
            style="yellow",
        )
    say(console, f"Profile written to {path}; try it with")
    question = " --question TEXT" if profile.compression.window == "query" else ""
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
    from clusterprof.report.numbers import counted, window_text
    from clusterprof.report.target import target_text

    model, tokenizer = choice.load(console)
    if rows is None:
        say(console, "Generating prompts")
    dataset = rows or load(tokenizer)
    assert dataset is not None
    repeated = f", {dataset.duplicates} repeated ones left out" if dataset.duplicates else ""
    say(
        console,
        f"data     {dataset.name} from {dataset.source}: {counted(len(dataset.rows), 'row')}{repeated}",
    )
    say(console, f"method   {settings.method}")
    say(
        console,
        f"sizes    {', '.join(map(str, settings.sizes))} tokens kept per head, the prompt's "
        f"{window_text(settings.window)} included "
        "as the window; "
        f"up to {settings.decode_tokens} decoded tokens per prompt",
    )
    if settings.target is not None:
        order = "; the largest size is tuned first" if len(settings.sizes) > 1 else ""
        say(console, f"target   {target_text(settings.target)}{order}")
    with progress:
        yield from tune(model, tokenizer, dataset, settings, cache_dir=cache, listener=progress)


def _report(result: "TuneResult", settings: "TuneSettings", console: "Console") -> None:
    from clusterprof.report.console import say
    from clusterprof.report.methods import (
        differences_table,
        methods_table,
        per_layer_verdict,
        set_aside_verdict,
        verdict,
    )
    from clusterprof.report.numbers import counted

    judgement = result.judgement
    space = result.profile.search.space
    console.print(methods_table(judgement, size=result.profile.compression.size, space=space))
    console.print(differences_table(judgement, settings.objective))
    for sentence in verdict(judgement, space=space, objective=settings.objective):
        say(console, sentence)
    if result.set_aside is not None:
        say(
            console, set_aside_verdict(result.set_aside, judgement, space=space, objective=settings.objective)
        )
    if result.per_layer is not None:
        say(console, per_layer_verdict(judgement, result.per_layer, settings.objective))
    if result.interrupted:
        say(
            console,
            f"Interrupted: the result rests on the {counted(int(result.timings['trials']), 'trial')} finished by then; "
            "run the same command again to go on from there.",
            style="yellow",
        )
