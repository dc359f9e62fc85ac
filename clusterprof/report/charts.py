"""Charts of means with their intervals: over sizes, over prompt lengths, by category, over a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from clusterprof.evaluation.groups import Value, methods_in, ordered
from clusterprof.evaluation.summary import Cell, Row, summarise
from clusterprof.report.figures import MUTED, Plot, drawing, new_figure, shown, style_of, styles
from clusterprof.report.heatmaps import tick_text
from clusterprof.report.metrics import metric_of
from clusterprof.statistics import mean_estimate

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clusterprof.evaluation.records import Record
    from clusterprof.profiling.judge import Judgement
    from clusterprof.profiling.objective import ObjectiveName
    from clusterprof.profiling.target import Target
    from clusterprof.report.figures import Style
    from clusterprof.statistics import Estimate

_HEIGHT = 3.4
_MOST_PANELS = 3
# Of the distance between two places: how far lines stand apart, so that all can be seen.
_STEP = 0.04
# Inches per method of a category, and between categories.
_DOT, _GAP, _EXTRA = 0.13, 0.16, 0.9
# What a mean becomes before it is drawn, such as a perplexity.
Shown = Callable[["Estimate"], tuple[str, "Estimate"]]


def size_chart(records: Sequence[Record], metric: str, *, over: str | None = None) -> Figure:
    """Draw a score over sizes, a line per method; the full cache as a band."""
    rows = summarise(records, metric, over=over, against=())
    sizes = ordered(row.cell.size for row in rows if row.cell.size is not None)
    looks = styles(records)
    figure = new_figure(_HEIGHT)
    panel = figure.subplots()
    for row in rows:
        if row.cell.size is None:
            _band(panel, row, looks[row.cell.method])
    compressed = [row for row in rows if row.cell.size is not None]
    _lines(panel, compressed, sizes, looks, lambda row: row.cell.size or 0)
    _finish(figure, [panel], "tokens kept per KV head", metric)
    return figure


def tuned_plot(
    judgements: Mapping[int, Judgement], objective: ObjectiveName, target: Target | None, *, seed: int
) -> Plot:
    """Draw what tunes at several sizes were worth: tuned, its method's default, and SnapKV tuned the same way.

    Parameters
    ----------
    objective : str
        Drawn, unless there is a target, whose own is drawn then with its value as a line.
    seed : int
        Of the intervals.
    """
    # Loads torch, which the other charts do without.
    from clusterprof.profiling.judge import TUNED_SNAPKV

    name = objective if target is None else target.objective
    rows: list[Row] = []
    looks: dict[str, Style] = {}
    for size, judgement in judgements.items():
        tuned, default, *others = judgement.methods
        # One line, although values per layer may have won at some sizes only.
        drawn = [("tuned", tuned, 0), (default.label, default, 1)]
        drawn += [(other.label, other, 0) for other in others if other.label == TUNED_SNAPKV]
        for label, result, variant in drawn:
            mean = mean_estimate([scores[name] for scores in result.per_prompt], seed=seed)
            rows.append(Row(Cell(label, size), mean))
            assert result.method is not None
            looks[label] = style_of(result.method.name, variant)
    seen = "held-out prompts" if all(it.held_out for it in judgements.values()) else "prompts tuned on"
    with drawing():
        figure = new_figure(_HEIGHT)
        panel = figure.subplots()
        _lines(panel, rows, sorted(judgements), looks, lambda row: row.cell.size or 0)
        if target is not None:
            # The lines are means, and the target is one for most prompts.
            label = f"target, for {100 * target.share:g} %"
            panel.axhline(target.value, color=MUTED, linestyle="--", label=label)
        _finish(figure, [panel], "tokens kept per KV head", name)
    return Plot(f"{name} on {seen}, means with 95 % intervals", figure)


def length_chart(records: Sequence[Record], metric: str, label: str) -> Figure:
    """Draw a score over prompt lengths, a panel per size and a line per method (paper, Figure 11)."""
    rows = summarise(records, metric, (label,), against=())
    lengths = ordered(row.cell.labels[0] for row in rows)
    looks = styles(records)
    figure, panels = _panels(rows, _HEIGHT)
    for panel, size in panels:
        here = [row for row in rows if row.cell.size in (None, size)]
        _lines(panel, here, lengths, looks, lambda row: row.cell.labels[0])
    _finish(figure, [panel for panel, _ in panels], f"prompt {label}", metric)
    return figure


def category_chart(
    records: Sequence[Record],
    metric: str,
    label: str,
    *,
    over: str | None = None,
    shown_as: Shown | None = None,
) -> Figure:
    """Draw a score for each value of a label, a panel per size and a dot with its interval per method.

    Parameters
    ----------
    shown_as : callable, optional
        Turns an estimate into the name of another metric and an estimate of that.
    """
    rows = summarise(records, metric, (label,), over=over, against=())
    values = ordered(row.cell.labels[0] for row in rows)
    looks, methods = styles(records), methods_in(records)
    height = len(values) * (len(methods) * _DOT + _GAP) + _EXTRA
    figure, panels = _panels(rows, height)
    name = metric
    for panel, size in panels:
        for row in (row for row in rows if row.cell.size in (None, size)):
            name, mean = (metric, row.mean) if shown_as is None else shown_as(row.mean)
            offset = (methods.index(row.cell.method) / max(1, len(methods) - 1) - 0.5) * 0.7
            place = values.index(row.cell.labels[0]) + offset
            _dot(panel, mean, place, looks[row.cell.method], shown(row.cell.method))
        panel.set_yticks(range(len(values)), [tick_text(value) for value in values])
        panel.set_ylim(len(values) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=True, axis="x")
        panel.set_xlabel(metric_of(name).heading)
        for border in range(1, len(values)):
            panel.axhline(border - 0.5, color=MUTED, linewidth=0.4)
    _legend(figure, [panel for panel, _ in panels])
    return figure


def _panels(rows: Sequence[Row], height: float) -> tuple[Figure, list[tuple[Axes, int | None]]]:
    """A panel per size, in rows of a few; one if only the full cache is there."""
    sizes: list[int | None] = list(dict.fromkeys(row.cell.size for row in rows if row.cell.size is not None))
    sizes = sizes or [None]
    columns = min(_MOST_PANELS, len(sizes))
    figure = new_figure(height * -(-len(sizes) // columns))
    grid = figure.subplots(-(-len(sizes) // columns), columns, squeeze=False, sharey=True).flat
    panels = []
    for panel, size in zip(grid, sizes, strict=False):
        if size is not None:
            panel.set_title(f"size {size:,}")
        panels.append((panel, size))
    for panel in figure.axes[len(sizes) :]:
        panel.remove()
    return figure, panels


def _band(panel: Axes, row: Row, look: Style) -> None:
    panel.axhline(row.mean.mean, color=look.colour, linestyle=look.line, label=shown(row.cell.method))
    if row.mean.low is not None and row.mean.high is not None:
        panel.axhspan(row.mean.low, row.mean.high, color=look.colour, alpha=0.1, linewidth=0)


def _lines(
    panel: Axes,
    rows: Sequence[Row],
    values: Sequence[Value],
    looks: Mapping[str, Style],
    at: Callable[[Row], Value],
) -> None:
    methods = list(dict.fromkeys(row.cell.method for row in rows))
    for number, method in enumerate(methods):
        own = [row for row in rows if row.cell.method == method]
        # Side by side, so that neither points nor intervals hide one another.
        offset = (number - (len(methods) - 1) / 2) * _STEP
        places = [values.index(at(row)) + offset for row in own]
        look = looks[method]
        panel.plot(places, [row.mean.mean for row in own], label=shown(method), **look.look)
        for place, mean in zip(places, (row.mean for row in own), strict=True):
            if mean.low is not None and mean.high is not None:
                panel.vlines(place, mean.low, mean.high, color=look.colour, linewidth=0.8)
    panel.set_xticks(range(len(values)), [tick_text(value) for value in values])
    panel.set_xlim(-0.5, len(values) - 0.5)
    panel.grid(visible=True)


def _dot(panel: Axes, mean: Estimate, place: float, look: Style, label: str) -> None:
    # The full cache has no marker on lines.
    style = {**look.look, "linestyle": "none", "marker": look.marker or "|", "markersize": 5}
    panel.errorbar(mean.mean, place, xerr=_errors([mean]), label=label, elinewidth=0.8, **style)


def _errors(means: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """How far the intervals reach below and above; nowhere where there is none."""
    low = [0.0 if mean.low is None else mean.mean - mean.low for mean in means]
    high = [0.0 if mean.high is None else mean.high - mean.mean for mean in means]
    return low, high


def _finish(figure: Figure, panels: Sequence[Axes], across: str, metric: str) -> None:
    for panel in panels:
        panel.set_xlabel(across)
        panel.grid(visible=True)
    panels[0].set_ylabel(metric_of(metric).heading)
    _legend(figure, panels)


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    handles: dict[str, Artist] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside right upper")
