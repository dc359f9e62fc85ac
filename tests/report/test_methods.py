import io
from collections.abc import Sequence

from rich.console import Console

from clusterprof.methods import ClusterAttn, MethodConfig, SnapKV, TopK
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.record import MethodResult
from clusterprof.report.methods import methods_table, verdict

BOLD = "\x1b[1;32m"


def result(
    label: str, method: MethodConfig | None, cosine: float = 0.9, kl: float = 0.1, agreement: float = 0.8
) -> MethodResult:
    return MethodResult(label, method, Scores(cosine, 0.7, 0.6, kl, agreement, 1.5))


TUNED = ClusterAttn(num_block=4, theta=0.003)
DEFAULT = ClusterAttn(num_block=8, theta=0.002)
FULL = result("full", None, 1.0, 0.0, 1.0)


def rendered(results: list[MethodResult]) -> dict[str, list[str]]:
    """Cells of each row, with their colours."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(methods_table(results, size=256))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def said(
    results: list[MethodResult],
    *,
    searched: Sequence[str] = ("num_block", "theta"),
    objective: str = "cosine",
    samples: int = 8,
) -> list[str]:
    return verdict(results, searched=searched, objective=objective, samples=samples)


def bold(cells: list[str]) -> list[str]:
    return [cell.removeprefix(BOLD).removesuffix("\x1b[0m").strip() for cell in cells if BOLD in cell]


def test_the_best_of_each_column_stands_out_in_80_columns() -> None:
    rows = rendered(
        [
            result("tuned", TUNED, cosine=0.95),
            result("paper default", DEFAULT),
            result("StreamingLLM", TopK(), kl=0.05),
            FULL,
        ]
    )
    assert bold(rows["tuned"]) == ["0.9500", "0.7000", "0.6000", "0.8000", "1.5000"]
    assert bold(rows["paper default"]) == ["0.7000", "0.6000", "0.8000", "1.5000"]
    assert bold(rows["StreamingLLM"]) == ["0.7000", "0.6000", "0.0500", "0.8000", "1.5000"]
    assert rows["full"] == ["1.0000", "0.7000", "0.6000", "0.0000", "1.0000", "1.5000"]


def test_a_gain_is_told_with_both_points() -> None:
    [sentence] = said(
        [result("tuned", TUNED, cosine=0.95), result("paper default", DEFAULT), FULL],
    )
    assert sentence == (
        "Tuned (num_block 4, theta 0.003) beats the paper's default (num_block 8, theta 0.002) "
        "on cosine: 0.9500 against 0.9000, on the 8 prompts it was tuned on."
    )


def test_what_the_default_does_better_is_told_too() -> None:
    results = [
        result("tuned", TUNED, cosine=0.95, kl=0.9, agreement=0.1),
        result("paper default", DEFAULT),
        FULL,
    ]
    assert said(results)[1] == "The default is better on kl, agreement."


def test_a_difference_that_the_table_does_not_show_is_none() -> None:
    tuned = result("tuned", TUNED, cosine=0.90004, kl=0.10004)
    [sentence] = said([tuned, result("paper default", DEFAULT), result("SnapKV", SnapKV(), kl=0.1), FULL])
    assert " equals the paper's default " in sentence


def test_few_samples_are_told() -> None:
    results = [result("tuned", TUNED, cosine=0.95), result("paper default", DEFAULT), FULL]
    assert said(results, samples=2)[-1].startswith("2 prompts are few to tune on")


def test_no_gain_is_told_plainly() -> None:
    default = result("paper default", DEFAULT)
    assert "nothing better" in said([result("tuned", DEFAULT), default, FULL])[0]
    assert "equals" in said([result("tuned", TUNED), default, FULL])[0]
    worse = result("tuned", TUNED, cosine=0.85)
    assert "does worse than" in said([worse, default, FULL])[0]


def test_less_is_better_for_kl() -> None:
    better = [result("tuned", TUNED, kl=0.01), result("paper default", DEFAULT, kl=0.02), FULL]
    assert "beats" in said(better, objective="kl")[0]


def test_a_method_that_is_closer_by_kl_is_named() -> None:
    results = [
        result("tuned", TUNED, kl=0.2),
        result("paper default", DEFAULT, kl=0.3),
        result("SnapKV", SnapKV(), kl=0.1),
        result("top-k", TopK(), kl=0.4),
        FULL,
    ]
    [_, sentence] = said(results)
    assert "SnapKV keeps" in sentence
    assert "top-k" not in sentence
    assert "full's" not in sentence


def test_another_methods_default_is_its_own() -> None:
    results = [
        result("tuned", SnapKV(kernel_size=15, pooling="max"), cosine=0.95),
        result("SnapKV default", SnapKV()),
        result("ClusterAttn", DEFAULT, kl=0.05),
        FULL,
    ]
    found = said(results, searched=("kernel_size", "pooling"))
    assert found == [
        "Tuned (kernel_size 15, pooling max) beats SnapKV's default (kernel_size 5, pooling avg) "
        "on cosine: 0.9500 against 0.9000, on the 8 prompts it was tuned on.",
        "On these samples ClusterAttn keeps the next token closer to the full cache's (KL).",
    ]
    unchanged = [result("tuned", SnapKV()), *results[1:2], FULL]
    assert said(unchanged, searched=("kernel_size",)) == [
        "The search found nothing better than SnapKV's default (kernel_size 5)."
    ]


def test_a_method_without_parameters_has_nothing_to_tune() -> None:
    results = [result("tuned", TopK()), result("top-k default", TopK()), FULL]
    assert said(results, searched=()) == ["top-k has nothing to tune; the profile holds it as it is."]
