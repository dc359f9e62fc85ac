"""Heat maps: needle accuracy over length and depth, similarity over layers and heads, hit rates over layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from clusterprof.evaluation.groups import Value, methods_in, ordered
from clusterprof.evaluation.summary import cells_of
from clusterprof.report.figures import new_figure, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from clusterprof.evaluation.curves import Matrix
    from clusterprof.evaluation.records import Record

_COLUMNS = 5
# Inches; the second is for axis labels.
_ROW_HEIGHT, _EXTRA = 1.9, 0.5
_MOST_TICKS = 9
# Of the names on an axis with the space between them; a third of a figure is as wide.
_MOST_CHARACTERS = 40


def needle_maps(records: Sequence[Record], size: int, metric: str) -> Figure:
    """Draw a score from 0 to 1 over prompt length and depth, a panel per method (paper, Figures 7 and 10).

    Parameters
    ----------
    records : sequence of Record
        Of one group, with labels "tokens" and "depth"; those of the full cache and of the size are drawn.
    """
    drawn = [record for record in records if record.size in (None, size)]
    cells = {
        (cell.method, *cell.labels): fmean(values.values())
        for cell, values in cells_of(drawn, metric, ("depth", "tokens")).items()
    }
    depths, lengths = (ordered(key[place] for key in cells) for place in (1, 2))
    maps = {}
    for method in methods_in(drawn):
        values = [
            [cells.get((method, depth, tokens), float("nan")) for tokens in lengths] for depth in depths
        ]
        mean = fmean(value for key, value in cells.items() if key[0] == method)
        maps[f"{shown(method)}  {mean:.2f}"] = values
    figure = _maps(maps, limits=(0, 1), names=("prompt tokens", "depth of the needle"), bar=metric)
    for panel in figure.axes[: len(maps)]:
        _name_ticks(panel, lengths, depths)
    return figure


def head_maps(maps: Mapping[str, Matrix], layers: Sequence[int], *, bar: str) -> Figure:
    """Draw a value by layer and head, a panel per title, all on one scale (paper, Figures 6 and 12).

    Parameters
    ----------
    maps : mapping of str to Matrix
        By the panel's title, ``(layers, heads)``.
    layers : sequence of int
        Each row's index in the model.
    bar : str
        What the colours stand for.
    """
    figure = _maps(maps, limits=_limits(maps), names=("query head", "layer"), bar=bar)
    heads = max(len(row) for matrix in maps.values() for row in matrix)
    for panel in figure.axes[: len(maps)]:
        _name_ticks(panel, range(heads), layers)
    return figure


def layer_map(
    matrix: Matrix, layers: Sequence[int], columns: Sequence[Value], *, name: str, bar: str
) -> Figure:
    """Draw one map of a value by layer and something else."""
    figure = _maps({"": matrix}, limits=_limits({"": matrix}), names=(name, "layer"), bar=bar, height=3.6)
    _name_ticks(figure.axes[0], columns, layers)
    return figure


def _limits(maps: Mapping[str, Matrix]) -> tuple[float, float]:
    values = [value for matrix in maps.values() for row in matrix for value in row if value == value]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _maps(
    maps: Mapping[str, Matrix],
    *,
    limits: tuple[float, float],
    names: tuple[str, str],
    bar: str,
    height: float = _ROW_HEIGHT,
) -> Figure:
    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    figure = new_figure(rows * height + _EXTRA)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    image: AxesImage | None = None
    drawn = []
    for panel, (title, matrix) in zip(panels, maps.items(), strict=False):
        image = panel.imshow(
            _rectangle(matrix), vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="none"
        )
        panel.set_title(title)
        panel.grid(visible=False)
        panel.tick_params(length=0, labelbottom=True)
        panel.spines[:].set_visible(False)
        drawn.append(panel)
    for panel in figure.axes[len(drawn) :]:
        panel.remove()
    figure.supxlabel(names[0], fontsize=9)
    figure.supylabel(names[1], fontsize=9)
    assert image is not None
    colours = figure.colorbar(image, ax=drawn, label=bar, aspect=30, pad=0.01)
    colours.outline.set_visible(False)
    return figure


def _rectangle(matrix: Matrix) -> Matrix:
    """Rows of the same length, filled up with nothing."""
    width = max((len(row) for row in matrix), default=0)
    return [[*row, *[float("nan")] * (width - len(row))] for row in matrix]


def _name_ticks(panel: Axes, columns: Sequence[Value], rows: Sequence[Value]) -> None:
    name_places(panel.set_xticks, columns)
    name_places(panel.set_yticks, rows)


def name_places(set_ticks: Callable[[Sequence[int], Sequence[str]], object], names: Sequence[Value]) -> None:
    """Name the places 0, 1, 2... of an axis, every so many where there are many, or long ones."""
    texts = [tick_text(name) for name in names]
    room = min(_MOST_TICKS, _MOST_CHARACTERS // (2 + max(map(len, texts), default=0)))
    step = -(-len(texts) // max(1, room)) or 1
    set_ticks(range(0, len(texts), step), texts[::step])


def tick_text(value: Value) -> str:
    """Return a label's value as an axis has room for it: 2000 tokens as 2k."""
    if isinstance(value, str):
        return shown(value)
    if value >= 1000 and value % 100 == 0:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
