"""The plot of a tune's sizes; the charts of evaluations are tested with their pages."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes

from clusterprof.methods import ClusterAttn, MethodConfig, SnapKV, TopK
from clusterprof.profiling.judge import Judgement, MethodResult
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.target import Target
from clusterprof.report.charts import tuned_plot
from clusterprof.statistics import mean_estimate

DEFAULT = ClusterAttn(num_block=8, theta=0.002)


def prompts(kl: float) -> tuple[Scores, ...]:
    return tuple(Scores(0.9, 0.7, 0.6, kl + 0.01 * n, 0.8, 1.5, -2.0) for n in range(5))


def judged(kl: float, *, rival: bool = True, held_out: bool = True) -> Judgement:
    methods: list[tuple[str, MethodConfig | None, float]] = [
        ("tuned", ClusterAttn(num_block=4, theta=0.003), kl),
        ("paper default", DEFAULT, 2 * kl),
        ("SnapKV", SnapKV(), 9),
        ("SnapKV tuned", SnapKV(kernel_size=15), 3 * kl),
        ("top-k", TopK(), 9),
        ("full", None, 0),
    ]
    return Judgement(
        tuple(
            MethodResult(label, method, prompts(value))
            for label, method, value in methods
            if rival or label != "SnapKV tuned"
        ),
        held_out,
    )


def panel_of(judgements: dict[int, Judgement], target: Target | None = None, seed: int = 0) -> Axes:
    [panel] = tuned_plot(judgements, "kl", target, seed=seed).figure.axes
    return panel


def lines(panel: Axes) -> dict[object, list[list[float]]]:
    return {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in panel.get_lines()}


def test_a_line_for_tuned_its_default_and_snapkv_tuned() -> None:
    panel = panel_of({256: judged(0.2), 512: judged(0.1)})
    # Means of five prompts that are 0.01 apart, side by side at places that the sizes name.
    assert lines(panel) == {
        "tuned": [[pytest.approx(-0.04), pytest.approx(0.22)], [pytest.approx(0.96), pytest.approx(0.12)]],
        "paper default": [[0, pytest.approx(0.42)], [1, pytest.approx(0.22)]],
        "SnapKV tuned": [
            [pytest.approx(0.04), pytest.approx(0.62)],
            [pytest.approx(1.04), pytest.approx(0.32)],
        ],
    }
    assert [label.get_text() for label in panel.get_xticklabels()] == ["256", "512"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("tokens kept per KV head", "kl ↓")


def test_intervals_are_those_of_the_profile() -> None:
    panel = panel_of({256: judged(0.2), 512: judged(0.1)}, seed=3)
    bars = [segment for bar in panel.collections for segment in np.asarray(bar.get_paths()[0].vertices)]
    expected = mean_estimate([each.kl for each in prompts(0.2)], seed=3)
    assert [place[1] for place in bars[:2]] == [expected.low, expected.high]
    # Each on its point.
    assert {place[0] for place in bars} == {place for line in lines(panel).values() for place, _ in line}
    # Two sizes, three methods, two ends.
    assert len(bars) == 12


def test_a_target_is_a_line_in_its_own_objective() -> None:
    panel = panel_of({256: judged(0.2)}, Target("agreement", 0.95))
    assert panel.get_ylabel() == "agreement ↑"
    assert lines(panel)["tuned"] == [[pytest.approx(-0.04), pytest.approx(0.8)]]
    assert [place[1] for place in lines(panel)["target, for 80 %"]] == [0.95, 0.95]


def test_a_tune_of_snapkv_has_no_other_of_its_kind() -> None:
    panel = panel_of({256: judged(0.2, rival=False), 512: judged(0.1, rival=False)})
    assert set(lines(panel)) == {"tuned", "paper default"}


def test_values_per_layer_that_won_at_one_size_are_on_the_line_of_the_tuned() -> None:
    tuned, *others = judged(0.1).methods
    layered = Judgement((replace(tuned, label="tuned per layer"), *others), held_out=True)
    assert len(lines(panel_of({256: judged(0.2), 512: layered}))["tuned"]) == 2


def test_lines_can_be_told_apart() -> None:
    panel = panel_of({256: judged(0.2), 512: judged(0.1)})
    looks = {(it.get_color(), it.get_marker(), it.get_linestyle()) for it in panel.get_lines()}
    assert len(looks) == 3


@pytest.mark.parametrize(("held_out", "seen"), [(True, "held-out prompts"), (False, "prompts tuned on")])
def test_the_title_says_which_prompts(held_out: bool, seen: str) -> None:
    plot = tuned_plot({256: judged(0.2, held_out=held_out)}, "kl", None, seed=0)
    assert plot.title == f"kl on {seen}, means with 95 % intervals"
