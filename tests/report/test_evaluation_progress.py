import io

import pytest
from rich.console import Console

from clusterprof.data import Message, Prompt, Row
from clusterprof.evaluation.tasks import Task
from clusterprof.report.evaluation_progress import EvaluationProgress
from tests.evaluation.examples import record

CLOCK = "clusterprof.report.evaluation_progress.time.monotonic"


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=140, force_terminal=terminal, markup=False, highlight=False), file


def task(name: str, tokens: int = 2000) -> Task:
    row = Row(name, (Message("user", "?"),))
    return Task("needle", row, Prompt(name, tuple(range(tokens)), None, 0), {}, (), 8)


def measure(progress: EvaluationProgress, known: int = 1) -> None:
    """A run of three prompts with two results each, one of which fails in the middle."""
    progress.begin(3, 6, known)
    progress.measuring(task("first"), 2 - known)
    for _ in range(2 - known):
        progress.measured(record())
    progress.measuring(task("second\x1b[2J"), 2)
    progress.measured(record())
    progress.left_out(task("second\x1b[2J"), "out of\nmemory")
    progress.measuring(task("third", 300), 2)
    for _ in range(2):
        progress.measured(record())


def test_a_log_tells_what_happens() -> None:
    log, file = console(terminal=False)
    with EvaluationProgress(log) as progress:
        measure(progress)
    lines = file.getvalue().splitlines()
    assert lines[0] == "run      3 prompts, 6 results, 1 of them found in the file"
    assert lines[1] == "Measuring 1/6"
    assert lines[2].startswith("Measuring 2/6  needle first (2,000 tokens), about ")
    assert "second\\x1b[2J is left out: out of\\nmemory" in lines
    assert all(line.isprintable() for line in lines)
    assert (progress.done, progress.results, progress.dropped) == (5, 6, 1)


def test_the_last_result_is_always_told() -> None:
    log, file = console(terminal=False)
    progress = EvaluationProgress(log)
    progress.begin(1, 50, 0)
    progress.measuring(task("only"), 50)
    for _ in range(50):
        progress.measured(record())
    lines = file.getvalue().splitlines()
    assert lines[-1] == "Measuring 50/50  needle only (2,000 tokens)"
    assert len(lines) < 10


def test_a_run_that_is_complete_has_nothing_to_measure() -> None:
    log, file = console(terminal=False)
    with EvaluationProgress(log) as progress:
        progress.begin(3, 6, 6)
    assert file.getvalue() == "run      3 prompts, 6 results, 6 of them found in the file\n"
    assert (progress.done, progress.results) == (6, 6)


def test_a_new_run_does_not_speak_of_what_is_found() -> None:
    log, file = console(terminal=False)
    EvaluationProgress(log).begin(1_000, 12_000, 0)
    assert file.getvalue().splitlines()[0] == "run      1,000 prompts, 12,000 results"


def test_time_left_is_by_what_was_measured_now(monkeypatch: pytest.MonkeyPatch) -> None:
    # Made, begun, and four seconds later the first result.
    times = iter([0.0, 100.0, 104.0, 104.0])
    monkeypatch.setattr(CLOCK, lambda: next(times))
    log, file = console(terminal=False)
    progress = EvaluationProgress(log)
    progress.begin(3, 60, 29)
    progress.measuring(task("one"), 1)
    progress.measured(record())
    # Thirty to go at four seconds each; the 29 that were found took no time.
    assert file.getvalue().splitlines()[-1] == "Measuring 30/60  needle one (2,000 tokens), about 2:00 left"


def test_a_terminal_has_a_bar_that_ends_with_the_context() -> None:
    screen, file = console(terminal=True)
    with EvaluationProgress(screen) as progress:
        measure(progress, known=0)
        assert screen._live_stack
    assert not screen._live_stack
    assert "5/6" in file.getvalue()
    assert "needle third (300 tokens)" in file.getvalue()


def test_an_error_clears_up_too() -> None:
    screen, _ = console(terminal=True)
    progress = EvaluationProgress(screen)
    progress.begin(1, 1, 0)
    assert screen._live_stack
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert not screen._live_stack
