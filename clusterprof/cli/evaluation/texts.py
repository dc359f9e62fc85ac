"""`clusterprof eval perplexity` and `samples`: what becomes of the answers of any dataset."""

from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._groups import with_groups
from clusterprof.cli.evaluation._options import (
    DataOptions,
    Longest,
    MethodOptions,
    RunOptions,
    Whole,
    samples_option,
)
from clusterprof.cli.evaluation._run import Plan, entering, loaded_tasks, run

if TYPE_CHECKING:
    from clusterprof.evaluation.tasks import Task, TaskMaker

DecodeTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=opt.MOST,
        help="Longest answer per prompt.",
        show_default="the row's own, or 64",
        rich_help_panel="Data",
    ),
]


@with_groups
def perplexity(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows, instead of all.")] = None,
    max_tokens: Longest = None,
    whole: Whole = False,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """Perplexity of the reference answers, given the compressed prompt (Table 3)."""
    from clusterprof.evaluation.perplexity import PerplexityBenchmark, check_answers, measurable

    answered = loaded_tasks(data, samples=samples, seed=options.seed, check=check_answers)

    def tasks(maker: "TaskMaker") -> "list[Task]":
        return measurable(answered(maker), maker)

    run(
        options,
        Plan(PerplexityBenchmark(), entering(chosen, options.window), tasks, longest=max_tokens, whole=whole),
    )


@with_groups
def samples(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows.")] = 3,
    decode_tokens: DecodeTokens = None,
    max_tokens: Longest = None,
    whole: Whole = False,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """Generated texts side by side: reference, full cache, each method at each size (Tables 13 to 15)."""
    from clusterprof.evaluation.generation import GenerationBenchmark, score_sample

    tasks = loaded_tasks(data, samples=samples, seed=options.seed, max_new_tokens=decode_tokens)
    # Answers of other lengths are not to be averaged with these.
    settings = {} if decode_tokens is None else {"decode_tokens": decode_tokens}
    run(
        options,
        Plan(
            GenerationBenchmark("samples", score_sample, settings),
            entering(chosen, options.window),
            tasks,
            longest=max_tokens,
            whole=whole,
        ),
    )
