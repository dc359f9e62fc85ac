"""`clusterprof eval lines`: is one of many look-alike lines still found?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._groups import with_groups
from clusterprof.cli.evaluation._options import (
    Longest,
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
def lines(
    *,
    tokens: Tokens = "1000,2000,4000",
    file: Annotated[
        list[Path] | None,
        typer.Option(
            help="LongEval's own file, such as 200_lines.jsonl, instead of generated lines; repeat it for several.",
            rich_help_panel="Data",
        ),
    ] = None,
    samples: Annotated[int, samples_option("Prompts for each length or file, up to 40 generated ones.")] = 20,
    max_tokens: Longest = None,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """LongEval's line retrieval, generated or from its files (the paper's Figure 11)."""
    from clusterprof.evaluation.generation import GenerationBenchmark, score_lines
    from clusterprof.evaluation.lines import generated_lines, lines_of_files, load_longeval

    lengths = numbers_of(tokens, "--tokens", lowest=opt.MIN_TOKENS)
    files = [load_longeval(path) for path in file or []]

    def tasks(maker: "TaskMaker") -> "list[Task]":
        if files:
            return lines_of_files(maker, files, samples=samples, seed=options.seed)
        return generated_lines(maker, tokens=lengths, samples=samples, seed=options.seed)

    bench = GenerationBenchmark("lines", score_lines)
    run(options, Plan(bench, entering(chosen, options.window), tasks, longest=max_tokens, whole=True))
