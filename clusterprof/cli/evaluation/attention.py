"""`clusterprof eval fit`, `hit-rate` and `ablation`: attention over the compressed cache against the full one's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli.evaluation._options import GeneratedTokens, RunOptions, samples_option, with_run_options
from clusterprof.cli.evaluation._run import Plan, check_replayable, entering, loaded_tasks, run, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterprof.evaluation.run import Benchmark
    from clusterprof.evaluation.tasks import Entrant


@with_run_options
def fit(
    options: RunOptions,
    dataset: opt.DatasetName,
    tokens: GeneratedTokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows.")] = 10,
    decode_tokens: opt.DecodeTokens = 64,
) -> None:
    """Cosine of the attention per head, and divergence of the next token, for each method (Figure 6)."""
    from clusterprof.evaluation.captured import FitBenchmark

    bench, entrants = FitBenchmark("fit", {}), entering(options)
    check_replayable(entrants)
    _run(options, bench, dataset, tokens, data_dir, templates, samples, decode_tokens, entrants)


@with_run_options
def hit_rate(
    options: RunOptions,
    dataset: opt.DatasetName,
    tokens: GeneratedTokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows.")] = 5,
    decode_tokens: opt.DecodeTokens = 512,
) -> None:
    """How much of what the answer looks at, the window had looked at before, layer by layer (Figure 4)."""
    from clusterprof.evaluation.captured import HitRateBenchmark
    from clusterprof.evaluation.contestants import contestants
    from clusterprof.evaluation.tasks import entrants

    if options.window == "query":
        raise typer.BadParameter("hit-rate needs a number of tokens.", param_hint="--window")
    full = entrants(contestants([]), [], options.window)
    bench = HitRateBenchmark(options.window)
    _run(options, bench, dataset, tokens, data_dir, templates, samples, decode_tokens, full)


@with_run_options
def ablation(
    options: RunOptions,
    dataset: opt.DatasetName,
    tokens: GeneratedTokens = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows.")] = 10,
    decode_tokens: opt.DecodeTokens = 64,
) -> None:
    """ClusterAttn over theta and over num_block, and n-grams (Figures 12 and 13, Table 12)."""
    from clusterprof.evaluation.ablation import contestants
    from clusterprof.evaluation.captured import FitBenchmark
    from clusterprof.evaluation.tasks import entrants

    points = [it for size in sizes(options) for it in entrants(contestants(size), [size], options.window)]
    bench = FitBenchmark("ablation", {})
    _run(options, bench, dataset, tokens, data_dir, templates, samples, decode_tokens, points)


def _run(
    options: RunOptions,
    bench: "Benchmark",
    dataset: str,
    tokens: str | None,
    data_dir: Path | None,
    templates: Path | None,
    samples: int | None,
    decode_tokens: int,
    entrants: "Sequence[Entrant]",
) -> None:
    tasks = loaded_tasks(
        dataset,
        tokens=tokens,
        data_dir=data_dir,
        templates=templates,
        samples=samples,
        seed=options.seed,
        max_new_tokens=decode_tokens,
    )
    run(options, Plan(bench, tasks, decode_tokens=decode_tokens, entering=entrants))
