import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from clusterprof.methods import method_names
from clusterprof.report.figures import (
    INK,
    VARIABLES,
    Plot,
    drawing,
    inline_svg,
    new_figure,
    page_colours,
    save_plot,
    shown,
    styles,
)
from tests.evaluation.examples import record

HOSTILE = '<script>$x^</script> id="a" url(#b) 字'
# Machado, Oliveira and Fernandes (2009), severity 1.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(light: NDArray[np.float64]) -> NDArray[np.float64]:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(light, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    dark, light = sorted(
        float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


def plot_of(label: str) -> Plot:
    with drawing():
        figure = new_figure(2)
        panel = figure.subplots()
        panel.plot([0, 1], [0, 1], color=INK, marker="o", label=label)
        panel.imshow([[0, 1], [1, 0]], interpolation="none")
        panel.set_title(label)
        panel.legend()
    return Plot(label, figure)


def texts(svg: str) -> list[str]:
    return [
        "".join(it.itertext()).strip()
        for it in ElementTree.fromstring(svg).iter()
        if it.tag.endswith("}text")
    ]


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_methods_can_be_told_apart(deficiency: str, mode: int) -> None:
    colours = [INK if mode == 0 else "#e6e8ea", *(pair[mode] for pair in page_colours().values())]
    assert len(colours) == 1 + len(method_names())
    seen = [lab(DEFICIENCIES[deficiency] @ linear(colour)) for colour in colours]
    # 2.3 is said to be just noticeable.
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 10


def test_methods_stand_out_from_the_page() -> None:
    for light, dark in page_colours().values():
        assert contrast(light, "#ffffff") > 2.2
        assert contrast(dark, "#14171a") > 3.5


def test_a_method_looks_the_same_whoever_else_takes_part() -> None:
    names = ("full", *method_names())
    everybody = styles([record(method=name) for name in names])
    for name in names:
        assert styles([record(method=name)]) == {name: everybody[name]}
    assert len({style.colour for style in everybody.values()}) == len(names)
    assert len({style.marker for style in everybody.values()}) == len(names)


def test_variants_have_their_methods_colour_and_a_look_of_their_own() -> None:
    names = ("snapkv", "snapkv (a)", "snapkv (b)", "snapkv (c)", "h2o+decode")
    found = styles([record(method=name) for name in names])
    assert len({found[name].colour for name in names[:4]}) == 1
    assert len({str(found[name].line) for name in names[:4]}) == 4
    assert [found[name].filled for name in names] == [True, False, False, False, True]


def test_a_method_nobody_knows_is_drawn_too() -> None:
    style = styles([record(method="mine", parameters={"name": "mine"})])["mine"]
    assert style.colour in VARIABLES


def test_an_inline_svg_takes_colours_fonts_and_width_from_the_page() -> None:
    svg = inline_svg(plot_of("a title"), "f1-")
    root = ElementTree.fromstring(svg)
    assert root.attrib["viewBox"]
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "a title"
    assert "width" not in root.attrib
    assert "var(--ink)" in svg
    assert INK not in svg
    assert "font-family" not in svg
    assert "<style" not in svg
    assert "<?xml" not in svg
    assert "a title" in texts(svg)


def test_ids_are_the_plots_own_and_all_references_lead_somewhere() -> None:
    svg = inline_svg(plot_of("a"), "f1-")
    ids = re.findall(r'\bid="([^"]*)"', svg)
    assert ids
    assert all(it.startswith("f1-") for it in ids)
    assert len(set(ids)) == len(ids)
    referenced = re.findall(r'(?:url\(|href=")#([^)"]*)', svg)
    assert referenced
    assert set(referenced) <= set(ids)


def test_an_svg_names_no_other_file() -> None:
    svg = inline_svg(plot_of("a"), "f1-")
    targets = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', svg)
    assert targets
    assert all((a or b).startswith(("#", "data:image/png;base64,")) for a, b in targets)
    addresses = set(re.findall(r"https?://[^\"\s<]*", svg))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_names_are_text_and_nothing_else() -> None:
    svg = inline_svg(plot_of(HOSTILE), "f1-")
    assert "<script" not in svg
    assert texts(svg).count(HOSTILE) == 2


def test_the_same_plot_is_the_same_svg() -> None:
    assert inline_svg(plot_of("a"), "x") == inline_svg(plot_of("a"), "x")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_is_saved_with_its_title(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot{suffix}"
    save_plot(plot_of(HOSTILE), path)
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("snapkv", "snapkv"), ("_x", " _x"), ("x" * 40, "x" * 34 + "\n" + "x" * 6), ("a\uffffb", r"a\uffffb")],
)
def test_names_fit_into_a_legend(name: str, expected: str) -> None:
    assert shown(name) == expected
