"""The target of a tune in words: what each size's held-out prompts show, and which size is the answer."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.profiling.target import Target, TargetResult


def target_text(target: "Target") -> str:
    """Return a goal as "agreement of at least 0.95 for at least 80 % of prompts"."""
    which = "at most" if target.at_most else "at least"
    return f"{target.objective} of {which} {target.value} for at least {_percent(target.share)} of prompts"


def target_table(target: "Target", results: Mapping[int, "TargetResult"]) -> "Table":
    """Return, by size, how many held-out prompts meet the goal, and what that shows."""
    from rich.table import Table

    table = Table(title=f"target: {target_text(target)}", title_justify="left")
    table.add_column("size", justify="right")
    table.add_column("meet it", justify="right")
    table.add_column("share", justify="right")
    table.add_column("of all at least (95 %)", justify="right")
    table.add_column(f"shown for {_percent(target.share)}", justify="right")
    table.add_column("target is")
    for size, result in results.items():
        table.add_row(
            str(size),
            f"{result.meeting} of {result.prompts}",
            f"{100 * result.meeting / result.prompts:.0f} %" if result.prompts else "-",
            _bound(result.lower_bound),
            "-" if result.reached is None else f"{result.reached:.4f}",
            "met" if result.met else "not shown",
            style="green" if result.met else "",
        )
    return table


def target_verdict(
    target: "Target", results: Mapping[int, "TargetResult"], untested: Sequence[int]
) -> list[str]:
    """Say in a sentence each which size meets the goal, and why no smaller one does.

    Parameters
    ----------
    results : mapping of int to TargetResult
        By size, at least one.
    untested : sequence of int
        Sizes left out because a larger one failed.
    """
    from clusterprof.profiling.target import smallest_met

    best = smallest_met(results)
    sentences = []
    if best is None:
        size = max(results)
        largest = ", the largest" if len(results) + len(untested) > 1 else ""
        sentences.append(
            f"Target not shown to be met at size {size}{largest}: {_shown(target, results[size])}."
        )
        reached = results[size].reached
        if reached is not None:
            sentences.append(
                f"What {_percent(target.share)} of prompts are shown to reach there is {reached:.4f}."
            )
    else:
        sentences.append(f"Target met at size {best}: {_shown(target, results[best])}.")
        sentences += [
            f"It is not shown at size {size}: {_shown(target, result)}."
            for size, result in results.items()
            if size < best
        ]
    if untested:
        sentences.append(f"Not tuned, being smaller than that: size {', '.join(map(str, untested))}.")
    return sentences


def _shown(target: "Target", result: "TargetResult") -> str:
    if result.prompts < target.prompts_needed:
        return (
            f"only {result.prompts} of the held-out prompts could be used, and showing it takes "
            f"{target.prompts_needed}; raise --holdout"
        )
    relation = "at most" if target.at_most else "at least"
    return (
        f"{target.objective} is {relation} {target.value} for {result.meeting} of {result.prompts} held-out prompts, "
        f"so with 95 % confidence for at least {_bound(result.lower_bound)} of all prompts like them "
        f"({_percent(target.share)} asked for){_advice(target, result)}"
    )


def _advice(target: "Target", result: "TargetResult") -> str:
    # Of the prompts that there are, enough meet it.
    enough = result.meeting >= target.share * result.prompts
    return "; more of them may show it, see --holdout" if enough and not result.met else ""


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _bound(share: float) -> str:
    # Rounded down: a bound of 79.96 % is not one of 80 %.
    return f"{math.floor(1000 * share) / 10:.1f} %"
