"""Plots of each benchmark, as the paper draws them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from clusterprof.evaluation.curves import mean_curve, places
from clusterprof.evaluation.groups import ABLATION, VARIED, Value, comparable, label_of, methods_in, ordered
from clusterprof.report.charts import category_chart, length_chart, size_chart
from clusterprof.report.curve_charts import curves_chart, parameter_chart, sorted_chart
from clusterprof.report.evaluation_tables import length_label, perplexity_of
from clusterprof.report.figures import Plot, drawing, save_plot, shown
from clusterprof.report.heatmaps import head_maps, layer_map, needle_maps, tick_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clusterprof.evaluation.curves import Matrix
    from clusterprof.evaluation.groups import Group
    from clusterprof.evaluation.records import Record

_INTERVALS = "Bars are 95 % intervals."
_SIDE_BY_SIDE = "Means and their 95 % intervals stand side by side around the place they belong to."


def evaluation_plots(group: Group) -> list[Plot]:
    """Return the plots of a group of records; none of a benchmark that has tables or texts only.

    Raises
    ------
    DataError
        If a record lacks the curve that its benchmark draws.
    """
    if group.bench not in _BENCHES:
        return []
    metric, draw = _BENCHES[group.bench]
    records = [record for record in group.records if metric in record.scores]
    with drawing():
        return list(draw(records)) if records else []


def save_plots(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write every plot of these records as an SVG file, making the folder if need be.

    Raises
    ------
    DataError
        As :func:`evaluation_plots` and :func:`clusterprof.evaluation.groups.comparable`.
    OSError
        If a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for group in comparable(records):
        for plot in evaluation_plots(group):
            stem = f"{group.bench}-{'-'.join(re.findall('[a-z0-9_]+', plot.title.lower()))}"
            # Of another model, or run in another way.
            repeated = sum(path.stem.startswith(stem) for path in paths)
            paths.append(folder / f"{stem}{f'-{repeated + 1}' if repeated else ''}.svg")
            save_plot(plot, paths[-1])
    return paths


def _sizes(records: Sequence[Record]) -> list[int]:
    return sorted({record.size for record in records if record.size is not None})


def _over_sizes(
    records: Sequence[Record], metric: str, name: str, *, over: str | None = None
) -> Iterator[Plot]:
    if len(_sizes(records)) > 1:
        note = f"The dashed line is the full cache. {_SIDE_BY_SIDE}"
        yield Plot(
            f"{name} over the size of the compressed cache", size_chart(records, metric, over=over), note
        )


def _needle(records: Sequence[Record]) -> Iterator[Plot]:
    yield from _over_sizes(records, "accuracy", "Share of needles found")
    for size in _sizes(records):
        title = f"Needles found at size {size:,}, by prompt length and depth"
        note = "Depth 0 is the beginning of the prompt. The number after each name is its mean."
        yield Plot(title, needle_maps(records, size, "accuracy"), note)


def _lines(records: Sequence[Record]) -> Iterator[Plot]:
    yield from _over_sizes(records, "accuracy", "Share of lines found")
    chart = length_chart(records, "accuracy", length_label(records))
    yield Plot("Share of lines found, by prompt length", chart, _SIDE_BY_SIDE)


def _longbench(records: Sequence[Record]) -> Iterator[Plot]:
    yield from _over_sizes(records, "score", "LongBench score, mean over tasks,", over="task")
    yield Plot("LongBench by group", category_chart(records, "score", "group", over="task"), _INTERVALS)
    yield Plot("LongBench by task", category_chart(records, "score", "task"), _INTERVALS)


def _perplexity(records: Sequence[Record]) -> Iterator[Plot]:
    yield from _over_sizes(records, "loss", "Loss of the reference answers", over="dataset")
    chart = category_chart(records, "loss", "dataset", shown_as=perplexity_of)
    yield Plot("Perplexity of the reference answers", chart, f"Lower is better. {_INTERVALS}")


def _hit_rate(records: Sequence[Record]) -> Iterator[Plot]:
    lengths = ordered(label_of(record, "tokens") for record in records)
    curves = {
        length: mean_curve([record for record in records if label_of(record, "tokens") == length], "hit_rate")
        for length in lengths
    }
    by_layer = {length: [_mean(row) for row in curve] for length, curve in curves.items()}
    by_step = {length: [_mean(step) for step in zip(*curve, strict=True)] for length, curve in curves.items()}
    layers = places(records, "layers", max(map(len, by_layer.values())))
    steps = places(records, "bin_steps", max(map(len, by_step.values())))
    panels = {"layer": by_layer, "decode step": by_step}
    chart = curves_chart(panels, {"layer": layers, "decode step": steps}, "hit_rate", "prompt tokens")
    yield Plot("Hit rate by layer and by decode step", chart, "A line per prompt length.")
    matrix = [[by_layer[length][layer] for length in lengths] for layer in range(len(layers))]
    chart = layer_map(matrix, layers, lengths, name="prompt tokens", bar="hit rate")
    yield Plot("Hit rate by layer and prompt length", chart)


def _fit(records: Sequence[Record]) -> Iterator[Plot]:
    for size in _sizes(records):
        here = [record for record in records if record.size == size]
        maps = {
            method: mean_curve([record for record in here if record.method == method], "cosine_by_head")
            for method in methods_in(here)
        }
        heads = {method: [value for row in matrix for value in row] for method, matrix in maps.items()}
        titled = {f"{shown(method)}  {_mean(heads[method]):.4f}": matrix for method, matrix in maps.items()}
        title = f"Cosine similarity of attention by head, size {size:,}"
        yield Plot(
            title,
            _heads(here, titled),
            "The number after each name is its mean. Brighter is closer to the full cache.",
        )
        chart = sorted_chart(
            heads, records, "cosine", "query heads of all layers, from the best to the worst"
        )
        yield Plot(f"The same, heads sorted, size {size:,}", chart)


def _ablation(records: Sequence[Record]) -> Iterator[Plot]:
    varied = [name for name in VARIED if len(ordered(_values(records, name))) > 1]
    if varied:
        metrics = ["cosine", *(["kl"] if any("kl" in record.scores for record in records) else [])]
        chart = parameter_chart(records, metrics, varied)
        yield Plot(
            "Cosine similarity and KL divergence over one parameter at a time",
            chart,
            "Shaded: 95 % intervals.",
        )
    if "num_block" not in varied:
        return
    for size, method in product(_sizes(records), methods_in(records)):
        alike = [it for it in records if (it.size, it.method) == (size, method)]
        blocks = {theta: _maps_by_block(alike, theta) for theta in ordered(_values(alike, "theta"))}
        theta, maps = max(blocks.items(), key=lambda item: len(item[1]), default=(0, {}))
        if len(maps) > 1:
            where = f"{method}, size {size:,}, theta {tick_text(theta)}"
            title = f"Cosine similarity by head for several num_block, {where}"
            yield Plot(title, _heads(alike, maps), "Behind each num_block is its mean.")


def _values(records: Sequence[Record], name: str) -> Iterator[Value]:
    return (value for record in records if (value := label_of(record, name)) != "")


def _maps_by_block(records: Sequence[Record], theta: Value) -> dict[str, Matrix]:
    maps = {}
    alike = [record for record in records if label_of(record, "theta") == theta]
    for block in ordered(_values(alike, "num_block")):
        matrix = mean_curve([it for it in alike if label_of(it, "num_block") == block], "cosine_by_head")
        maps[f"num_block {block}  {_mean([value for row in matrix for value in row]):.4f}"] = matrix
    return maps


def _heads(records: Sequence[Record], maps: dict[str, Matrix]) -> Figure:
    layers = places(records, "layers", max(map(len, maps.values())))
    return head_maps(maps, layers, bar="cosine")


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if value == value]
    return fmean(there) if there else float("nan")


# The score that must be there, and what draws it.
_BENCHES: dict[str, tuple[str, Callable[[Sequence[Record]], Iterator[Plot]]]] = {
    "needle": ("accuracy", _needle),
    "lines": ("accuracy", _lines),
    "longbench": ("score", _longbench),
    "perplexity": ("loss", _perplexity),
    "hit-rate": ("hit_rate", _hit_rate),
    "fit": ("cosine", _fit),
    ABLATION: ("cosine", _ablation),
}
