import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from clusterprof.methods import ClusterAttn, MethodConfig, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling.judge import Judgement, MethodResult
from clusterprof.profiling.objective import ObjectiveName, Scores
from clusterprof.profiling.per_layer import PerLayer
from clusterprof.profiling.tune import SetAside
from clusterprof.report.methods import (
    differences_table,
    methods_table,
    per_layer_verdict,
    set_aside_verdict,
    sizes_table,
    verdict,
)
from clusterprof.statistics import Estimate

BOLD = "\x1b[1;32m"
ABOVE = Estimate(0.02, 0.01, 0.03, 8)
AROUND = Estimate(0.02, -0.01, 0.05, 8)
BELOW = Estimate(-0.02, -0.03, -0.01, 8)


def result(
    label: str,
    method: MethodConfig | None,
    cosine: float = 0.9,
    kl: float = 0.1,
    agreement: float = 0.8,
    behind: Estimate | None = None,
) -> MethodResult:
    return MethodResult(label, method, (Scores(cosine, 0.7, 0.6, kl, agreement, 1.5, -2.0),), behind)


TUNED = ClusterAttn(num_block=4, theta=0.003)
DEFAULT = ClusterAttn(num_block=8, theta=0.002)
SPACE = {"num_block": (1, 32), "theta": (1e-5, 0.1)}
FULL = result("full", None, 1.0, 0.0, 1.0)


def judgement(*methods: MethodResult, prompts: int = 8, held_out: bool = True) -> Judgement:
    """The tuned method, its default and others, and the full cache."""
    return Judgement(
        tuple(replace(each, per_prompt=each.per_prompt * prompts) for each in (*methods, FULL)), held_out
    )


def against_default(behind: Estimate | None = ABOVE, prompts: int = 8, held_out: bool = True) -> Judgement:
    tuned = result("tuned", TUNED, cosine=0.95)
    return judgement(
        tuned, result("paper default", DEFAULT, behind=behind), prompts=prompts, held_out=held_out
    )


def rows_of(table: Any) -> dict[str, list[str]]:
    """Cells of each row, with their colours."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def title_of(table: Any) -> str:
    return str(table.title)


def said(
    judged: Judgement,
    *,
    space: Sequence[str] = ("num_block", "theta"),
    objective: ObjectiveName = "cosine",
) -> list[str]:
    return verdict(judged, space=dict.fromkeys(space), objective=objective)


def bold(cells: list[str]) -> list[str]:
    return [cell.removeprefix(BOLD).removesuffix("\x1b[0m").strip() for cell in cells if BOLD in cell]


def test_the_best_of_each_column_stands_out_in_80_columns() -> None:
    table = methods_table(
        judgement(
            result("tuned", TUNED, cosine=0.95),
            result("paper default", DEFAULT),
            result("StreamingLLM", TopK(), kl=0.05),
        ),
        size=256,
        space=SPACE,
    )
    rows = rows_of(table)
    assert bold(rows["tuned"]) == ["-2.0000", "0.8000", "1.5000", "0.9500", "0.6000"]
    assert bold(rows["paper default"]) == ["-2.0000", "0.8000", "1.5000", "0.6000"]
    assert bold(rows["StreamingLLM"]) == ["-2.0000", "0.0500", "0.8000", "1.5000", "0.6000"]
    assert rows["full"] == ["-2.0000", "0.0000", "1.0000", "1.5000", "1.0000", "0.6000"]


@pytest.mark.parametrize(
    ("prompts", "held_out", "title"),
    [
        (8, True, "256 tokens kept per head, 8 prompts not tuned on"),
        (1, True, "256 tokens kept per head, 1 prompt not tuned on"),
        (8, False, "256 tokens kept per head, 8 prompts it was tuned on"),
    ],
)
def test_the_table_says_on_which_prompts(prompts: int, held_out: bool, title: str) -> None:
    judged = against_default(prompts=prompts, held_out=held_out)
    assert title_of(methods_table(judged, size=256, space=SPACE)) == title


def differences(objective: ObjectiveName = "cosine", *behind: Estimate) -> dict[str, list[str]]:
    methods = [result(f"other {i}", SnapKV(), behind=each) for i, each in enumerate(behind)]
    return rows_of(differences_table(judgement(result("tuned", TUNED), *methods), objective))


def test_differences_have_intervals_and_what_they_show_in_80_columns() -> None:
    too_few, unsure = Estimate(0.5, None, None, 2), Estimate(0.5, 0.4, 0.6, 5)
    rows = differences("cosine", ABOVE, AROUND, BELOW, too_few, unsure, Estimate(0.0, 0.0, 0.0, 8))
    # Neither the tuned method itself nor the full cache.
    assert len(rows) == 6
    assert rows["other 0"][:2] == ["+0.0200", "+0.0100 to +0.0300"]
    assert rows["other 0"][2].split() == ["\x1b[32mbetter", "\x1b[0m"]
    assert rows["other 1"] == ["+0.0200", "-0.0100 to +0.0500", "not shown to differ"]
    assert rows["other 2"][:2] == ["-0.0200", "-0.0300 to -0.0100"]
    assert rows["other 2"][2].split() == ["\x1b[31mworse", "\x1b[0m"]
    assert rows["other 3"] == ["+0.5000", "too few prompts", "not known"]
    assert rows["other 4"] == ["+0.5000", "+0.4000 to +0.6000", "not known"]
    assert rows["other 5"] == ["+0.0000", "+0.0000 to +0.0000", "not shown to differ"]


@pytest.mark.parametrize("objective", ["kl", "loss"])
def test_less_is_better_for_some(objective: ObjectiveName) -> None:
    rows = differences(objective, ABOVE, AROUND, BELOW)
    assert ["worse" in rows["other 0"][-1], "better" in rows["other 2"][-1]] == [True, True]
    assert rows["other 1"][-1] == "not shown to differ"
    assert title_of(differences_table(against_default(), objective)).endswith("(lower is better)")
    assert title_of(differences_table(against_default(), "agreement")).endswith("(higher is better)")


def test_sizes_are_rows_of_the_tuned_method() -> None:
    sizes = {256: 0.91, 512: 0.95}
    table = sizes_table(
        [
            (size, judgement(result("tuned", TUNED, cosine=cosine), result("paper default", DEFAULT)))
            for size, cosine in sizes.items()
        ]
    )
    rows = rows_of(table)
    assert list(rows) == ["256", "512"]
    assert rows["512"] == ["-2.0000", "0.1000", "0.8000", "1.5000", "0.9500", "0.6000"]


def test_a_gain_on_held_out_prompts_is_told_with_both_points() -> None:
    [sentence] = said(against_default(ABOVE))
    assert sentence == (
        "Tuned (num_block 4, theta 0.003) beats the paper's default (num_block 8, theta 0.002) "
        "on cosine: 0.9500 against 0.9000, on 8 prompts not tuned on."
    )


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (ABOVE, "beats"),
        (BELOW, "does worse than"),
        # The mean is higher, and the interval reaches zero.
        (AROUND, "is not shown to be better than"),
        (Estimate(0.0, 0.0, 0.0, 8), "is not shown to be better than"),
    ],
)
@pytest.mark.parametrize("held_out", [True, False])
def test_no_gain_is_told_plainly(behind: Estimate, words: str, held_out: bool) -> None:
    sentence = said(against_default(behind, held_out=held_out))[0]
    assert f"Tuned (num_block 4, theta 0.003) {words} the paper's default (" in sentence


def test_what_was_not_held_out_is_told() -> None:
    first, second = said(against_default(held_out=False))
    assert first.endswith("on 8 prompts it was tuned on.")
    assert second == (
        "No prompt was held out, so this says how well the search did, not how well the profile will do on others."
    )


@pytest.mark.parametrize(("held_out", "words"), [(True, "cannot be told from"), (False, "is compared with")])
@pytest.mark.parametrize(("low", "high", "prompts"), [(None, None, 2), (0.4, 0.6, 5)])
def test_too_few_prompts_show_nothing(
    held_out: bool, words: str, low: float | None, high: float | None, prompts: int
) -> None:
    behind = Estimate(0.5, low, high, prompts)
    first, *_, last = said(against_default(behind, prompts=prompts, held_out=held_out))
    assert f"{words} the paper's default" in first
    assert last == (
        f"There are few prompts to judge by ({prompts}); give more data, or raise --holdout, which tuning on fewer "
        "(--samples) leaves more rows for."
    )
    assert len(said(against_default(Estimate(0.5, 0.4, 0.6, 6), prompts=6))) == 1


def test_the_default_as_the_result_is_told() -> None:
    default = result("paper default", DEFAULT, behind=Estimate(0.0, 0.0, 0.0, 8))
    assert said(judgement(result("tuned", DEFAULT), default)) == [
        "The search found nothing that is shown to be better than the paper's default (num_block 8, theta 0.002)."
    ]


@pytest.mark.parametrize("objective", ["kl", "loss"])
def test_less_of_the_objective_is_a_gain(objective: ObjectiveName) -> None:
    assert "beats" in said(against_default(BELOW), objective=objective)[0]
    assert "does worse than" in said(against_default(ABOVE), objective=objective)[0]


def test_methods_that_are_closer_by_kl_are_named_the_default_too() -> None:
    tuned = result("tuned", TUNED, kl=0.2)
    default = result("paper default", DEFAULT, kl=0.3, behind=ABOVE)
    others = [
        result("SnapKV", SnapKV(), kl=0.1, behind=ABOVE),
        # What the table does not show is no difference.
        result("SnapKV tuned", SnapKV(kernel_size=15), kl=0.19999, behind=ABOVE),
        result("top-k", TopK(), kl=0.4, behind=ABOVE),
    ]
    [_, sentence] = said(judgement(tuned, default, *others))
    assert sentence == "On these prompts SnapKV keeps the next token closer to the full cache's (KL)."
    closer = result("paper default", DEFAULT, kl=0.15, behind=ABOVE)
    [_, sentence] = said(judgement(tuned, closer, *others))
    assert sentence.startswith("On these prompts the paper's default and SnapKV keep the next token closer")
    third = result("StreamingLLM", TopK(), kl=0.1, behind=ABOVE)
    [_, sentence] = said(judgement(tuned, closer, *others, third))
    assert sentence.startswith(
        "On these prompts the paper's default, SnapKV and StreamingLLM keep the next token"
    )


def test_another_methods_default_is_its_own() -> None:
    default = result("SnapKV default", SnapKV(), behind=ABOVE)
    found = said(
        judgement(
            result("tuned", SnapKV(kernel_size=15, pooling="max"), cosine=0.95),
            default,
            result("ClusterAttn", DEFAULT, kl=0.05, behind=ABOVE),
        ),
        space=("kernel_size", "pooling"),
    )
    assert found == [
        "Tuned (kernel_size 15, pooling max) beats SnapKV's default (kernel_size 5, pooling avg) "
        "on cosine: 0.9500 against 0.9000, on 8 prompts not tuned on.",
        "On these prompts ClusterAttn keeps the next token closer to the full cache's (KL).",
    ]
    assert said(judgement(result("tuned", SnapKV()), default), space=("kernel_size",)) == [
        "The search found nothing that is shown to be better than SnapKV's default (kernel_size 5)."
    ]


@pytest.mark.parametrize(
    ("difference", "numbers", "why"),
    [
        (
            Estimate(-0.1878, -0.475, 0.0755, 8),
            "-4.4307 against -4.2429, difference -0.1878, 95 %: -0.4750 to +0.0755",
            "too little to show that it is better",
        ),
        (
            Estimate(-0.2, -0.3, -0.1, 5),
            "-4.4307 against -4.2307, difference -0.2000",
            "fewer than 6 prompts cannot show that it is better",
        ),
        (
            Estimate(-0.2, None, None, 2),
            "-4.4307 against -4.2307, difference -0.2000",
            "fewer than 6 prompts cannot show that it is better",
        ),
    ],
)
@pytest.mark.parametrize(
    ("taken", "start"), [(DEFAULT, "the paper's default"), (TUNED, "tuned SnapKV's values")]
)
def test_what_the_search_found_and_the_profile_does_not_have_is_told(
    difference: Estimate, numbers: str, why: str, taken: ClusterAttn, start: str
) -> None:
    aside = SetAside(ClusterAttn(num_block=19, theta=0.00376), -4.4307, difference)
    judged = judgement(result("tuned", taken), result("paper default", DEFAULT, behind=AROUND))
    sentence = set_aside_verdict(
        aside, judged, space=dict.fromkeys(("num_block", "theta")), objective="log_kl"
    )
    assert sentence == (
        f"On the {difference.samples} prompts tuned on, the search did better with num_block 19, theta 0.00376 (log_kl "
        f"{numbers}): {why}, so the profile has what the search began with, {start}."
    )


@pytest.mark.parametrize(
    ("behind", "objective", "told"),
    [
        (ABOVE, "log_kl", True),
        (BELOW, "log_kl", False),
        (AROUND, "log_kl", False),
        (replace(ABOVE, samples=5), "log_kl", False),
        (BELOW, "agreement", True),
        (ABOVE, "agreement", False),
        # The attention of two methods cannot be compared.
        (BELOW, "cosine", False),
    ],
)
def test_what_is_shown_to_be_better_is_named_with_what_tunes_it(
    behind: Estimate, objective: ObjectiveName, told: bool
) -> None:
    tuned, default = result("tuned", TUNED), result("paper default", DEFAULT, behind=AROUND)
    rival = result("SnapKV tuned", SnapKV(kernel_size=15, pooling="max"), behind=behind)
    sentence = (
        f"SnapKV tuned is shown to be better on {objective} than the tuned values; --method snapkv makes a profile of "
        "it."
    )
    assert (sentence in said(judgement(tuned, default, rival), objective=objective)) == told


@pytest.mark.parametrize(
    ("label", "method", "makes"),
    [("SnapKV", SnapKV(), False), ("top-k", TopK(), True), ("StreamingLLM", StreamingLLM(), False)],
)
def test_a_default_that_is_better_is_named_with_what_makes_a_profile_of_it(
    label: str, method: MethodConfig, makes: bool
) -> None:
    tuned, default = result("tuned", TUNED), result("paper default", DEFAULT, behind=AROUND)
    [sentence] = [
        each
        for each in said(judgement(tuned, default, result(label, method, behind=ABOVE)), objective="log_kl")
        if each.startswith(f"{label} is shown to be better on log_kl than the tuned values")
    ]
    assert ("--method" in sentence) == makes


def test_a_method_without_parameters_has_nothing_to_tune() -> None:
    judged = judgement(result("tuned", TopK()), result("top-k default", TopK(), behind=AROUND))
    assert said(judged, space=()) == ["top-k has nothing to tune; the profile holds it as it is."]
    unseen = replace(judged, held_out=False)
    assert title_of(methods_table(unseen, size=256, space={})) == "256 tokens kept per head, 8 prompts"


def test_what_keeps_the_same_as_another_method_is_told() -> None:
    def judged(theirs: float) -> list[str]:
        tuned = result("tuned", TUNED, cosine=0.95)
        others = (
            result("SnapKV", SnapKV(), behind=ABOVE),
            result("SnapKV tuned", SnapKV(), theirs, behind=AROUND),
        )
        return said(judgement(tuned, result("paper default", DEFAULT, behind=ABOVE), *others))

    assert "On these prompts it keeps the same tokens as SnapKV tuned." in judged(0.95)
    assert not any("same tokens" in sentence for sentence in judged(0.9500001))


MIXED = (LayerOverride(layers=(0, 1), method=ClusterAttn(num_block=4, theta=0.25)),)
FOUND = PerLayer(Compression(size=256, window=32, method=TUNED, overrides=MIXED), tried=12, replays=1096)


def per_layer_judgement(*, wins: bool, behind: Estimate, prompts: int = 8) -> Judgement:
    alike = result("tuned uniformly", TUNED, cosine=0.93, behind=behind if wins else None)
    layered = replace(
        result("tuned per layer", TUNED, cosine=0.95 if wins else 0.92, behind=None if wins else behind),
        overrides=MIXED,
    )
    first, last = (layered, alike) if wins else (alike, layered)
    return judgement(first, result("paper default", DEFAULT, behind=ABOVE), last, prompts=prompts)


@pytest.mark.parametrize(
    ("wins", "behind", "sentence"),
    [
        (
            True,
            ABOVE,
            "Values per layer won, and the profile has them: cosine 0.9500 against 0.9300 with the same values in all "
            "layers, on 8 prompts not tuned on (tuned minus other, 95 %: +0.0100 to +0.0300); 12 combinations "
            "tried in 1,096 more replays.",
        ),
        (
            False,
            AROUND,
            "Values per layer are not shown to be better, and the profile has none: cosine 0.9200 against 0.9300 with "
            "the same values in all layers, on 8 prompts not tuned on (tuned minus other, 95 %: -0.0100 to +0.0500); "
            "12 combinations tried in 1,096 more replays.",
        ),
    ],
)
def test_whether_values_per_layer_won_is_told(wins: bool, behind: Estimate, sentence: str) -> None:
    assert per_layer_verdict(per_layer_judgement(wins=wins, behind=behind), FOUND, "cosine") == sentence


def test_that_nothing_was_better_in_groups_of_layers_is_told() -> None:
    assert per_layer_verdict(against_default(), PerLayer(None, tried=3, replays=15), "cosine") == (
        "Values per layer have nothing to offer: on the tuning prompts nothing was better on cosine than the same "
        "values in all layers; 3 combinations tried in 15 more replays."
    )


def test_values_per_layer_are_told_with_the_point() -> None:
    sentence = said(per_layer_judgement(wins=True, behind=ABOVE))[0]
    assert sentence.startswith(
        "Tuned (num_block 4, theta 0.003; layers 0 to 1: theta 0.25) beats the paper's"
    )
    # They alone may be what the search found.
    layered = replace(result("tuned per layer", DEFAULT, cosine=0.95), overrides=MIXED)
    judged = judgement(layered, result("paper default", DEFAULT, behind=ABOVE))
    assert "beats" in said(judged)[0]
