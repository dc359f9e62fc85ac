"""Charts of curves: over a parameter, over layers and steps, from the best head to the worst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from clusterprof.evaluation.groups import Value, ordered
from clusterprof.evaluation.summary import summarise
from clusterprof.report.figures import new_figure, shown, styles
from clusterprof.report.heatmaps import name_places, tick_text
from clusterprof.report.metrics import metric_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clusterprof.evaluation.records import Record
    from clusterprof.evaluation.summary import Row

_HEIGHT, _LOW = 3.4, 2.4
_MARKERS = "os^DvPX"


def parameter_chart(records: Sequence[Record], metrics: Sequence[str], varied: Sequence[str]) -> Figure:
    """Draw scores over parameters: a row of panels per score, a column per parameter (paper, Figure 13).

    A line joins points of one method that are alike in everything else, where there are several.
    """
    figure = new_figure(_LOW * len(metrics))
    grid = figure.subplots(len(metrics), len(varied), squeeze=False, sharex="col")
    for panels, metric in zip(grid, metrics, strict=True):
        rows = summarise(records, metric, varied, against=())
        for place, panel in enumerate(panels):
            _parameter(panel, rows, place, varied)
            panel.set_ylabel(metric_of(metric).heading if place == 0 else "")
            panel.set_xlabel(varied[place] if metric == metrics[-1] else "")
    return figure


def _parameter(panel: Axes, rows: Sequence[Row], place: int, varied: Sequence[str]) -> None:
    lines: dict[tuple[Value, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.cell.labels[place] != "":
            others = (*row.cell.labels[:place], *row.cell.labels[place + 1 :])
            lines[row.cell.method, row.cell.size or 0, *others].append(row)
    lines = {key: points for key, points in lines.items() if len(points) > 1}
    values = ordered(row.cell.labels[place] for points in lines.values() for row in points)
    names = ("method", "size", *varied[:place], *varied[place + 1 :])
    differing = [len({key[place] for key in lines}) > 1 for place in range(len(names))]
    for number, (key, points) in enumerate(lines.items()):
        parts = compress(zip(names, key, strict=True), differing)
        label = ", ".join(
            tick_text(value) if name == "method" else f"{name} {tick_text(value)}"
            for name, value in parts
            if value != ""
        )
        at = [values.index(row.cell.labels[place]) for row in points]
        means = [row.mean for row in points]
        look = _look(number, len(lines))
        panel.plot(at, [mean.mean for mean in means], label=label, **look)
        low = [mean.mean if mean.low is None else mean.low for mean in means]
        high = [mean.mean if mean.high is None else mean.high for mean in means]
        panel.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
    name_places(panel.set_xticks, values)
    panel.grid(visible=True)
    if len(lines) > 1:
        panel.legend(fontsize=7)


def sorted_chart(
    curves: Mapping[str, Sequence[float]], records: Sequence[Record], metric: str, across: str
) -> Figure:
    """Draw values from the highest to the lowest, a line per method."""
    looks = styles(records)
    figure = new_figure(_HEIGHT)
    panel = figure.subplots()
    for method, values in curves.items():
        there = sorted((value for value in values if value == value), reverse=True)
        look: dict[str, Any] = {**looks[method].look, "markevery": max(1, len(there) // 12)}
        panel.plot(range(1, len(there) + 1), there, label=shown(method), **look)
    panel.set_xlabel(across)
    panel.set_ylabel(metric_of(metric).heading)
    panel.grid(visible=True)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper")
    return figure


def curves_chart(
    panels: Mapping[str, Mapping[Value, Sequence[float]]],
    places: Mapping[str, Sequence[Value]],
    metric: str,
    quantity: str,
) -> Figure:
    """Draw lines in the order of a quantity, such as the prompt's length.

    Parameters
    ----------
    panels : mapping
        By what a panel's axis is: its lines' values by the quantity.
    places : mapping
        By the same: where each value of a line is.
    """
    figure = new_figure(_HEIGHT)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (name, lines) in zip(axes, panels.items(), strict=True):
        for number, (value, line) in enumerate(lines.items()):
            look = _look(number, len(lines))
            panel.plot(range(len(line)), line, label=tick_text(value), **look)
        name_places(panel.set_xticks, places[name])
        panel.set_xlabel(name)
        panel.grid(visible=True)
    axes[0].set_ylabel(metric_of(metric).heading)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title=quantity)
    return figure


def _look(number: int, count: int) -> dict[str, Any]:
    """In order of brightness, within what can be seen on white and on near black."""
    from matplotlib import colormaps

    colour = colormaps["viridis"](0.3 + 0.5 * number / max(1, count - 1))
    return {"color": colour, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4}
