"""`clusterprof eval clusters`: pictures of importance, centres and kept clusters, with the text under them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._files import folder_to_fill
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import ModelChoice
from clusterprof.cli.evaluation._options import DataOptions, numbers_of
from clusterprof.cli.evaluation._run import loaded_tasks, say_prompts
from clusterprof.errors import ClusterprofError, DataError

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session
    from clusterprof.evaluation.tasks import Task
    from clusterprof.methods import ClusterAttn
    from clusterprof.profile import Compression

_PICTURE = "Picture"
_HEADS, _RUNS, _CHARACTERS = 4, 6, 120


@with_groups
def clusters(
    *,
    data: DataOptions,
    size: Annotated[
        int | None,
        typer.Option(
            min=2, max=opt.MOST, help="Prompt tokens kept per head.", show_default="the profile's, or 256"
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A profile of ClusterAttn.", show_default="the paper's values"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Layers to draw.", show_default="three, evenly", rich_help_panel=_PICTURE
        ),
    ] = None,
    plot_format: Annotated[
        str, typer.Option("--format", help="svg or png.", rich_help_panel=_PICTURE)
    ] = "svg",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            callback=folder_to_fill,
            help="Folder for the pictures.",
            rich_help_panel=_PICTURE,
        ),
    ] = Path("clusters"),
    decode_tokens: opt.DecodeTokens = 64,
    capture_memory: opt.CaptureMemory = "20GiB",
    seed: opt.Seed = 0,
    model: opt.Model = None,
    running: opt.Running,
) -> None:
    """Draw one prompt's importance, centres and kept clusters per head, and their text (Figures 1, 3, 5)."""
    from clusterprof.report.console import message_console

    if plot_format not in ("svg", "png"):
        raise typer.BadParameter(f"{plot_format!r} is neither svg nor png.", param_hint="--format")
    compression = _compression(size, profile)
    drawn = None if layers is None else numbers_of(layers, "--layers", lowest=0)
    make = loaded_tasks(data, samples=1, seed=seed, max_new_tokens=decode_tokens)
    console = message_console()

    from clusterprof.cache import cache_dir
    from clusterprof.evaluation.session import Session
    from clusterprof.evaluation.tasks import TaskMaker
    from clusterprof.models import default_model

    choice = ModelChoice(model or default_model(), running)
    loaded, tokenizer = choice.load(console)
    session = Session.open(
        loaded, tokenizer, cache_dir(), decode_tokens=decode_tokens, capture_memory=capture_memory
    )
    maker = TaskMaker(loaded, tokenizer)
    (task,) = make(maker)
    say_prompts(maker, [task], console)
    if len(task.prompt.input_ids) <= compression.size:
        raise DataError(
            f"The prompt has {len(task.prompt.input_ids)} tokens and fits in size {compression.size}, so there are no "
            "clusters to draw; choose a smaller --size or a longer prompt."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterprofError(f"The folder {output} cannot be made: {error.strerror or error}.") from error
    for path in _draw(session, task, compression, drawn, output, plot_format):
        typer.echo(path)


def _compression(size: int | None, profile: Path | None) -> "Compression":
    from clusterprof.methods import ClusterAttn
    from clusterprof.profile import Compression, Profile

    if profile is None:
        chosen = size or 256
        return Compression(size=chosen, window=32, method=ClusterAttn.paper_default(chosen))
    tuned = Profile.load(profile).compression
    if not isinstance(tuned.method, ClusterAttn):
        raise typer.BadParameter(
            f"it is one of {tuned.method.name}, which has no clusters.", param_hint="--profile"
        )
    if size not in (None, tuned.size):
        raise typer.BadParameter(f"the profile's is {tuned.size}; leave it out.", param_hint="--size")
    return tuned


def _draw(
    session: "Session",
    task: "Task",
    compression: "Compression",
    layers: Sequence[int] | None,
    folder: Path,
    suffix: str,
) -> list[Path]:
    from clusterprof.evaluation.clusters import explain, texts
    from clusterprof.evaluation.decode_attention import full_attention_layer, summed_decode_attention
    from clusterprof.evaluation.pictures import draw_clusters, draw_decode_attention
    from clusterprof.evaluation.tasks import window_of

    capture = session.capture(task, window_of(compression, task.prompt))
    full = list(capture.layers)
    chosen = list(layers or dict.fromkeys(full[round(part * (len(full) - 1))] for part in (0.1, 0.5, 0.9)))
    paths = []
    for layer in chosen:
        method: ClusterAttn = compression.method_of(layer)  # type: ignore[assignment]
        count = full_attention_layer(capture, layer).importance.shape[0]
        heads = [
            explain(capture, method, compression.size, layer, head) for head in range(min(count, _HEADS))
        ]
        captions = []
        for head in heads:
            runs = head.strongest(_RUNS)
            found = texts(session.tokenizer, task.prompt.input_ids, runs, _CHARACTERS)
            captions.append(list(zip(runs, found, strict=True)))
        paths.append(folder / f"clusters-layer-{layer}.{suffix}")
        draw_clusters(heads, captions, paths[-1])
        paths.append(folder / f"decode-attention-layer-{layer}.{suffix}")
        draw_decode_attention(
            summed_decode_attention(capture, layer), layer, capture.tokens.shape[0] - 1, paths[-1]
        )
    return paths
