import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from clusterprof.benchmarking.results import Decode
from clusterprof.benchmarking.subjects import FULL, PREALLOCATED, Subject
from clusterprof.methods import TopK
from clusterprof.profile import Compression
from clusterprof.report import plots
from clusterprof.report.plots import PLOT_SUFFIXES, plot_decode_speed

TOPK = Subject("topk", "top-k", Compression(size=512, window=32, method=TopK()))
SUBJECTS = (FULL, PREALLOCATED, TOPK)


def decoded(tokens: int, batch: int, subject: Subject, speed: float | None) -> Decode:
    return Decode(tokens, batch, 1, subject.name, True, speed, None, None, None, None, None)


RESULTS = [
    decoded(2000, 1, FULL, 9.0),
    decoded(1000, 1, FULL, 10.0),
    decoded(1000, 8, FULL, 20.0),
    decoded(2000, 8, FULL, None),
    decoded(1000, 8, TOPK, 60.0),
    decoded(2000, 8, TOPK, 59.0),
]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes that are drawn."""
    drawn: list[Axes] = []
    draw = plots._draw

    def spying(panel: Axes, *args: object) -> None:
        drawn.append(panel)
        draw(panel, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(plots, "_draw", spying)
    return drawn


def test_a_panel_per_batch_size_and_a_line_per_cache(panels: list[Axes], tmp_path: Path) -> None:
    plot_decode_speed(RESULTS, SUBJECTS, tmp_path / "speed.svg")
    lines = {
        (panel.get_title(), line.get_label()): np.asarray(line.get_xydata()).tolist()
        for panel in panels
        for line in panel.get_lines()
    }
    assert lines == {
        ("batch 1", "full cache"): [[1000, 10], [2000, 9]],
        ("batch 8", "full cache"): [[1000, 20]],
        ("batch 8", "top-k"): [[1000, 60], [2000, 59]],
    }


def test_a_cache_looks_the_same_in_every_panel(panels: list[Axes], tmp_path: Path) -> None:
    results = [decoded(1000, 1, TOPK, 11.0), decoded(1000, 8, FULL, 20.0), decoded(1000, 8, TOPK, 60.0)]
    plot_decode_speed(results, SUBJECTS, tmp_path / "speed.svg")
    looks = {
        (line.get_label(), line.get_color(), line.get_marker()) for panel in panels for line in panel.lines
    }
    assert len(looks) == 2


def test_axes_start_at_zero_and_are_named(panels: list[Axes], tmp_path: Path) -> None:
    plot_decode_speed(RESULTS, SUBJECTS, tmp_path / "speed.svg")
    assert panels[0].get_ylabel() == "decoded tokens per second"
    for panel in panels:
        assert panel.get_xlabel() == "prompt tokens"
        assert panel.get_ylim()[0] == 0


def test_the_legend_names_what_is_missing_in_the_last_panel(panels: list[Axes], tmp_path: Path) -> None:
    results = [decoded(1000, 1, FULL, 10.0), decoded(1000, 8, FULL, None), decoded(1000, 8, TOPK, 60.0)]
    plot_decode_speed(results, SUBJECTS, tmp_path / "speed.svg")
    [legend] = panels[0].get_figure(root=True).legends  # type: ignore[union-attr]
    assert [text.get_text() for text in legend.get_texts()] == ["full cache", "top-k"]


def test_a_batch_of_which_nothing_was_measured_has_no_panel(panels: list[Axes], tmp_path: Path) -> None:
    plot_decode_speed([*RESULTS, decoded(1000, 64, FULL, None)], SUBJECTS, tmp_path / "speed.svg")
    assert [panel.get_title() for panel in panels] == ["batch 1", "batch 8"]


@pytest.mark.parametrize("suffix", PLOT_SUFFIXES)
def test_the_suffix_says_the_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"speed{suffix}"
    plot_decode_speed(RESULTS, SUBJECTS, path)
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
