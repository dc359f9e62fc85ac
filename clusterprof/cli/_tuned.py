"""What a tune found at all its sizes together: tables and words, a plot, and the document of --json."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.cli._shell import as_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from clusterprof.profiling.settings import TuneSettings
    from clusterprof.profiling.target import Target, TargetResult
    from clusterprof.profiling.tune import SetAside, TuneResult


def size_of(result: "TuneResult") -> int:
    """Return the size that a result is of."""
    return result.profile.compression.size


def tests_of(results: "Sequence[TuneResult]") -> "dict[int, TargetResult]":
    """Return the target's test at each size; nothing without a target."""
    return {size_of(it): it.target for it in results if it.target is not None}


def conclude(
    results: "Sequence[TuneResult]", settings: "TuneSettings", sizes: Iterable[int], console: "Console"
) -> None:
    """Show the sizes together, which of them meets the target, and which are left."""
    from clusterprof.report.console import say
    from clusterprof.report.methods import sizes_table
    from clusterprof.report.target import target_table, target_verdict

    if len(results) > 1:
        console.print(sizes_table([(size_of(it), it.judgement) for it in results]))
    interrupted = any(it.interrupted for it in results)
    left = [size for size in sizes if size not in map(size_of, results)]
    tests = tests_of(results)
    # Ctrl-C or an error may have come first.
    too_small = [] if interrupted or all(test.met for test in tests.values()) else left
    if settings.target is not None:
        console.print(target_table(settings.target, tests))
        for sentence in target_verdict(settings.target, tests, too_small):
            say(console, sentence)
    if left and not too_small:
        say(console, f"Not tuned yet: size {', '.join(map(str, left))}.", style="yellow")


def draw(results: "Sequence[TuneResult]", settings: "TuneSettings", path: Path, console: "Console") -> None:
    """Write the plot of the sizes."""
    from clusterprof.report.charts import tuned_plot
    from clusterprof.report.console import say
    from clusterprof.report.figures import save_plot

    judgements = {size_of(it): it.judgement for it in results}
    save_plot(tuned_plot(judgements, settings.objective, settings.target, seed=settings.seed), path)
    say(console, f"Plot written to {path}")


def document(
    results: "Sequence[TuneResult]",
    settings: "TuneSettings",
    paths: Mapping[int, Path],
    failure: Exception | None,
) -> dict[str, Any]:
    """Return what --json says, and what came in between if not all sizes are there."""
    return {
        "profiles": [_entry(it, paths[size_of(it)]) for it in results],
        "target": None if settings.target is None else _target(settings.target, tests_of(results)),
        **({} if failure is None else {"error": as_sentence(failure)}),
    }


def _target(target: "Target", tests: "Mapping[int, TargetResult]") -> dict[str, Any]:
    from clusterprof.profiling.target import smallest_met

    return {
        **asdict(target),
        "sizes": [{"size": size, **asdict(test)} for size, test in tests.items()],
        "smallest_size": smallest_met(tests),
    }


def _set_aside(set_aside: "SetAside") -> dict[str, Any]:
    return {
        "method": set_aside.method.model_dump(),
        "tuning": set_aside.value,
        "difference": asdict(set_aside.difference),
    }


def _entry(result: "TuneResult", path: Path) -> dict[str, Any]:
    results = result.profile.results
    return {
        "profile": str(path),
        "best": {
            "method": result.profile.compression.method.model_dump(),
            "overrides": [override.model_dump() for override in result.profile.compression.overrides],
            "objective": results.tuning.objective,
            "tuning": results.tuning.value,
            "held_out": None if results.held_out is None else results.held_out.value,
        },
        "judged_on": "held out" if result.judgement.held_out else "tuning",
        "methods": [
            {
                "label": scored.label,
                "method": scored.method.model_dump() if scored.method else None,
                "overrides": [override.model_dump() for override in scored.overrides],
                **asdict(scored.scores),
                "difference": None if scored.behind is None else asdict(scored.behind),
            }
            for scored in result.judgement.methods
        ],
        "set_aside": None if result.set_aside is None else _set_aside(result.set_aside),
        "per_layer": None
        if result.per_layer is None
        else {"tried": result.per_layer.tried, "replays": result.per_layer.replays},
        "samples": result.samples,
        "timings": result.timings,
        "interrupted": result.interrupted,
    }
