"""Plots, written to a file without any display."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from clusterprof.benchmarking.results import Decode
    from clusterprof.benchmarking.subjects import Subject

PLOT_SUFFIXES = (".svg", ".png")
# Inches.
_PANEL = (4.2, 3.6)
_LEGEND = 1.6
_MARKERS = "os^Dv*Pd"


def plot_decode_speed(decodes: Sequence["Decode"], subjects: Sequence["Subject"], path: Path) -> None:
    """Draw decode speed against prompt length: a panel per batch size, a line per cache.

    Parameters
    ----------
    decodes : sequence of Decode
        What was measured, and some speed in it; what could not be measured is left out.
    subjects : sequence of Subject
        The caches, in the order of the legend.
    path : Path
        Ends with one of `PLOT_SUFFIXES`, which says the format; folders are created on the way.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    # Not pyplot, which keeps figures in a global list and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [it for it in decodes if it.tokens_per_s is not None]
    batches = sorted({it.batch for it in measured})
    figure = Figure(figsize=(_PANEL[0] * len(batches) + _LEGEND, _PANEL[1]), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for panel, batch in zip(panels, batches, strict=True):
        _draw(panel, [it for it in measured if it.batch == batch], subjects)
        panel.set_title(f"batch {batch}")
    panels[0].set_ylabel("decoded tokens per second")
    # A cache for which memory did not suffice is not in every panel.
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    figure.legend(handles=list(lines.values()), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(panel: "Axes", decodes: Sequence["Decode"], subjects: Sequence["Subject"]) -> None:
    for number, subject in enumerate(subjects):
        points = sorted((it.tokens, it.tokens_per_s) for it in decodes if it.subject == subject.name)
        if points:
            # Lines of methods at the same size lie on one another: markers and dashes tell them apart.
            style = "-" if subject.compression else "--"
            panel.plot(
                *zip(*points, strict=True),
                color=f"C{number}",
                linestyle=style,
                marker=_MARKERS[number % len(_MARKERS)],
                label=subject.label,
            )
    panel.set_xlabel("prompt tokens")
    panel.margins(y=0.1)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
