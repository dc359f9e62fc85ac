"""`clusterprof bench`: time and memory of a compressed cache against the full one and against the baselines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._files import plot_file
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import ModelChoice, profiles_model
from clusterprof.cli._shell import FAILED, print_json
from clusterprof.errors import ClusterprofError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from clusterprof.benchmarking.run import BenchReport
    from clusterprof.benchmarking.settings import BenchSettings
    from clusterprof.profile import Compression, LayerOverride, Profile

_PANEL = "Measurement"
_MOST = 10_000_000
_WINDOW = 32


def _memory_text(text: str | None) -> str | None:
    """Refuse what is no amount, and keep how it was written."""
    if text is None:
        return None
    opt.memory_bytes(text)
    return text.strip()


@with_groups
def bench(
    *,
    size: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=_MOST,
            help="Prompt tokens to keep per KV head, the window included.",
            show_default="the profile's",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Measure this profile's method, size and window.", show_default="ClusterAttn's default"
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=2,
            max=_MOST,
            help="Prompt length; repeat it for several.",
            show_default="4 times the size",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="Rows to decode at once; repeat it for several.",
            show_default="1",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    prefill_batch: Annotated[
        bool,
        typer.Option(
            "--prefill-batch",
            help="Read every row of a batch; otherwise one row is read, and repeated for larger batches.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    new_tokens: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Decode steps to time.", rich_help_panel=_PANEL)
    ] = 32,
    repeats: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Times to measure; medians count.", rich_help_panel=_PANEL),
    ] = 3,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="Observation window in tokens; with a profile whose window is the question, its length.",
            show_default=str(_WINDOW),
            rich_help_panel=_PANEL,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            callback=_memory_text,
            metavar="AMOUNT",
            help="Estimate what fits into so much, as 24GiB: weights W, and for B rows with prefill peak P and "
            "cache K each, W + B * max(P, K) read together, W + P + (B - 1) * K one by one.",
            show_default="the GPU's; none on a CPU",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=plot_file,
            metavar="FILE",
            help="Draw decode speed against prompt length into a .svg or .png file.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    model: opt.Model = None,
    running: opt.Running,
    as_json: opt.Json = False,
) -> None:
    """Measure prefill, decoding and memory: full cache, compressed cache, baselines at the same size."""
    from clusterprof.benchmarking.settings import BenchSettings
    from clusterprof.models import default_model
    from clusterprof.profile import Profile
    from clusterprof.report.console import message_console, say

    loaded = None if profile is None else Profile.load(profile)
    ours = _compression(size, window, loaded)
    settings = BenchSettings(
        tokens=tuple(sorted(set(tokens or [4 * ours.size]))),
        batch_sizes=tuple(sorted(set(batch_size or [1]))),
        new_tokens=new_tokens,
        repeats=repeats,
        prefill_batch=prefill_batch,
    )
    if settings.tokens[-1] <= ours.size:
        raise typer.BadParameter(
            f"every prompt fits in size {ours.size:,}, so nothing would be compressed; give a longer one.",
            param_hint="--tokens",
        )
    named = model if loaded is None else profiles_model(model, loaded)
    console = message_console()
    say(console, f"Loading {named or 'the default model'}")
    try:
        # From here on it takes seconds, for torch alone.
        choice = ModelChoice(named or default_model(), running)
        room = None if memory is None else opt.memory_bytes(memory)
        found = _measure(choice, loaded, ours, settings, room, console)
    except KeyboardInterrupt:
        raise ClusterprofError("Interrupted before anything was measured.") from None
    if as_json:
        print_json(found.document())
    else:
        _print(found, memory, _question(loaded, window))
    if plot is not None:
        _plot(found, plot, console)
    if found.interrupted:
        say(console, "Interrupted: this is what was measured until then.", style="yellow")
        raise typer.Exit(FAILED)


def _compression(size: int | None, window: int | None, profile: "Profile | None") -> "Compression":
    """What to compress to, with a window that is a number of tokens."""
    from clusterprof.methods import ClusterAttn
    from clusterprof.profile import Compression

    method, fixed = None, window
    overrides: tuple[LayerOverride, ...] = ()
    if profile is not None:
        tuned = profile.compression
        if size not in (None, tuned.size):
            raise typer.BadParameter(f"the profile's is {tuned.size}; leave it out.", param_hint="--size")
        size, method, overrides = tuned.size, tuned.method, tuned.overrides
        if tuned.window != "query":
            fixed = tuned.window
            if window not in (None, fixed):
                raise typer.BadParameter(f"the profile's is {fixed}; leave it out.", param_hint="--window")
    if size is None:
        raise typer.BadParameter("give a size, or a --profile.", param_hint="--size")
    fixed = fixed or _WINDOW
    if size <= fixed:
        raise typer.BadParameter(f"{size} is not above --window {fixed}.", param_hint="--size")
    method = method or ClusterAttn.paper_default(size)
    return Compression(size=size, window=fixed, method=method, overrides=overrides)


def _question(profile: "Profile | None", window: int | None) -> Literal["given", "assumed"] | None:
    """Where the window's length comes from, if the profile's window is the question."""
    if profile is None or profile.compression.window != "query":
        return None
    return "assumed" if window is None else "given"


def _measure(
    choice: ModelChoice,
    profile: "Profile | None",
    ours: "Compression",
    settings: "BenchSettings",
    memory: int | None,
    console: "Console",
) -> "BenchReport":
    from clusterprof.benchmarking.prompts import bench_prompts
    from clusterprof.benchmarking.run import run_bench
    from clusterprof.benchmarking.subjects import subjects
    from clusterprof.report.bench_progress import BenchProgress
    from clusterprof.report.console import say

    model, tokenizer = choice.load(console)
    if profile is not None:
        profile.check(model, tokenizer)
    _check_context(model, settings)
    for tokens in settings.tokens:
        if tokens <= ours.size:
            say(
                console,
                f"not compressed: prompts of {tokens:,} tokens fit in size {ours.size:,}",
                style="yellow",
            )
    prompts = bench_prompts(tokenizer, settings.rows, settings.tokens[-1]).to(model.device)
    compared = subjects(ours, tuned=profile is not None)
    with BenchProgress(console) as progress:
        found = run_bench(model, prompts, compared, settings, progress, tokenizer=tokenizer, memory=memory)
    if found.interrupted and not found.prefill:
        raise KeyboardInterrupt
    return found


def _check_context(model: "PreTrainedModel", settings: "BenchSettings") -> None:
    from clusterprof.models import describe_model

    context = describe_model(model).max_position_embeddings
    longest = settings.tokens[-1]
    if context is not None and settings.positions > context:
        raise DataError(
            f"A prompt of {longest:,} tokens and {settings.positions - longest:,} decoded after it are more than the "
            f"model's context of {context:,}; shorten --tokens or --new-tokens."
        )


def _print(found: "BenchReport", memory: str | None, question: Literal["given", "assumed"] | None) -> None:
    from clusterprof.report.bench import bench_notes, bench_tables
    from clusterprof.report.console import result_console, say

    console = result_console()
    for table in bench_tables(found, memory=memory):
        console.print(table)
    for sentence in bench_notes(found, memory=memory, question=question):
        say(console, sentence)


def _plot(found: "BenchReport", path: Path, console: "Console") -> None:
    from clusterprof.report.console import say

    if all(it.tokens_per_s is None for it in found.decode):
        say(console, "Nothing was decoded, so there is no plot.", style="yellow")
        return
    from clusterprof.report.plots import plot_decode_speed

    plot_decode_speed(found.decode, found.subjects, path)
    say(console, f"Plot written to {path}")
