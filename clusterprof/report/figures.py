"""Figures: how plots look, one colour per method in all of them, and how they get into a file or a page."""

import io
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from clusterprof.evaluation.contestants import FULL
from clusterprof.evaluation.groups import base_method, methods_in
from clusterprof.text import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clusterprof.evaluation.records import Record

# Inches; a page shows them as wide as its text.
WIDTH = 10.0
INK, MUTED, GRID, SURFACE = "#24292f", "#6a737d", "#d9dee3", "#fefefe"
# Told apart by people with any of the common colour deficiencies, on white and on near black; markers differ, too.
_LIGHT = {
    FULL: INK,
    "clusterattn": "#0072b2",
    "snapkv": "#d55e00",
    "topk": "#cc79a7",
    "streaming_llm": "#009e73",
    "h2o": "#e69f00",
    "kmeans": "#56b4e9",
    "dbscan": "#332288",
    "ngram": "#6b3d12",
}
_DARK = {
    FULL: "#e6e8ea",
    "clusterattn": "#3fa9e8",
    "snapkv": "#f07a35",
    "topk": "#e88fc4",
    "streaming_llm": "#14a878",
    "h2o": "#f5c242",
    "kmeans": "#b0e4ff",
    "dbscan": "#8468e8",
    "ngram": "#9a6233",
}
_MARKERS = {
    "clusterattn": "o",
    "snapkv": "s",
    "topk": "^",
    "streaming_llm": "D",
    "h2o": "v",
    "kmeans": "P",
    "dbscan": ">",
    "ngram": "*",
}
_OTHER_COLOUR, _OTHER_MARKER = "#8a8f94", "p"
_VARIANT_LINES = (":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_LONGEST_LINE = 34
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# A colour that a page has light and dark: the name of its CSS variable, by the colour in figures.
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    _OTHER_COLOUR: "muted",
    **{colour: f"method-{name}" for name, colour in _LIGHT.items() if name != FULL},
}


def page_colours() -> dict[str, tuple[str, str]]:
    """Return the methods' colours by CSS variable: in light mode, and in dark mode."""
    return {f"method-{name}": (colour, _DARK[name]) for name, colour in _LIGHT.items() if name != FULL}


@dataclass(frozen=True)
class Style:
    """How a method looks in every plot; ``filled`` is whether its markers are."""

    colour: str
    marker: str
    line: str | tuple[float, tuple[float, ...]]
    filled: bool

    @property
    def look(self) -> dict[str, Any]:
        """The arguments of a line."""
        inside = self.colour if self.filled else SURFACE
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.line,
            "markerfacecolor": inside,
        }


@dataclass(frozen=True)
class Plot:
    """A figure with the words that go with it; ``note`` says how to read it."""

    title: str
    figure: "Figure"
    note: str = ""


def styles(records: Sequence["Record"]) -> Mapping[str, Style]:
    """Return each method's look; profiles and other variants have their method's colour, and hollow markers."""
    bases = {record.method: base_method(record) for record in records}
    variants: dict[str, int] = defaultdict(int)
    found = {}
    for method in methods_in(records):
        base = bases[method]
        found[method] = style_of(base, variants[base])
        variants[base] += 1
    return found


def style_of(base: str, variant: int) -> Style:
    """Return the look of a method, or of one of its variants if ``variant`` is above 0."""
    colour, marker = _LIGHT.get(base, _OTHER_COLOUR), _MARKERS.get(base, _OTHER_MARKER)
    if base == FULL:
        return Style(colour, "", "--", filled=True)
    if variant == 0:
        return Style(colour, marker, "-", filled=True)
    line = _VARIANT_LINES[(variant - 1) % len(_VARIANT_LINES)]
    return Style(colour, marker, line, filled=False)


@contextmanager
def drawing() -> Iterator[None]:
    """Draw as all plots are drawn, and treat names as text: a dollar sign in one starts no formula."""
    from matplotlib import rc_context

    with rc_context(
        {
            "text.parse_math": False,
            "text.color": INK,
            "font.size": 9,
            "axes.labelcolor": INK,
            "axes.labelsize": 9,
            "axes.titlesize": 9,
            "axes.edgecolor": MUTED,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid.axis": "y",
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.6,
            "lines.markersize": 6,
            "image.cmap": "cividis",
        }
    ):
        yield


def new_figure(height: float) -> "Figure":
    """Return a figure of so many inches that needs no display."""
    # Not pyplot, which keeps figures in a global list and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def shown(method: str) -> str:
    """Return a method's name as plots have room for it: whole, since names may differ at their ends only."""
    name = "\n".join(textwrap.wrap(one_line(method), _LONGEST_LINE))
    # matplotlib leaves names that start with an underscore out of legends.
    return f" {name}" if name.startswith("_") else name


def inline_svg(plot: Plot, prefix: str) -> str:
    """Return a plot as an SVG element for a page.

    Its colours are the page's CSS variables, its letters text in the page's font, its width the page's. Nothing in
    it names another file.

    Parameters
    ----------
    prefix : str
        What its ids start with, so that no two on a page are the same.
    """
    # Not the work of strangers: matplotlib wrote it a moment ago, and escaped what they named.
    root = ElementTree.fromstring(_svg(plot.figure))  # noqa: S314
    for name in ("width", "height"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": plot.title}
    for element in root.iter():
        _adapt(element, prefix)
    for name, uri in (("", _SVG), ("xlink", _XLINK)):
        ElementTree.register_namespace(name, uri)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: "ElementTree.Element", prefix: str) -> None:
    # One style sheet for all elements, which would be the page's, too.
    for child in element.findall(f"{{{_SVG}}}style"):
        element.remove(child)
    for name, value in element.attrib.items():
        if name == "id":
            element.attrib[name] = prefix + value
        elif value.startswith(("#", "url(#")):
            element.attrib[name] = value.replace("#", f"#{prefix}", 1)
        elif name == "style":
            declarations = re.sub(r"font-family:[^;]*;?", "", value)
            element.attrib[name] = re.sub("#[0-9a-f]{6}", _themed, declarations)


def _themed(colour: "re.Match[str]") -> str:
    variable = VARIABLES.get(colour[0])
    return colour[0] if variable is None else f"var(--{variable})"


def _svg(figure: "Figure") -> str:
    from matplotlib import rc_context

    content = io.StringIO()
    # The same records make the same page, to the byte.
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "clusterprof"}),
        warnings.catch_warnings(),
    ):
        # The page's reader has a font for what matplotlib's lacks.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    return content.getvalue()


def save_plot(plot: Plot, path: Path) -> None:
    """Write a plot with its title to a file whose suffix says the format, creating folders on the way.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        plot.figure.suptitle(plot.title)
        plot.figure.savefig(path, dpi=150)
