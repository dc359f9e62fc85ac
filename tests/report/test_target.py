import io

import pytest
from rich.console import Console

from clusterprof.profiling.target import Target, TargetResult
from clusterprof.report.target import target_table, target_verdict

TARGET = Target("agreement", 0.95)
MET = TargetResult(100, 87, 0.80158, 0.95512, met=True)
NOT = TargetResult(100, 86, 0.79019, 0.92, met=False)
# A bound that must not be rounded to what was asked for.
NEARLY = TargetResult(5000, 4046, 0.79996, 0.94, met=False)
FEW = TargetResult(9, 9, 0.71687, None, met=False)
NONE = TargetResult(0, 0, 0.0, None, met=False)


def cells(table: object) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def test_each_size_has_what_its_prompts_show() -> None:
    table = target_table(TARGET, {128: NONE, 256: FEW, 512: NEARLY, 1024: MET})
    assert str(table.title) == "target: agreement of at least 0.95 for at least 80 % of prompts"
    assert cells(table) == [
        ["128", "0 of 0", "-", "0.0 %", "-", "not shown"],
        ["256", "9 of 9", "100 %", "71.6 %", "-", "not shown"],
        ["512", "4046 of 5000", "81 %", "79.9 %", "0.9400", "not shown"],
        ["1024", "87 of 100", "87 %", "80.1 %", "0.9551", "met"],
    ]


def test_less_is_better_for_some() -> None:
    assert "kl of at most 0.05 for" in str(target_table(Target("kl", 0.05), {64: MET}).title)
    assert "kl is at most 0.05 for 87" in target_verdict(Target("kl", 0.05), {64: MET}, [])[0]


def test_the_smallest_size_is_told_and_what_came_after_it() -> None:
    assert target_verdict(TARGET, {256: NOT, 512: MET, 1024: MET}, [64, 128]) == [
        "Target met at size 512: agreement is at least 0.95 for 87 of 100 held-out prompts, so with 95 % confidence "
        "for at least 80.1 % of all prompts like them (80 % asked for).",
        "It is not shown at size 256: agreement is at least 0.95 for 86 of 100 held-out prompts, so with 95 % "
        "confidence for at least 79.0 % of all prompts like them (80 % asked for); more of them may show it, see "
        "--holdout.",
        "Not tuned, being smaller than that: size 64, 128.",
    ]


def test_a_target_that_is_not_met_is_told_with_what_was_reached() -> None:
    first, reached = target_verdict(TARGET, {1024: NOT}, [])
    assert first.startswith(
        "Target not shown to be met at size 1024: agreement is at least 0.95 for 86 of 100 "
    )
    assert reached == "What 80 % of prompts are shown to reach there is 0.9200."


@pytest.mark.parametrize("result", [FEW, NONE])
def test_too_few_prompts_are_told(result: TargetResult) -> None:
    assert target_verdict(TARGET, {1024: result}, []) == [
        f"Target not shown to be met at size 1024: only {result.prompts} of the held-out prompts could be used, and "
        "showing it takes 14; raise --holdout."
    ]
    assert target_verdict(TARGET, {512: result, 1024: MET}, [])[1].startswith(
        f"It is not shown at size 512: only {result.prompts} of the held-out prompts could be used"
    )


def test_where_too_few_prompts_meet_it_more_are_not_advised() -> None:
    failed = TargetResult(100, 70, 0.61, 0.8, met=False)
    assert "--holdout" not in target_verdict(TARGET, {1024: failed}, [])[0]
    assert "more of them may show it, see --holdout." in target_verdict(TARGET, {1024: NOT}, [])[0]
