from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from clusterprof.errors import DataError
from clusterprof.evaluation.ablation import points as ablation_points
from clusterprof.evaluation.groups import comparable
from clusterprof.evaluation.records import Record
from clusterprof.evaluation.summary import Cell, summarise
from clusterprof.report.evaluation_plots import evaluation_plots
from clusterprof.report.figures import Plot, inline_svg, styles
from clusterprof.report.heatmaps import tick_text
from tests.evaluation.examples import (
    HEADS,
    LAYERS,
    ablation_run,
    every_run,
    fit_run,
    hit_rate_run,
    lines_run,
    longbench_run,
    needle_run,
    perplexity_run,
    record,
    samples_run,
)

FEW = ("clusterattn", "snapkv")


def plots(records: Iterable[Record]) -> list[Plot]:
    (group,) = comparable(records)
    return evaluation_plots(group)


def maps(figure: Figure) -> dict[str, np.ndarray]:
    """The heat maps by their panels' titles, masked where nothing is."""
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images}


def ticks(axes: Axes) -> tuple[list[str], list[str]]:
    return [it.get_text() for it in axes.get_xticklabels()], [it.get_text() for it in axes.get_yticklabels()]


def lines(axes: Axes) -> dict[str, list[float]]:
    """Of each line with a name, its heights; those of error bars come with their containers."""
    named = {str(it.get_label()): it for it in axes.get_lines() if not str(it.get_label()).startswith("_")}
    named |= {str(it.get_label()): it.lines[0] for it in axes.containers}  # type: ignore[attr-defined]
    return {label: np.asarray(line.get_ydata(), dtype=float).tolist() for label, line in named.items()}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for it in figure.legends for text in it.get_texts()]


def test_a_needle_map_has_each_cells_mean() -> None:
    scores = {(1000, 0.0): [1.0, 0.0], (1000, 1.0): [1.0], (2000, 0.0): [0.0]}
    records = [
        record(
            method=method,
            prompt=f"{tokens} {depth} {number}",
            labels={"tokens": tokens, "depth": depth},
            scores={"accuracy": value if method == "full" else 0.25},
        )
        for method in ("full", "snapkv")
        for (tokens, depth), values in scores.items()
        for number, value in enumerate(values)
    ]
    (plot,) = plots(records)
    full, snapkv = plot.figure.axes[:2]
    assert [full.get_title(), snapkv.get_title()] == ["full  0.50", "snapkv  0.25"]
    drawn = maps(plot.figure)["full  0.50"]
    # Depth runs downwards, length to the right.
    np.testing.assert_array_equal(np.ma.filled(drawn, np.nan), [[0.5, 0.0], [1.0, np.nan]])
    assert ticks(full) == (["1k", "2k"], ["0", "1"])
    assert full.images[0].get_clim() == (0, 1)


def test_parameters_that_differ_have_maps_and_lines_of_their_own() -> None:
    name = "snapkv (a profile with a long name-128)"
    records = [
        record(
            method=name.replace("128", f"{size}"),
            size=size,
            parameters={"name": "snapkv", "kernel_size": kernel},
            scores={"accuracy": right},
        )
        for kernel, right in ((5, 0.0), (7, 1.0))
        for size in (128, 256)
    ]
    over_sizes, *found = plots(records)
    names = [f"snapkv (a profile with a long\nname), kernel_size {kernel}" for kernel in (5, 7)]
    assert legend(over_sizes.figure) == names
    for plot in found:
        assert list(maps(plot.figure)) == [f"{names[0]}  0.00", f"{names[1]}  1.00"]


def test_there_is_a_needle_map_per_size_and_a_panel_per_method() -> None:
    over_sizes, *found = plots(needle_run(FEW, repeats=1))
    assert [plot.title for plot in found] == [
        "Needles found at size 128, by prompt length and depth",
        "Needles found at size 256, by prompt length and depth",
    ]
    for plot in found:
        assert [title.split()[0] for title in maps(plot.figure)] == ["full", "clusterattn", "snapkv"]
    assert legend(over_sizes.figure) == ["full", "clusterattn", "snapkv"]


def test_over_sizes_every_method_has_its_means_and_intervals() -> None:
    records = list(needle_run(FEW))
    (group,) = comparable(records)
    panel = plots(records)[0].figure.axes[0]
    means = {row.cell: row.mean for row in summarise(group.records, "accuracy", against=())}
    drawn = lines(panel)
    for method in FEW:
        assert drawn[method] == [means[Cell(method, size)].mean for size in (128, 256)]
    assert drawn["full"] == [means[Cell("full", None)].mean] * 2
    assert ticks(panel)[0] == ["128", "256"]
    # Beside one another, and near their places.
    for line in panel.get_lines():
        assert np.asarray(line.get_xdata()).tolist() == pytest.approx([0, 1], abs=0.1)
    colour = styles(records)["snapkv"].colour
    first, _ = (it for it in panel.collections if to_hex(it.get_colors()[0]) == colour)  # type: ignore[attr-defined]
    estimate = means[Cell("snapkv", 128)]
    (segment,) = first.get_segments()  # type: ignore[attr-defined]
    assert segment[:, 1] == pytest.approx([estimate.low, estimate.high])
    places = [it.get_segments()[0][0, 0] for it in panel.collections]  # type: ignore[attr-defined]
    assert len(set(places)) == 4


def test_lines_are_over_prompt_lengths_a_panel_per_size() -> None:
    *_, plot = plots(lines_run(FEW, sizes=(128, 256, 512, 1024), repeats=3))
    assert [axes.get_title() for axes in plot.figure.axes] == [
        "size 128",
        "size 256",
        "size 512",
        "size 1,024",
    ]
    for axes in plot.figure.axes:
        assert sorted(lines(axes)) == ["clusterattn", "full", "snapkv"]
        assert ticks(axes)[0] == ["1k", "2k", "4k", "8k"]


def test_longbench_has_dots_per_group_and_task() -> None:
    over_sizes, by_group, by_task = plots(longbench_run(FEW))
    assert ticks(by_group.figure.axes[0])[1] == [
        "single-document QA",
        "multi-document QA",
        "summarisation",
        "code",
    ]
    assert ticks(by_task.figure.axes[0])[1] == ["qasper", "hotpotqa", "qmsum", "lcc"]
    assert [axes.get_title() for axes in by_task.figure.axes] == ["size 256", "size 512"]
    assert legend(by_task.figure) == ["full", *FEW]
    assert over_sizes.figure.axes[0].get_ylabel() == "score ↑"
    # Four tasks under three methods.
    assert len(by_task.figure.axes[0].containers) == 12


def test_perplexity_is_drawn_as_such() -> None:
    (plot,) = plots(perplexity_run(FEW))
    (axes,) = plot.figure.axes
    assert axes.get_xlabel() == "perplexity ↓"
    losses = [
        it.scores["loss"] for it in perplexity_run(FEW) if it.method == "full" and it.dataset == "qasper"
    ]
    full = axes.containers[0].lines[0]  # type: ignore[attr-defined]
    assert full.get_xdata()[0] == pytest.approx(np.exp(fmean(losses)))


def test_hit_rates_are_means_over_prompts() -> None:
    records = list(hit_rate_run())
    chart, layer_map = plots(records)
    by_layer, by_step = chart.figure.axes
    curves = np.array([it.curves["hit_rate"] for it in records if it.prompt_tokens == 1000])
    assert lines(by_layer)["1k"] == pytest.approx(curves.mean(axis=(0, 2)).tolist())
    assert lines(by_step)["1k"] == pytest.approx(curves.mean(axis=(0, 1)).tolist())
    (matrix,) = maps(layer_map.figure).values()
    assert matrix.shape == (LAYERS, 3)
    assert matrix[:, 0] == pytest.approx(curves.mean(axis=(0, 2)))


def test_layers_and_steps_have_their_own_numbers() -> None:
    curves = {"hit_rate": [[0.5, 0.4], [0.3, 0.2]], "layers": [5, 11], "bin_steps": [0, 64]}
    chart, layer_map = plots(
        [record(bench="hit-rate", method="full", scores={"hit_rate": 0.3}, curves=curves)]
    )
    assert [ticks(axes)[0] for axes in chart.figure.axes] == [["5", "11"], ["0", "64"]]
    assert ticks(layer_map.figure.axes[0])[1] == ["5", "11"]


def test_answers_of_different_lengths_have_different_numbers_of_bins() -> None:
    fields = {"bench": "hit-rate", "method": "full", "scores": {"hit_rate": 0.3}}
    records = [record(prompt=f"{bins}", curves={"hit_rate": [[0.5] * bins] * 2}, **fields) for bins in (1, 3)]
    assert lines(plots(records)[0].figure.axes[1])["1k"] == [0.5, 0.5, 0.5]


def test_fit_has_a_map_per_method_on_one_scale_and_its_heads_sorted() -> None:
    records = list(fit_run())
    heads, ordered = plots(records)
    drawn = maps(heads.figure)
    assert [title.split()[0] for title in drawn] == ["clusterattn", "topk", "kmeans", "dbscan", "ngram"]
    assert {array.shape for array in drawn.values()} == {(LAYERS, HEADS)}
    assert len({axes.images[0].get_clim() for axes in heads.figure.axes if axes.images}) == 1
    curves = np.array([it.curves["cosine_by_head"] for it in records if it.method == "kmeans"]).mean(axis=0)
    assert drawn[f"kmeans  {curves.mean():.4f}"] == pytest.approx(curves)
    assert lines(ordered.figure.axes[0])["kmeans"] == pytest.approx(sorted(curves.flatten(), reverse=True))


def ablation(*points: tuple[int, float], size: int = 128) -> list[Record]:
    return [
        record(
            bench="ablation",
            method="clusterattn",
            size=size,
            labels={"num_block": block, "theta": theta},
            scores={"cosine": 0.1 * number, "kl": 0.0},
            curves={"cosine_by_head": [[0.1 * number]]},
        )
        for number, (block, theta) in enumerate(points)
    ]


def test_an_ablation_varies_one_parameter_at_a_time() -> None:
    curve, heads = plots(ablation((8, 2e-3), (8, 1e-3), (8, 4e-3), (2, 2e-3), (4, 2e-3)))
    by_block, by_theta, kl_by_block, kl_by_theta = curve.figure.axes
    for axes, expected in ((by_block, [0.3, 0.4, 0.0]), (by_theta, [0.1, 0.0, 0.2])):
        assert np.asarray(axes.get_lines()[0].get_ydata(), dtype=float) == pytest.approx(expected)
    assert [len(axes.get_lines()) for axes in curve.figure.axes] == [1, 1, 1, 1]
    assert ticks(kl_by_block)[0] == ["2", "4", "8"]
    assert ticks(kl_by_theta)[0] == ["0.001", "0.002", "0.004"]
    assert list(maps(heads.figure)) == ["num_block 2  0.3000", "num_block 4  0.4000", "num_block 8  0.0000"]
    assert heads.title.endswith("clusterattn, size 128, theta 0.002")


def test_a_grid_of_parameters_has_a_line_for_each_value_of_the_other() -> None:
    curve, *_ = plots(ablation_run())
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in curve.figure.axes[:2]]  # type: ignore[union-attr]
    assert names == [
        ["theta 0.0001", "theta 0.001", "theta 0.003", "theta 0.01"],
        ["num_block 2", "num_block 8", "num_block 32"],
    ]


def test_an_ablation_with_two_windows_has_lines_and_maps_for_each() -> None:
    narrow = ablation((8, 1e-3), (2, 1e-3), (4, 1e-3))
    wide = [it.model_copy(update={"key": it.key[::-1], "window": 64}) for it in reversed(narrow)]
    curve, *heads = plots([*narrow, *wide])
    (by_block, _) = curve.figure.axes
    names = [f"clusterattn, window {window}" for window in (32, 64)]
    assert [text.get_text() for text in by_block.get_legend().get_texts()] == names  # type: ignore[union-attr]
    for line in by_block.get_lines():
        assert np.asarray(line.get_xdata()).tolist() == [0, 1, 2]
        assert np.asarray(line.get_ydata(), dtype=float) == pytest.approx([0.1, 0.2, 0.0])
    assert [plot.title for plot in heads] == [
        f"Cosine similarity by head for several num_block, {name}, size 128, theta 0.001" for name in names
    ]


def test_names_of_thetas_do_not_overlap() -> None:
    labels = [it.labels for it in ablation_points(128)]
    points = [(int(it["num_block"]), it["theta"]) for it in labels if "theta" in it]
    ngrams = [
        record(bench="ablation", method="ngram", labels={"n": n}, scores={"cosine": 0.5, "kl": 1})
        for n in (1, 2)
    ]
    curve, *_ = plots([*ablation(*points), *ngrams])
    curve.figure.draw_without_rendering()
    for axes in curve.figure.axes[-3:]:
        boxes = [it.get_window_extent() for it in axes.get_xticklabels()]
        assert len(boxes) > 1
        for one, following in pairwise(boxes):
            assert one.x1 < following.x0


def test_n_grams_are_a_curve_of_their_own_and_sizes_lines() -> None:
    ngrams = [
        record(bench="ablation", method="ngram", size=size, labels={"n": n}, scores={"cosine": 0.5})
        for n in (1, 2)
        for size in (128, 256)
    ]
    points = ablation((8, 1e-3), (2, 1e-3)) + ablation((8, 1e-3), (2, 1e-3), size=256)
    curve, *_ = plots([*points, *ngrams])
    assert [axes.get_xlabel() for axes in curve.figure.axes[2:]] == ["num_block", "n"]
    names = [text.get_text() for text in curve.figure.axes[1].get_legend().get_texts()]  # type: ignore[union-attr]
    assert names == ["size 128", "size 256"]


def test_a_method_has_one_colour_in_all_plots() -> None:
    for run in (needle_run, lines_run, longbench_run, perplexity_run):
        records = list(run(FEW))
        expected = {name: style.colour for name, style in styles(records).items()}
        for plot in plots(records):
            for axes in plot.figure.axes:
                named = {str(it.get_label()): it.lines[0] for it in axes.containers}  # type: ignore[attr-defined]
                named |= {str(it.get_label()): it for it in axes.get_lines()}
                drawn = {name: line.get_color() for name, line in named.items() if name in expected}
                assert drawn == {name: expected[name] for name in drawn}


@pytest.mark.parametrize(
    "bench", ["needle", "lines", "longbench", "perplexity", "hit-rate", "fit", "ablation"]
)
def test_every_plot_becomes_an_svg(bench: str) -> None:
    for number, plot in enumerate(plots(every_run(FEW)[bench])):
        assert inline_svg(plot, f"f{number}-").startswith("<svg")
        assert plot.title


def test_names_that_look_like_formulas_are_names() -> None:
    profile = "snapkv ($\\frac{$)"
    records = [
        *needle_run(("snapkv",), repeats=1),
        record(method=profile),
        record(method="_hidden", parameters={"name": "?"}),
    ]
    over_sizes, at_128, _ = plots(records)
    assert "$\\frac{$" in inline_svg(over_sizes, "f")
    assert "$\\frac{$" in inline_svg(at_128, "f")
    assert " _hidden" in legend(over_sizes.figure)


@pytest.mark.parametrize(
    "run", [samples_run, lambda: [record(bench="mine")], lambda: [record(scores={"rouge1": 0.5})]]
)
def test_what_has_nothing_to_draw_is_not_drawn(run: Callable[[], list[Record]]) -> None:
    assert plots(run()) == []


@pytest.mark.parametrize(("bench", "score"), [("hit-rate", "hit_rate"), ("fit", "cosine")])
def test_a_missing_curve_is_one_sentence(bench: str, score: str) -> None:
    with pytest.raises(DataError, match="that is a list of lists of numbers"):
        plots([record(bench=bench, scores={score: 0.5})])


def test_methods_without_the_score_are_left_out() -> None:
    records = [
        *needle_run(("snapkv",), sizes=(128,), repeats=1),
        record(method="topk", scores={"rouge1": 1.0}),
    ]
    (plot,) = plots(records)
    assert [title.split()[0] for title in maps(plot.figure)] == ["full", "snapkv"]


def test_one_value_everywhere_still_has_a_scale() -> None:
    records = [record(bench="fit", scores={"cosine": 1.0}, curves={"cosine_by_head": [[1.0, 1.0]]})]
    low, high = plots(records)[0].figure.axes[0].images[0].get_clim()
    assert low < 1 < high


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2000, "2k"),
        (1500, "1.5k"),
        (1024, "1024"),
        (500, "500"),
        (0.25, "0.25"),
        (1e-4, "0.0001"),
        ("qasper", "qasper"),
    ],
)
def test_ticks_are_short(value: float | str, text: str) -> None:
    assert tick_text(value) == text
