import io

from rich.console import Console

from clusterprof.cli._answer import Answer
from clusterprof.report.answers import answer_summary, comparison_summary, comparison_table

FULL = Answer("It is [bold]42[/bold].", 80_000_000, 80_000_000, 6.5, 8.0)
SMALL = Answer("It is 41.", 10_000_000, 80_000_000, 6.6, 10.0)


def test_summary_of_one_answer() -> None:
    assert answer_summary(SMALL, prompt_tokens=2048, kept_tokens=256) == (
        "2,048 prompt tokens, 256 kept; KV cache 10.0 MB instead of 80.0 MB; "
        "first token after 6.6 s, then 10.0 tokens/s"
    )


def test_both_answers_stand_side_by_side() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(FULL, SMALL, kept_tokens=256))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "full cache" in lines[1]
    assert "256 tokens kept" in lines[1]
    # The model's own brackets are text.
    assert "It is [bold]42[/bold]." in lines[3]
    assert "It is 41." in lines[3]


def test_the_ratios_are_the_right_way_round() -> None:
    assert comparison_summary(FULL, SMALL) == (
        "KV cache 8.0 times smaller; decoding 1.25 times as fast; the answers differ"
    )
    assert comparison_summary(FULL, FULL) == (
        "KV cache as large as without; decoding 1.00 times as fast; the answers are the same"
    )


def test_an_answer_of_one_token_has_no_speed() -> None:
    one = Answer("42", 1, 1, 6.5, None)
    assert answer_summary(one, prompt_tokens=8, kept_tokens=8).endswith("first token after 6.5 s")
    assert "decoding" not in comparison_summary(one, one)
