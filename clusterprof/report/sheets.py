"""Sheets: tables of means with intervals, before they are drawn on a terminal or a page."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterprof.evaluation.summary import excludes_zero
from clusterprof.text import one_line

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from clusterprof.report.metrics import Metric
    from clusterprof.statistics import Estimate

_NOTHING = "\N{EN DASH}"
# More columns of numbers than this have their intervals below, not beside them.
_WIDE = 5


@dataclass(frozen=True)
class Entry:
    """One place of a table.

    Attributes
    ----------
    detail : str
        What goes with the text: the interval, and the number of pairs where that is not the number of prompts.
    strong, weak : bool
        Whether it stands out, or shows nothing because its interval includes 0.
    """

    text: str
    detail: str = ""
    strong: bool = False
    weak: bool = False


Section = tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True)
class Sheet:
    """A table whose first ``names`` columns are names, and whose others are numbers.

    Attributes
    ----------
    sections : tuple
        Of rows, which are set apart from one another.
    notes : tuple of str
        Sentences about this table alone.
    """

    title: str
    headings: tuple[str, ...]
    names: int
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()


def mean_entry(estimate: "Estimate | None", metric: "Metric", *, strong: bool = False) -> Entry:
    """Return a mean and its interval."""
    if estimate is None:
        return Entry(_NOTHING)
    return Entry(metric.text(estimate.mean), _interval(estimate, metric.text), strong=strong)


def difference_entry(difference: "Estimate | None", metric: "Metric", prompts: int) -> Entry:
    """Return a paired difference and its interval, and how many pairs there are unless they are all the prompts."""
    if difference is None:
        return Entry(_NOTHING)
    pairs = f"{difference.samples:,} pairs" if difference.samples != prompts else ""
    detail = " ".join(filter(None, (_interval(difference, metric.signed), pairs)))
    return Entry(metric.signed(difference.mean), detail, weak=not excludes_zero(difference))


def _interval(estimate: "Estimate", text: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{text(estimate.low)}, {text(estimate.high)}]"


def rich_table(sheet: Sheet, before: str = "") -> "Table":
    """Return a sheet for a terminal; ``before`` goes before its title."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(one_line(before) + sheet.title), title_justify="left")
    for place, heading in enumerate(sheet.headings):
        justify: JustifyMethod = "left" if place < sheet.names else "right"
        table.add_column(Text(one_line(heading)), justify=justify, overflow="fold")
    between = "\n" if len(sheet.headings) - sheet.names > _WIDE else " "
    for section in sheet.sections:
        table.add_section()
        for entries in section:
            table.add_row(*(Text(_text(entry, between), style=_style(entry)) for entry in entries))
    return table


def _text(entry: Entry, between: str) -> str:
    return f"{one_line(entry.text)}{between}{entry.detail}" if entry.detail else one_line(entry.text)


def _style(entry: Entry) -> str:
    return "bold" if entry.strong else "dim" if entry.weak else ""
