"""`clusterprof eval perplexity` and `samples`: what becomes of the answers of any dataset."""

from typing import Annotated

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
    from clusterprof.evaluation.perplexity import PerplexityBenchmark, check_answers

    tasks = loaded_tasks(data, samples=samples, seed=options.seed, check=check_answers)
    run(
        options,
        Plan(PerplexityBenchmark(), entering(chosen, options.window), tasks, longest=max_tokens, whole=whole),
    )


@with_groups
def samples(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows.")] = 3,
    max_tokens: Longest = None,
    whole: Whole = False,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """Generated texts side by side: reference, full cache, each method at each size (Tables 13 to 15)."""
    from clusterprof.evaluation.generation import GenerationBenchmark, score_sample

    tasks = loaded_tasks(data, samples=samples, seed=options.seed)
    run(
        options,
        Plan(
            GenerationBenchmark("samples", score_sample),
            entering(chosen, options.window),
            tasks,
            longest=max_tokens,
            whole=whole,
        ),
    )
