"""Options that several benchmarks share, and how their lists are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterprof.cli import _options as opt

_RUN = "Run"
DEFAULT_METHODS = "clusterattn,snapkv,topk,streaming_llm,h2o"
DEFAULT_SIZES = "256,512,1024"


Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Prompt tokens kept per head; the profiles' own come on top.",
        show_default=f"{DEFAULT_SIZES}, or the profiles' own",
        rich_help_panel=_RUN,
    ),
]


@dataclass(frozen=True)
class MethodOptions:
    """What is compared."""

    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Methods with their papers' values, and profile files: clusterattn, snapkv, topk, streaming_llm, "
            "h2o, kmeans, dbscan, ngram, path/to/profile.json. The full cache always takes part. "
            "h2o+decode and streaming_llm+decode evict while decoding, too.",
            rich_help_panel=_RUN,
        ),
    ] = DEFAULT_METHODS
    sizes: Sizes = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is done, on which model, and where its results go."""

    window: opt.Window = 32
    seed: opt.Seed = 0
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File of results, JSON lines; one that is there is continued.",
            show_default="runs/BENCH-MODEL.jsonl, with a hash where the model's name does not fit a file",
            rich_help_panel=_RUN,
        ),
    ] = None
    model: opt.Model = None
    running: opt.Running
    as_json: opt.Json = False


def numbers_of(text: str, option: str, *, lowest: int) -> list[int]:
    """Return the whole numbers of a list such as "256,512", each once.

    Raises
    ------
    BadParameter
        If something else is in it.
    """
    found = []
    for part in names_of(text, option):
        if not part.isascii() or not part.isdigit() or not lowest <= int(part[:12]) <= opt.MOST:
            raise typer.BadParameter(
                f"{part!r} is not a whole number from {lowest} to {opt.MOST}.", param_hint=option
            )
        found.append(int(part))
    # "300" and "0300" are one.
    return list(dict.fromkeys(found))


def names_of(text: str, option: str) -> list[str]:
    """Return the parts of a list such as "a,b", each once.

    Raises
    ------
    BadParameter
        If one is empty.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise typer.BadParameter("it is a list such as a,b with nothing empty in it.", param_hint=option)
    return list(dict.fromkeys(parts))


Tokens = Annotated[str, typer.Option(metavar="N,N,...", help="Prompt lengths.", rich_help_panel="Data")]


@dataclass(frozen=True)
class DataOptions:
    """Which dataset's rows are measured."""

    dataset: opt.DatasetName
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths of generated prompts.",
            show_default="2000",
            rich_help_panel="Data",
        ),
    ] = None
    data_dir: opt.DataDir = None
    templates: opt.Templates = None


Longest = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=16,
        max=opt.MOST,
        help="Longest prompt; longer ones lose their middle.",
        show_default="the model's context",
        rich_help_panel="Data",
    ),
]
Whole = Annotated[
    bool,
    typer.Option("--whole", help="Leave out prompts that would lose their middle.", rich_help_panel="Data"),
]


def samples_option(text: str) -> Any:
    """An option for how many prompts are measured."""
    return typer.Option(min=1, max=opt.MOST, help=text, rich_help_panel="Data")
