"""The table that compares methods at the same size, and what it says about the tuned one."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterprof.report.numbers import parameters_text

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.profiling.record import MethodResult

# Objective, heading, and whether more of it is better.
_COLUMNS = (
    ("cosine", "cosine", True),
    ("cosine_padded", "padded", True),
    ("attention_output", "output", True),
    ("kl", "KL", False),
    ("agreement", "agree", True),
    ("loss", "loss", False),
)
_HIGHER_IS_BETTER = {name: higher for name, _, higher in _COLUMNS}
# As many digits as the table shows; less of a difference is none.
_DIGITS = 4
_FEW_SAMPLES = 5


def methods_table(results: Sequence["MethodResult"], *, size: int) -> "Table":
    """Return the table of all methods, the best of each column in bold, the full cache not counted.

    Parameters
    ----------
    results : sequence of MethodResult
        One row each.
    size : int
        Prompt tokens kept per KV head.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{size} tokens kept per head", title_justify="left")
    table.add_column("method")
    for _, heading, higher in _COLUMNS:
        table.add_column(f"{heading} {'↑' if higher else '↓'}", justify="right")
    best = {name: _best(results, name) for name, _, _ in _COLUMNS}
    for result in results:
        scores = asdict(result.scores)
        cells = [Text(result.label)]
        for name, _, _ in _COLUMNS:
            shown = f"{scores[name]:.{_DIGITS}f}"
            wins = result.method is not None and shown == best[name]
            cells.append(Text(shown, style="bold green" if wins else ""))
        table.add_row(*cells)
    return table


def _best(results: Sequence["MethodResult"], objective: str) -> str:
    values = [asdict(result.scores)[objective] for result in results if result.method is not None]
    return f"{(max if _HIGHER_IS_BETTER[objective] else min)(values):.{_DIGITS}f}"


def verdict(
    results: Sequence["MethodResult"], *, searched: Collection[str], objective: str, samples: int
) -> list[str]:
    """Say in a sentence each how the tuned method did against its default and the other methods.

    Parameters
    ----------
    results : sequence of MethodResult
        The tuned method, its paper's default, then the others, as `tune` returns them.
    searched : collection of str
        Names of the parameters that the search chose.
    objective : str
        What the search optimised.
    samples : int
        Prompts the scores are means over, the same that were tuned on.
    """
    tuned, default, *others = results
    sentences = _against_default(tuned, default, searched, objective, samples)
    if samples < _FEW_SAMPLES:
        sentences.append(
            f"{samples} prompts are few to tune on; give more data, or raise --fraction or --samples."
        )
    # The cosine cannot compare methods, only points within one; the divergence of the next token can.
    ahead = [result.label for result in others if result.method and _gain(result, tuned, "kl") > 0]
    if ahead:
        verb = "keeps" if len(ahead) == 1 else "keep"
        sentences.append(
            f"On these samples {' and '.join(ahead)} {verb} the next token closer to the full cache's (KL)."
        )
    return sentences


def _against_default(
    tuned: "MethodResult", default: "MethodResult", searched: Collection[str], objective: str, samples: int
) -> list[str]:
    name = default.label.removesuffix(" default")
    if not searched:
        return [f"{name} has nothing to tune; the profile holds it as it is."]
    owner = "the paper's" if name == "paper" else f"{name}'s"
    shown = f"{owner} default ({_point(default, searched)})"
    if tuned.method == default.method:
        return [f"The search found nothing better than {shown}."]
    gain = _gain(tuned, default, objective)
    word = "beats" if gain > 0 else "equals" if gain == 0 else "does worse than"
    values = f"{asdict(tuned.scores)[objective]:.4f} against {asdict(default.scores)[objective]:.4f}"
    sentences = [
        f"Tuned ({_point(tuned, searched)}) {word} {shown} on {objective}: {values}, "
        f"on the {samples} prompts it was tuned on."
    ]
    behind = [
        column for column, _, _ in _COLUMNS if column != objective and _gain(default, tuned, column) > 0
    ]
    if behind:
        sentences.append(f"The default is better on {', '.join(behind)}.")
    return sentences


def _point(result: "MethodResult", searched: Collection[str]) -> str:
    assert result.method is not None
    parameters = result.method.model_dump()
    return parameters_text({name: parameters[name] for name in searched})


def _gain(result: "MethodResult", other: "MethodResult", objective: str) -> float:
    values = (asdict(each.scores)[objective] for each in (result, other))
    mine, its = (round(value, _DIGITS) for value in values)
    difference = float(mine - its)
    return difference if _HIGHER_IS_BETTER[objective] else -difference
