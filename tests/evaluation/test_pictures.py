import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from clusterprof.evaluation import pictures
from clusterprof.evaluation.clusters import HeadClusters, Run
from clusterprof.evaluation.pictures import draw_clusters, draw_decode_attention
from clusterprof.methods import ClusterAttn
from clusterprof.report.plots import PLOT_SUFFIXES

METHOD = ClusterAttn(num_block=1, theta=0.04)
FIRST: list[tuple[Run, str]] = [((8, 13), "the first cluster"), ((50, 51), "a gap")]


def positions(*runs: Run) -> torch.Tensor:
    return torch.tensor([position for run in runs for position in range(*run)], dtype=torch.int64)


def head(length: int = 60, layer: int = 3, **changes: torch.Tensor) -> HeadClusters:
    importance = torch.full((length,), 1e-3)
    importance[10] = 0.5
    found = {
        "importance": importance,
        "centres": torch.tensor([10]),
        "dropped": torch.tensor([20, 40]),
        "kept": positions((8, 13), (50, 51)),
        "clustered": positions((8, 13)),
        "filled": positions((50, 51)),
    }
    return HeadClusters(layer=layer, kv_head=1, method=METHOD, **{**found, **changes})


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Those that are drawn."""
    drawn: list[Figure] = []
    save = pictures._save

    def spying(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(pictures, "_save", spying)
    return drawn


def written(path: Path) -> list[str]:
    """All texts of an SVG."""
    return [
        "".join(element.itertext())
        for element in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]


def bars(found: PolyCollection) -> list[tuple[float, float]]:
    return [tuple(np.asarray(path.vertices)[:, 0][[0, 2]]) for path in found.get_paths()]


def test_a_panel_shows_what_became_of_the_prefix(figures: list[Figure], tmp_path: Path) -> None:
    draw_clusters([head()], [FIRST], tmp_path / "clusters.svg")
    panel = figures[0].axes[0]
    by_label = {artist.get_label(): artist for artist in panel.get_children()}
    for label, expected in (("kept: in a cluster", [(8, 13)]), ("kept: in a gap", [(50, 51)])):
        found = by_label[label]
        assert isinstance(found, PolyCollection)
        assert bars(found) == expected
    for label, points in (
        ("centre", [(10.5, 0.5)]),
        ("peak below theta", [(20.5, 1e-3), (40.5, 1e-3)]),
        ("theta", [(0, METHOD.theta), (1, METHOD.theta)]),
    ):
        line = by_label[label]
        assert isinstance(line, Line2D)
        np.testing.assert_allclose(np.asarray(line.get_xydata()), points, rtol=1e-6)
    assert panel.get_xlim() == (0, 60)


def test_texts_stand_beside_the_panel_of_their_head(tmp_path: Path) -> None:
    path = tmp_path / "clusters.svg"
    draw_clusters([head(), head(layer=7)], [FIRST, [((8, 13), "of the other head")]], path)
    texts = written(path)
    assert "layer 3, KV head 1" in texts
    assert "layer 7, KV head 1" in texts
    lines = [
        text.replace("\N{NO-BREAK SPACE}", " ") for text in texts if "attention" in text or text[:1] == "\xa0"
    ]
    assert lines == [
        "1  8 to 12, 50.4% of the attention",
        "   the first cluster",
        "2  50, 0.1% of the attention",
        "   a gap",
        "1  8 to 12, 50.4% of the attention",
        "   of the other head",
    ]


def test_a_maximum_is_no_share(tmp_path: Path) -> None:
    by_maximum = METHOD.model_copy(update={"importance": "max"})
    path = tmp_path / "clusters.svg"
    draw_clusters([replace(head(), method=by_maximum)], [FIRST], path)
    texts = [text.replace("\N{NO-BREAK SPACE}", " ") for text in written(path)]
    assert "1  8 to 12, importance 0.50 in all" in texts
    assert not any("%" in text for text in texts)


@pytest.mark.parametrize("suffix", PLOT_SUFFIXES)
def test_any_text_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"clusters{suffix}"
    texts = ["$x_1$ ^ \\frac", "问题是什么", "<b>&amp;</b>", "", "word " * 100]
    draw_clusters([head()], [[((8, 13), text) for text in texts]], path)
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        shown = " ".join(written(path)).replace("\N{NO-BREAK SPACE}", "")
        for text in texts:
            assert text.strip() in shown


def test_any_head_can_be_drawn(tmp_path: Path) -> None:
    heads = [
        head(filled=positions(), kept=positions((8, 13))),
        head(
            clustered=positions(), kept=positions((50, 51)), centres=positions(), dropped=positions((10, 11))
        ),
        head(dropped=positions()),
        head(importance=torch.zeros(60), centres=torch.tensor([0, 59])),
    ]
    draw_clusters(heads, [[]] * 4, tmp_path / "clusters.svg")
    assert written(tmp_path / "clusters.svg").count("layer 3, KV head 1") == 4


@pytest.mark.parametrize("length", [1501, 40_000])
def test_a_long_prefix_keeps_its_peaks(length: int, figures: list[Figure], tmp_path: Path) -> None:
    importance = torch.full((length,), 1e-4)
    importance[length - 2] = 0.7
    path = tmp_path / "clusters.svg"
    draw_clusters([head(importance=importance)], [[]], path)
    values, edges, _ = figures[0].axes[0].patches[0].get_data()  # type: ignore[attr-defined]
    assert len(values) <= 1500
    assert (edges[0], edges[-1]) == (0, length)
    peak = int(values.argmax())
    assert edges[peak] <= length - 2 < edges[peak + 1]
    assert values[peak] == pytest.approx(0.7)
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize(("heads", "suffix"), [(1, ".png"), (64, ".svg")])
def test_decode_attention_of_all_heads(
    heads: int, suffix: str, figures: list[Figure], tmp_path: Path
) -> None:
    attention = torch.rand(heads, 50) * 4
    path = tmp_path / f"decode{suffix}"
    draw_decode_attention(attention, 5, 128, path)
    panel = figures[0].axes[0]
    np.testing.assert_allclose(np.asarray(panel.images[0].get_array()), attention.clamp(min=0.01 * 128 / 50))
    assert panel.get_title() == "layer 5: attention to each prefix token, summed over 128 decoded tokens"
    assert path.stat().st_size > 0


def test_a_long_decode_attention_keeps_its_peaks(figures: list[Figure], tmp_path: Path) -> None:
    attention = torch.zeros(2, 7501)
    attention[1, 7400] = 3.0
    draw_decode_attention(attention, 0, 8, tmp_path / "decode.png")
    panel = figures[0].axes[0]
    shown = np.asarray(panel.images[0].get_array())
    row, column = np.unravel_index(shown.argmax(), shown.shape)
    left, right, *_ = panel.images[0].get_extent()
    width = (right - left) / shown.shape[1]
    assert row == 1
    assert column * width <= 7400 < (column + 1) * width
    assert panel.get_xlim() == (0, 7501)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        draw_clusters([head()], [FIRST], tmp_path / "nowhere" / "clusters.svg")
