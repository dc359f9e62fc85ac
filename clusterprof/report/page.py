"""The page: runs as one self-contained HTML file that explains itself and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.errors import DataError
from clusterprof.evaluation.groups import base_method, comparable, differing, ordered, settings_of
from clusterprof.report.answers_shown import Answered, answers_of
from clusterprof.report.evaluation_plots import evaluation_plots
from clusterprof.report.evaluation_tables import evaluation_sheets
from clusterprof.report.explanations import METHODS, Explained, explained
from clusterprof.report.figures import inline_svg, page_colours
from clusterprof.report.numbers import parameters_text, window_text

if TYPE_CHECKING:
    from clusterprof.evaluation.groups import Group, Setting
    from clusterprof.evaluation.records import Record
    from clusterprof.report.sheets import Sheet

_TEMPLATE = "page.html.jinja"
_NOT_NAMED = "model not named"


@dataclass(frozen=True)
class Drawing:
    """A plot on the page; ``svg`` is markup."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Part:
    """One group of a benchmark: what was measured on one model, in one way; ``name`` tells it from others."""

    name: str
    model: str
    prompts: int
    datasets: tuple[str, ...]
    drawings: tuple[Drawing, ...]
    sheets: tuple[Sheet, ...]
    answers: tuple[Answered, ...]
    settings: tuple[Setting, ...]
    conditions: Mapping[str, str]


@dataclass(frozen=True)
class Section:
    """All that was measured of one benchmark; ``id`` is what links point to."""

    id: str
    explained: Explained
    parts: tuple[Part, ...]


def render(runs: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """Return a page of what runs measured; the same runs make the same page.

    Parameters
    ----------
    runs : sequence of (str, sequence of Record)
        Each with the name that the page gives it.

    Raises
    ------
    DataError
        If there is nothing to show, or the runs contradict each other.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    groups = comparable(record for _, records in runs for record in records)
    if not groups:
        raise DataError("There are no results to make a page of; run `clusterprof eval` first.")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"parameters": parameters_text, "window": window_text}
    records = [record for group in groups for record in group.records]
    return environment.get_template(_TEMPLATE).render(
        runs=[(name, len(found)) for name, found in runs],
        models=ordered(group.environment.get("model", _NOT_NAMED) for group in groups),
        methods=_methods(records),
        sections=_sections(groups),
        colours=page_colours(),
    )


def _methods(records: Iterable[Record]) -> list[tuple[str, str]]:
    """The methods that take part, each with its name and in a sentence."""
    there = {base_method(record) for record in records}
    return [(name, sentence) for name, sentence in METHODS.items() if name in there]


def _sections(groups: Sequence[Group]) -> list[Section]:
    sections = []
    for number, bench in enumerate(dict.fromkeys(group.bench for group in groups)):
        alike = [group for group in groups if group.bench == bench]
        names = differing(alike)
        parts = (
            _part(group, ", ".join(group.conditions.get(name, "") for name in names), f"s{number}-{place}-")
            for place, group in enumerate(alike)
        )
        sections.append(Section(f"bench-{number}", explained(bench), tuple(parts)))
    return sections


def _part(group: Group, name: str, prefix: str) -> Part:
    from markupsafe import Markup

    drawings = (
        # matplotlib escaped whatever text is in it.
        Drawing(plot.title, plot.note, Markup(inline_svg(plot, f"{prefix}{place}-")))  # noqa: S704
        for place, plot in enumerate(evaluation_plots(group))
    )
    return Part(
        name=name,
        model=group.environment.get("model", _NOT_NAMED),
        prompts=group.prompts,
        datasets=tuple(dict.fromkeys(record.dataset for record in group.records)),
        drawings=tuple(drawings),
        sheets=tuple(evaluation_sheets(group)),
        answers=tuple(answers_of(group)),
        settings=tuple(settings_of(group.records)),
        conditions=group.conditions,
    )
