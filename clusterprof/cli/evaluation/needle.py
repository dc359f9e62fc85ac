"""`clusterprof eval needle`: is a sentence hidden in a long text still found?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._groups import with_groups
from clusterprof.cli.evaluation._options import (
    MethodOptions,
    RunOptions,
    Tokens,
    numbers_of,
    samples_option,
)
from clusterprof.cli.evaluation._run import Plan, entering, run

if TYPE_CHECKING:
    from clusterprof.evaluation.tasks import Task, TaskMaker


@with_groups
def needle(
    *,
    tokens: Tokens = "1000,2000,4000",
    depths: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="Places of the needle, from the start to the end.", rich_help_panel="Data"
        ),
    ] = 9,
    samples: Annotated[int, samples_option("Prompts for each length and depth.")] = 1,
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="Text file to hide the needles in.",
            show_default="CPython's language reference",
            rich_help_panel="Data",
        ),
    ] = None,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """Needle in a haystack: lengths by depths, accuracy and ROUGE-1 (the paper's Figures 7 and 10)."""
    from clusterprof.evaluation.generation import GenerationBenchmark, score_needle

    lengths = numbers_of(tokens, "--tokens", lowest=opt.MIN_TOKENS)
    text = None if haystack is None else _read(haystack)

    def tasks(maker: "TaskMaker") -> "list[Task]":
        from clusterprof.evaluation.needle import needle_tasks

        return needle_tasks(
            maker, tokens=lengths, depths=depths, samples=samples, seed=options.seed, haystack=text
        )

    bench = GenerationBenchmark("needle", score_needle, {"numbers": "with or without thousands separators"})
    # Cut in the middle, a prompt may have lost its needle.
    run(options, Plan(bench, entering(chosen, options.window), tasks, whole=True))


def _read(path: Path) -> str:
    from clusterprof.cli._files import read_text

    return read_text(path, "haystack")
