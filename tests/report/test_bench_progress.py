import io

from rich.console import Console

from clusterprof.report.bench_progress import BenchProgress


def measure(*, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=terminal, markup=False, highlight=False)
    with BenchProgress(console) as progress:
        progress.begin(2)
        progress.measuring("60 tokens, full cache: prefill")
        progress.measuring("60 tokens, top-k: prefill")
        progress.end()
    return file.getvalue()


def test_a_log_says_what_is_measured_and_when_it_is_done() -> None:
    assert measure(terminal=False).splitlines() == [
        "Measuring 0/2",
        "Measuring 0/2  60 tokens, full cache: prefill",
        "Measuring 2/2  done",
    ]


def test_a_terminal_has_a_bar() -> None:
    assert "2/2" in measure(terminal=True)
