"""The tables that compare methods at the same size, and what they say about the tuned one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterprof.profiling.objective import DIRECTIONS, OF_ATTENTION, ObjectiveName
from clusterprof.report.numbers import HOLD_OUT_MORE, counted, listed, overrides_text, parameters_text
from clusterprof.statistics import FEWEST_TO_TELL

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.profiling.judge import Judgement, MethodResult
    from clusterprof.profiling.per_layer import PerLayer
    from clusterprof.profiling.tune import SetAside
    from clusterprof.statistics import Estimate

# Objective and heading; what is left out would make the table wider than 80 columns.
_COLUMNS: Mapping[ObjectiveName, str] = {
    "log_kl": "log KL",
    "kl": "KL",
    "agreement": "agree",
    "loss": "loss",
    "cosine": "cosine",
    "attention_output": "output",
}
# As many digits as the table shows; less of a difference is none.
_DIGITS = 4


def methods_table(judgement: "Judgement", *, size: int, space: Mapping[str, object]) -> "Table":
    """Return the table of all methods, the best of each column in bold, the full cache not counted.

    Parameters
    ----------
    size : int
        Prompt tokens kept per KV head.
    space : mapping
        By name of each parameter that the search chose.
    """
    from rich.table import Table
    from rich.text import Text

    results = judgement.methods
    title = f"{size} tokens kept per head, {_prompts(judgement, space)}"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for name, heading in _COLUMNS.items():
        table.add_column(f"{heading} {'↑' if _more_is_better(name) else '↓'}", justify="right")
    best = {name: _best(results, name) for name in _COLUMNS}
    for result in results:
        scores = asdict(result.scores)
        cells = [Text(result.label)]
        for name in _COLUMNS:
            shown = f"{scores[name]:.{_DIGITS}f}"
            wins = result.method is not None and shown == best[name]
            cells.append(Text(shown, style="bold green" if wins else ""))
        table.add_row(*cells)
    return table


def _more_is_better(objective: ObjectiveName) -> bool:
    return DIRECTIONS[objective] == "maximize"


def _best(results: Sequence["MethodResult"], objective: ObjectiveName) -> str:
    values = [asdict(result.scores)[objective] for result in results if result.method is not None]
    return f"{(max if _more_is_better(objective) else min)(values):.{_DIGITS}f}"


def differences_table(judgement: "Judgement", objective: "ObjectiveName") -> "Table":
    """Return what the tuned method is ahead or behind of each other one, with its interval and what that shows."""
    from rich.table import Table
    from rich.text import Text

    better = "higher" if _more_is_better(objective) else "lower"
    table = Table(
        title=f"{objective}, tuned minus other ({better} is better)",
        title_justify="left",
    )
    table.add_column("against")
    table.add_column("difference", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("tuned is")
    for result in judgement.methods:
        if result.behind is not None:
            shown = _shown(result.behind, objective)
            interval = _interval(result.behind)
            style = {"better": "green", "worse": "red"}.get(shown, "")
            table.add_row(
                Text(result.label), f"{result.behind.mean:+.4f}", interval, Text(shown, style=style)
            )
    return table


def sizes_table(judgements: Sequence[tuple[int, "Judgement"]]) -> "Table":
    """Return what the tuned method keeps of the full run at each size."""
    from rich.table import Table

    table = Table(title="tuned, by size", title_justify="left")
    table.add_column("size", justify="right")
    for name, heading in _COLUMNS.items():
        table.add_column(f"{heading} {'↑' if _more_is_better(name) else '↓'}", justify="right")
    for size, judgement in judgements:
        scores = asdict(judgement.methods[0].scores)
        table.add_row(str(size), *(f"{scores[name]:.{_DIGITS}f}" for name in _COLUMNS))
    return table


def _prompts(judgement: "Judgement", space: Mapping[str, object]) -> str:
    seen = " not tuned on" if judgement.held_out else " it was tuned on" if space else ""
    return counted(len(judgement.tuned), "prompt") + seen


def _interval(behind: "Estimate") -> str:
    if behind.low is None or behind.high is None:
        return "too few prompts"
    return f"{behind.low:+.4f} to {behind.high:+.4f}"


def _shown(behind: "Estimate", objective: ObjectiveName) -> str:
    """What a difference shows: nothing, if its interval reaches zero or cannot be given."""
    if behind.samples < FEWEST_TO_TELL:
        return "not known"
    if not behind.excludes_zero:
        return "not shown to differ"
    return "better" if (behind.mean > 0) == _more_is_better(objective) else "worse"


def verdict(judgement: "Judgement", *, space: Mapping[str, object], objective: "ObjectiveName") -> list[str]:
    """Say in a sentence each what the tuned method is worth.

    Parameters
    ----------
    judgement : Judgement
        Of all methods on the same prompts.
    space : mapping
        By name of each parameter that the search chose.
    objective : str
        What the search optimised.
    """
    tuned, default, *others = judgement.methods
    name = default.label.removesuffix(" default")
    if not space:
        return [f"{name} has nothing to tune; the profile holds it as it is."]
    owner = "the paper's default" if name == "paper" else f"{name}'s default"
    sentences = [_against_default(judgement, owner, space, objective)]
    if not judgement.held_out:
        sentences.append(
            "No prompt was held out, so this says how well the search did, not how well the profile will do on others."
        )
    count = len(judgement.tuned)
    if count < FEWEST_TO_TELL:
        sentences.append(f"There are few prompts to judge by ({count}); {HOLD_OUT_MORE}")
    # A kept set that is known is looked up, so that equal ones have equal scores to the last digit.
    same = [other.label for other in others if other.method and other.per_prompt == tuned.per_prompt]
    if same:
        sentences.append(f"On these prompts it keeps the same tokens as {listed(same)}.")
    # The cosine cannot compare methods, only points within one; the divergence of the next token can.
    if objective not in OF_ATTENTION:
        sentences += [_beaten(other, objective) for other in others if _is_better(other, objective)]
    candidates = {owner: default, **{other.label: other for other in others if other.method}}
    ahead = [label for label, result in candidates.items() if _kl(result) < _kl(tuned)]
    if ahead:
        verb = "keeps" if len(ahead) == 1 else "keep"
        sentences.append(
            f"On these prompts {listed(ahead)} {verb} the next token closer to the full cache's (KL)."
        )
    return sentences


def _is_better(other: "MethodResult", objective: "ObjectiveName") -> bool:
    behind = other.behind
    return other.method is not None and behind is not None and _shown(behind, objective) == "worse"


def _beaten(other: "MethodResult", objective: "ObjectiveName") -> str:
    assert other.method is not None
    from clusterprof.profiling.judge import TUNED_SNAPKV

    said = f"{other.label} is shown to be better on {objective} than the tuned values"
    # A search leaves a method's default behind, unless there is nothing to search.
    found_again = other.label == TUNED_SNAPKV or not other.method.model_dump(exclude={"name"})
    return f"{said}; --method {other.method.name} makes a profile of it." if found_again else f"{said}."


def set_aside_verdict(
    set_aside: "SetAside",
    judgement: "Judgement",
    *,
    space: Mapping[str, object],
    objective: "ObjectiveName",
) -> str:
    """Say in a sentence why the values that a search found best are not those of the profile."""
    found = parameters_text({name: set_aside.method.model_dump()[name] for name in space})
    behind = set_aside.difference
    values = f"{set_aside.value:.{_DIGITS}f} against {set_aside.value - behind.mean:.{_DIGITS}f}"
    numbers = f"{objective} {values}, difference {behind.mean:+.{_DIGITS}f}"
    if behind.samples < FEWEST_TO_TELL:
        why = f"fewer than {FEWEST_TO_TELL} prompts cannot show that it is better"
    else:
        numbers += f", 95 %: {_interval(behind)}"
        why = "too little to show that it is better"
    tuned, default = judgement.methods[:2]
    start = "the paper's default" if tuned.method == default.method else "tuned SnapKV's values"
    return (
        f"On the {counted(behind.samples, 'prompt')} tuned on, the search did better with {found} ({numbers}): {why}, "
        f"so the profile has what the search began with, {start}."
    )


def per_layer_verdict(judgement: "Judgement", per_layer: "PerLayer", objective: "ObjectiveName") -> str:
    """Say in a sentence whether other values in groups of layers won, and what it took to know."""
    cost = f"{per_layer.tried} combinations tried in {per_layer.replays:,} more replays"
    if per_layer.best is None:
        return (
            f"Values per layer have nothing to offer: on the tuning prompts nothing was better on {objective} than the "
            f"same values in all layers; {cost}."
        )
    from clusterprof.profiling.judge import PER_LAYER, UNIFORM

    tuned = judgement.methods[0]
    results = {result.label: result for result in judgement.methods}
    values = [f"{results[label].scores[objective]:.{_DIGITS}f}" for label in (PER_LAYER, UNIFORM)]
    behind = results[UNIFORM if tuned.label == PER_LAYER else PER_LAYER].behind
    assert behind is not None
    if tuned.label == PER_LAYER:
        outcome = "won, and the profile has them"
    else:
        outcome = "are not shown to be better, and the profile has none"
    return (
        f"Values per layer {outcome}: {objective} {values[0]} against {values[1]} with the same values in all layers, "
        f"on {_prompts(judgement, {})} (tuned minus other, 95 %: {_interval(behind)}); {cost}."
    )


def _against_default(
    judgement: "Judgement", owner: str, space: Mapping[str, object], objective: "ObjectiveName"
) -> str:
    tuned, default = judgement.methods[:2]
    shown = f"{owner} ({_point(default, space)})"
    if tuned.method == default.method and not tuned.overrides:
        return f"The search found nothing that is shown to be better than {shown}."
    assert default.behind is not None
    words = {
        "better": "beats",
        "worse": "does worse than",
        "not shown to differ": "is not shown to be better than",
        "not known": "cannot be told from" if judgement.held_out else "is compared with",
    }
    values = f"{tuned.scores[objective]:.4f} against {default.scores[objective]:.4f}"
    return (
        f"Tuned ({_point(tuned, space)}) {words[_shown(default.behind, objective)]} {shown} on {objective}: {values}, "
        f"on {_prompts(judgement, space)}."
    )


def _point(result: "MethodResult", space: Mapping[str, object]) -> str:
    assert result.method is not None
    parameters = result.method.model_dump()
    text = parameters_text({name: parameters[name] for name in space})
    return "; ".join([text, *overrides_text(result.overrides, result.method)])


def _kl(result: "MethodResult") -> float:
    return round(result.scores.kl, _DIGITS)
