"""Pictures of attention over a prompt: ClusterAttn's clusters with their text, and where decoded tokens look."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from clusterprof.evaluation.clusters import HeadClusters, Run

# Inches.
_WIDTH = 12.0
_HEAD_HEIGHT = 2.1
_LINE_HEIGHT = 0.13
_COLUMNS = 64
# Of what each token would get if attention were even; what gets less is drawn at the bottom.
_SMALLEST = 0.01
# More columns than this are not to be seen on a page, but make files large.
_POINTS = 1500


def draw_clusters(
    heads: Sequence[HeadClusters], captions: Sequence[Sequence[tuple[Run, str]]], path: Path
) -> None:
    """Draw importance over the prefix with its centres and what was kept, a panel per head (paper, Figures 1, 3).

    Parameters
    ----------
    heads : sequence of HeadClusters
        A few.
    captions : sequence of sequences of (Run, str)
        For each head, the runs that get a number in its panel, in the order of the prefix, and the text that stands
        beside it.
    path : Path
        Ends with one of `clusterprof.report.plots.PLOT_SUFFIXES`, which says the format.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    blocks = [_caption(head, runs) for head, runs in zip(heads, captions, strict=True)]
    heights = [max(_HEAD_HEIGHT, (block.count("\n") + 2) * _LINE_HEIGHT) for block in blocks]
    figure = _figure(sum(heights) + 0.6)
    panels = figure.subplots(len(heads), 2, squeeze=False, width_ratios=[2, 1], height_ratios=heights)
    for (panel, side), head, runs, block in zip(panels, heads, captions, blocks, strict=True):
        _draw_head(panel, head)
        for number, ((start, end), _) in enumerate(runs, start=1):
            panel.annotate(
                str(number),
                ((start + end - 1) / 2, 1),
                xycoords=panel.get_xaxis_transform(),
                xytext=(0, 1),
                textcoords="offset points",
                ha="center",
                fontsize="x-small",
            )
        side.axis("off")
        side.text(0, 1, block, va="top", family="monospace", fontsize=7, parse_math=False)
    panels[-1][0].set_xlabel("position in the prompt, in tokens", fontsize="small")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=len(labels), fontsize="small", frameon=False
    )
    _save(figure, path)


def draw_decode_attention(attention: Tensor, layer: int, steps: int, path: Path) -> None:
    """Draw where all heads of a layer look while decoding, as a heat map (paper, Figure 5).

    Parameters
    ----------
    attention : Tensor
        Summed over the decoded tokens, float32 ``(heads, prefix_length)``.
    layer, steps : int
        Index of the layer, and how many tokens were decoded.
    path : Path
        As in :func:`draw_clusters`.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    from matplotlib.colors import LogNorm

    heads, prefix = attention.shape
    peaks, width = _peaks(attention)
    lowest = _SMALLEST * steps / prefix
    figure = _figure(max(2.6, 0.22 * heads + 1.2))
    panel = figure.subplots()
    image = panel.imshow(
        peaks.clamp(min=lowest).numpy(),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(lowest, steps),
        # The last column may reach beyond the prefix.
        extent=(0, peaks.shape[-1] * width, heads - 0.5, -0.5),
    )
    panel.set_xlim(0, prefix)
    panel.set_yticks(range(0, heads, max(1, heads // 16)))
    panel.set_xlabel("position in the prompt, in tokens")
    panel.set_ylabel("query head")
    panel.set_title(
        f"layer {layer}: attention to each prefix token, summed over {steps} decoded tokens",
        fontsize="medium",
    )
    figure.colorbar(image, ax=panel, extend="min", pad=0.01)
    _save(figure, path)


def _draw_head(panel: Axes, head: HeadClusters) -> None:
    from clusterprof.evaluation.clusters import runs_of

    prefix = len(head.importance)
    peaks, width = _peaks(head.importance[None])
    lowest = _SMALLEST / prefix
    across = panel.get_xaxis_transform()
    for positions, colour, label in (
        (head.clustered, "C0", "kept: in a cluster"),
        (head.filled, "C1", "kept: in a gap"),
    ):
        # The edge keeps a single token visible in a long prompt.
        bars = [(start, end - start) for start, end in runs_of(positions)]
        panel.broken_barh(bars, (0, 1), transform=across, color=colour, alpha=0.3, linewidth=0.4, label=label)
    steps = [min(prefix, column * width) for column in range(peaks.shape[-1] + 1)]
    panel.stairs(peaks[0].clamp(min=lowest).numpy(), steps, color="0.25", linewidth=0.7, label="importance")
    for positions, floor, face, edge, label in (
        # A peak below theta that is too low is left out, a centre stands at the bottom.
        (head.dropped, 0.0, "none", "0.5", "peak below theta"),
        (head.centres, lowest, "C3", "white", "centre"),
    ):
        heights = head.importance[positions].clamp(min=floor)
        (marks,) = panel.plot(positions + 0.5, heights, "o", markersize=4, label=label)
        marks.set(markerfacecolor=face, markeredgecolor=edge, markeredgewidth=0.6, clip_on=floor == 0)
        # Marks on the edge need no room, and none at all would have no place in the layout.
        marks.set_in_layout(False)
    panel.axhline(max(head.method.theta, lowest), color="C3", linestyle=":", linewidth=0.8, label="theta")
    panel.set_yscale("log")
    # The same for all heads of a picture.
    panel.set_ylim(lowest, 2)
    panel.set_xlim(0, prefix)
    panel.set_title(f"layer {head.layer}, KV head {head.kv_head}", loc="left", fontsize="small", pad=10)
    panel.tick_params(labelsize="small")


def _caption(head: HeadClusters, runs: Sequence[tuple[Run, str]]) -> str:
    # Not breaking: an SVG drops plain spaces at the start of a line.
    space = "\N{NO-BREAK SPACE}"
    lines = []
    for number, (run, text) in enumerate(runs, start=1):
        start, end = run
        where = f"{start}" if end == start + 1 else f"{start} to {end - 1}"
        total = head.attention(run)
        # A sum of maxima over queries is a share of nothing.
        is_share = head.method.importance == "mean"
        amount = f"{total:.1%} of the attention" if is_share else f"importance {total:.2f} in all"
        lines.append(f"{number:{space}<3}{where}, {amount}")
        lines += [f"{space * 3}{line}" for line in textwrap.wrap(text.strip(), _COLUMNS - 3)]
    return "\n".join(lines)


def _peaks(rows: Tensor) -> tuple[Tensor, int]:
    """The highest of every so many columns of ``(rows, length)``, and how many."""
    import torch

    width = -(-rows.shape[-1] // _POINTS)
    return torch.nn.functional.max_pool1d(rows[None], width, ceil_mode=True)[0], width


def _figure(height: float) -> Figure:
    # Not pyplot, which keeps figures in a global list and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    # Prompts may be in any script. An SVG that holds text is drawn with the reader's fonts; a PNG has boxes for
    # what matplotlib's font lacks, which is no reason to warn.
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        figure.savefig(path, dpi=150)
