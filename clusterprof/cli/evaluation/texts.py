"""`clusterprof eval perplexity` and `samples`: what becomes of the answers of any dataset."""

from typing import Annotated

from clusterprof.cli import _options as opt
from clusterprof.cli.evaluation._options import (
    GeneratedTokens,
    Longest,
    RunOptions,
    Whole,
    samples_option,
    with_run_options,
)
from clusterprof.cli.evaluation._run import Plan, loaded_tasks, run


@with_run_options
def perplexity(
    options: RunOptions,
    dataset: opt.DatasetName,
    tokens: GeneratedTokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows, instead of all.")] = None,
    max_tokens: Longest = None,
    whole: Whole = False,
) -> None:
    """Perplexity of the reference answers, given the compressed prompt (Table 3)."""
    from clusterprof.evaluation.perplexity import PerplexityBenchmark, check_answers

    tasks = loaded_tasks(
        dataset,
        tokens=tokens,
        data_dir=data_dir,
        templates=templates,
        samples=samples,
        seed=options.seed,
        check=check_answers,
    )
    run(options, Plan(PerplexityBenchmark(), tasks, longest=max_tokens, whole=whole))


@with_run_options
def samples(
    options: RunOptions,
    dataset: opt.DatasetName,
    tokens: GeneratedTokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows.")] = 3,
    max_tokens: Longest = None,
    whole: Whole = False,
) -> None:
    """Generated texts side by side: reference, full cache, each method at each size (Tables 13 to 15)."""
    from clusterprof.evaluation.generation import GenerationBenchmark, score_sample

    tasks = loaded_tasks(
        dataset, tokens=tokens, data_dir=data_dir, templates=templates, samples=samples, seed=options.seed
    )
    bench = GenerationBenchmark("samples", score_sample)
    run(options, Plan(bench, tasks, longest=max_tokens, whole=whole))
