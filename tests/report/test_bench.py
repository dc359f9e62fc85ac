import io
from dataclasses import replace

from rich.console import Console

from clusterprof.benchmarking.capacity import Capacity
from clusterprof.benchmarking.results import Decode, Prefill
from clusterprof.benchmarking.run import BenchReport
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import subjects
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.report.bench import bench_notes, bench_tables

REPORT = BenchReport(
    model={"context": 8192, "weight_bytes": 538_000_000},
    environment={"attention_backend": "sdpa"},
    settings=BenchSettings(tokens=(500, 4000), batch_sizes=(1, 8), repeats=3),
    subjects=tuple(
        subjects(Compression(size=512, window=32, method=ClusterAttn.paper_default(512)), tuned=False)
    ),
    memory_bytes=24 * 2**30,
    prefill=[
        Prefill(500, 1, "ours", False, 1.5, 1.01, 30_000_000, 5_000_000, None),
        Prefill(4000, 1, "full", False, 12.5, 1.0, 300_000_000, 184_000_000, None),
        Prefill(4000, 1, "ours", True, 12.75, 1.02, 120_000_000, 23_600_000, None),
    ],
    decode=[
        Decode(4000, 8, 1, "full", False, 8.0, 1.0, 0.5, 1_474_000_000, 1_486_000_000, None),
        Decode(4000, 8, 1, "ours", True, 34.4, 4.3, 2.15, 188_700_000, 212_300_000, None),
        Decode(4000, 8, 1, "topk", True, None, None, None, None, None, "out of memory"),
    ],
    capacity=[Capacity(4000, 8, "ours", 210, 1080, 8192, None, True)],
    interrupted=False,
)


def rendered(report: BenchReport, width: int = 120) -> tuple[str, list[list[str]]]:
    """All tables as text, and the cells of their rows."""
    console = Console(file=io.StringIO(), width=width)
    for table in bench_tables(report):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return text, [[cell.strip() for cell in row] for row in rows]


def test_every_number_has_its_place() -> None:
    text, rows = rendered(REPORT)
    assert rows == [
        ["500", "1", "ClusterAttn, nothing left out", "1.500", "1.01", "30.0 MB", "5.0 MB"],
        ["4,000", "1", "full cache", "12.500", "1.00", "300.0 MB", "184.0 MB"],
        ["", "", "ClusterAttn", "12.750", "1.02", "120.0 MB", "23.6 MB"],
        ["4,000", "8", "full cache", "8.0", "1.00", "0.50", "1.5 GB", "1.5 GB"],
        ["", "", "ClusterAttn", "34.4", "4.30", "2.15", "188.7 MB", "212.3 MB"],
        ["", "", "top-k", "out of memory", "-", "-", "-", "-"],
        ["4,000", "8", "ClusterAttn", "210", "1,080", "8,192 (context)", "-"],
    ]
    assert "Decoding 32 tokens" in text
    assert "24.0 GiB" in text


def test_no_capacity_no_table() -> None:
    assert len(bench_tables(replace(REPORT, memory_bytes=None, capacity=[]))) == 2
    assert len(bench_tables(replace(REPORT, decode=[], capacity=[]))) == 1


def test_notes_say_how_it_was_measured() -> None:
    size, timing, noise, memory, buffers, estimate, limit = bench_notes(REPORT)
    assert "512 tokens" in size
    assert "3 times in turns" in timing
    assert "one row was read, and repeated" in timing
    assert "beside the weights" in memory
    assert "below 20 % mean nothing" in noise
    assert "64 tokens" in buffers
    assert "estimated" in estimate
    assert "(context)" in limit
    unlimited = replace(REPORT, capacity=[replace(REPORT.capacity[0], context_limits=False)])
    assert bench_notes(unlimited) == bench_notes(REPORT)[:-1]


def test_an_interrupted_run_was_not_timed_as_often_as_asked() -> None:
    assert "timed at most 3 times" in bench_notes(replace(REPORT, interrupted=True))[1]


def steady(report: BenchReport, spread: float) -> BenchReport:
    """With every time measured repeatedly."""
    prefill = [replace(it, spread=spread) for it in report.prefill]
    return replace(report, prefill=prefill, decode=[replace(it, spread=spread) for it in report.decode])


def test_a_busy_machine_is_told() -> None:
    quiet = steady(REPORT, 1.1)
    assert not any("times as long" in note for note in bench_notes(quiet))
    busy = replace(quiet, prefill=[*quiet.prefill[:2], replace(quiet.prefill[2], spread=2.34)])
    assert any("up to 2.3 times as long" in note for note in bench_notes(busy))


def test_ratios_within_the_spread_are_marked() -> None:
    quiet = steady(REPORT, 1.01)
    _, rows = rendered(quiet)
    assert [row[4] for row in rows[1:3]] == ["1.00", "1.02"]
    noisy_full = replace(quiet.prefill[1], spread=1.03)
    noisy_decode = replace(quiet.decode[1], spread=2.2)
    report = replace(
        quiet,
        prefill=[quiet.prefill[0], noisy_full, quiet.prefill[2]],
        decode=[quiet.decode[0], noisy_decode, quiet.decode[2]],
    )
    _, rows = rendered(report)
    assert [row[4] for row in rows[1:3]] == ["1.00", "~1.02"]
    assert rows[4][4:6] == ["4.30", "~2.15"]
    notes = bench_notes(report)
    assert any("marked ~" in note for note in notes)
    assert not any("20 %" in note for note in notes)
    assert not any("marked ~" in note for note in bench_notes(REPORT))


def test_notes_on_a_batch_that_was_read_whole() -> None:
    decode = [replace(result, prefilled_rows=8) for result in REPORT.decode]
    report = replace(REPORT, decode=decode, settings=BenchSettings(tokens=(4000,), repeats=1))
    assert bench_notes(report)[1] == "Everything was timed once; each row of a batch was read."


def test_single_rows_are_no_batch() -> None:
    decode = [replace(result, batch=1) for result in REPORT.decode]
    assert bench_notes(replace(REPORT, decode=decode))[1].endswith("medians are shown.")


def test_the_memory_is_shown_as_it_was_written() -> None:
    titles = [table.title for table in bench_tables(REPORT, memory="24GiB")]
    assert titles[-1] == "What fits into 24GiB, estimated"


def test_headings_are_distinct() -> None:
    for table in bench_tables(REPORT):
        headings = [column.header for column in table.columns]
        assert len(set(headings)) == len(headings)


def test_weights_that_do_not_fit_are_a_sentence() -> None:
    report = replace(REPORT, memory_bytes=10**8)
    assert len(bench_tables(report)) == 2
    assert bench_notes(report, memory="100MB")[-1] == (
        "Nothing fits into 100MB: the weights alone need 538.0 MB."
    )


def test_a_dash_is_explained() -> None:
    whole = replace(REPORT, capacity=[Capacity(500, 1, "ours", None, None, None, None)])
    assert rendered(whole, width=160)[1][-1][3:] == ["-"] * 4
    assert "nothing is compressed" in bench_notes(whole)[-1]
    eager = replace(REPORT, environment={"attention_backend": "eager"})
    assert bench_notes(eager)[-1].startswith("Eager attention")


def test_the_length_of_the_question_is_told() -> None:
    note = "The profile's window is the question; its length is assumed: 32 tokens."
    assert note in bench_notes(REPORT, question="assumed")
    assert "its length is given: 32" in bench_notes(REPORT, question="given")[1]
