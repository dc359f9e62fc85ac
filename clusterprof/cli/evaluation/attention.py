"""`clusterprof eval fit`, `hit-rate` and `ablation`: attention over the compressed cache against the full one's."""

from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._groups import with_groups
from clusterprof.cli.evaluation._options import (
    DataOptions,
    MethodOptions,
    RunOptions,
    Sizes,
    samples_option,
)
from clusterprof.cli.evaluation._run import Plan, check_replayable, entering, loaded_tasks, run, sizes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterprof.evaluation.run import Benchmark
    from clusterprof.evaluation.tasks import Entrant


@with_groups
def fit(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows.")] = 10,
    decode_tokens: opt.DecodeTokens = 64,
    capture_memory: opt.CaptureMemory = "20GiB",
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """Cosine of the attention per head, and divergence of the next token, for each method (Figure 6)."""
    from clusterprof.evaluation.captured import FitBenchmark

    entrants = entering(chosen, options.window)
    check_replayable(entrants)
    bench = FitBenchmark("fit", decode_tokens)
    _run(options, bench, data, samples, decode_tokens, capture_memory, entrants)


@with_groups
def hit_rate(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows.")] = 5,
    decode_tokens: opt.DecodeTokens = 512,
    capture_memory: opt.CaptureMemory = "20GiB",
    options: RunOptions,
) -> None:
    """How much of what the answer looks at, the window had looked at before, layer by layer (Figure 4)."""
    from clusterprof.evaluation.captured import HitRateBenchmark
    from clusterprof.evaluation.contestants import contestants
    from clusterprof.evaluation.tasks import entrants

    if options.window == "query":
        raise typer.BadParameter("hit-rate needs a number of tokens.", param_hint="--window")
    full = entrants(contestants([]), [], options.window)
    bench = HitRateBenchmark(options.window, decode_tokens)
    _run(options, bench, data, samples, decode_tokens, capture_memory, full)


@with_groups
def ablation(
    *,
    data: DataOptions,
    samples: Annotated[int | None, samples_option("Rows.")] = 10,
    decode_tokens: opt.DecodeTokens = 64,
    capture_memory: opt.CaptureMemory = "20GiB",
    sizes: Sizes = None,
    options: RunOptions,
) -> None:
    """ClusterAttn over theta and over num_block, and n-grams (Figures 12 and 13, Table 12)."""
    from clusterprof.evaluation.ablation import contestants
    from clusterprof.evaluation.captured import FitBenchmark
    from clusterprof.evaluation.tasks import entrants

    points = [it for size in sizes_of(sizes) for it in entrants(contestants(size), [size], options.window)]
    bench = FitBenchmark("ablation", decode_tokens)
    _run(options, bench, data, samples, decode_tokens, capture_memory, points)


def _run(
    options: RunOptions,
    bench: "Benchmark",
    data: DataOptions,
    samples: int | None,
    decode_tokens: int,
    capture_memory: int,
    entrants: "Sequence[Entrant]",
) -> None:
    tasks = loaded_tasks(data, samples=samples, seed=options.seed, max_new_tokens=decode_tokens)
    run(options, Plan(bench, entrants, tasks, decode_tokens=decode_tokens, capture_memory=capture_memory))
