"""Sheets: tables of means with intervals, before they are drawn on a terminal or a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterprof.text import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.report.metrics import Metric
    from clusterprof.statistics import Estimate

_NOTHING = "\N{EN DASH}"
# Characters of a line of a name; the rest goes into further lines.
_LONGEST_NAME = 24


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
    return Entry(metric.signed(difference.mean), detail, weak=not difference.excludes_zero)


def _interval(estimate: "Estimate", text: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{text(estimate.low)}, {text(estimate.high)}]"


def rich_tables(sheet: Sheet, width: int, before: str = "") -> "list[Table]":
    """Return a sheet for a terminal of so many columns, as one table if it fits; ``before`` goes before its title.

    Where they do not fit beside the means, intervals stand below them; where that is too wide as well, the columns
    of numbers are spread over several tables.
    """
    names, numbers = range(sheet.names), range(sheet.names, len(sheet.headings))
    for between in (" ", "\n"):
        widths = [_width(sheet, place, between) for place in range(len(sheet.headings))]
        if sum(widths) < width:
            return [_rich_table(sheet, [*names, *numbers], between, before)]
    room = width - 1 - sum(widths[place] for place in names)
    parts: list[list[int]] = [[]]
    for place in numbers:
        if parts[-1] and sum(widths[it] for it in (*parts[-1], place)) > room:
            parts.append([])
        parts[-1].append(place)
    return [_rich_table(sheet, [*names, *part], "\n", before) for part in parts]


def _width(sheet: Sheet, place: int, between: str) -> int:
    """Of a column with its padding and the line beside it."""
    from rich.cells import cell_len

    texts = [_text(row[place], between) for section in sheet.sections for row in section]
    lines = [cell_len(line) for text in texts for line in text.split("\n")]
    if place < sheet.names:
        lines = [min(line, _LONGEST_NAME) for line in lines]
    return 3 + max(min(cell_len(one_line(sheet.headings[place])), _LONGEST_NAME), *lines)


def _rich_table(sheet: Sheet, places: Sequence[int], between: str, before: str) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(one_line(before) + sheet.title), title_justify="left")
    for place in places:
        name = place < sheet.names
        table.add_column(
            Text(one_line(sheet.headings[place])),
            justify="left" if name else "right",
            overflow="fold",
            max_width=_LONGEST_NAME if name else None,
        )
    for section in sheet.sections:
        table.add_section()
        for row in section:
            entries = (row[place] for place in places)
            table.add_row(*(Text(_text(entry, between), style=_style(entry)) for entry in entries))
    return table


def _text(entry: Entry, between: str) -> str:
    return f"{one_line(entry.text)}{between}{entry.detail}" if entry.detail else one_line(entry.text)


def _style(entry: Entry) -> str:
    return "bold" if entry.strong else "dim" if entry.weak else ""
