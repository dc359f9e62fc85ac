import pytest

from clusterprof.report.console import message_console, result_console, say
from clusterprof.text import one_line


def test_one_line_escapes_what_a_terminal_would_obey() -> None:
    assert one_line("a\nb\x1b[31m\u202eé") == "a\\nb\\x1b[31m\\u202eé"


def test_text_is_no_markup_and_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "see [bold]file[/bold] :smile: " * 20
    say(message_console(), sentence)
    say(result_console(), "result")
    captured = capsys.readouterr()
    assert captured.err == sentence + "\n"
    assert captured.out == "result\n"


def test_a_log_is_wider_than_a_terminal_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert result_console().width == 120
    monkeypatch.setenv("COLUMNS", "66")
    assert result_console().width == 66
