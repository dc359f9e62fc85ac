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
    model={"context": 8192},
    environment={},
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
    capacity=[Capacity(4000, 8, "ours", 210, 1080, 26_000, None)],
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
        ["4,000", "8", "ClusterAttn", "210", "1,080", "26,000", "-"],
    ]
    assert "Decoding 32 tokens" in text
    assert "24.0 GiB" in text


def test_no_capacity_no_table() -> None:
    assert len(bench_tables(replace(REPORT, memory_bytes=None, capacity=[]))) == 2
    assert len(bench_tables(replace(REPORT, decode=[], capacity=[]))) == 1


def test_notes_say_how_it_was_measured() -> None:
    size, timing, memory, estimate = bench_notes(REPORT)
    assert "512 tokens" in size
    assert "3 times in turns" in timing
    assert "one row was read, and repeated" in timing
    assert "beside the weights" in memory
    assert "8,192 tokens" in estimate
    assert "context" not in bench_notes(replace(REPORT, model={"context": None}))[-1]


def test_an_interrupted_run_was_not_timed_as_often_as_asked() -> None:
    assert "timed at most 3 times" in bench_notes(replace(REPORT, interrupted=True))[1]


def test_a_busy_machine_is_told() -> None:
    quiet = replace(REPORT, decode=[replace(REPORT.decode[0], spread=1.1), *REPORT.decode[1:]])
    assert bench_notes(quiet) == bench_notes(REPORT)
    busy = replace(quiet, prefill=[*REPORT.prefill[:2], replace(REPORT.prefill[2], spread=2.34)])
    assert any("up to 2.3 times as long" in note for note in bench_notes(busy))


def test_notes_on_a_batch_that_was_read_whole() -> None:
    decode = [replace(result, prefilled_rows=8) for result in REPORT.decode]
    report = replace(REPORT, decode=decode, capacity=[], settings=BenchSettings(tokens=(4000,), repeats=1))
    [_, timing, _] = bench_notes(report)
    assert timing == "Everything was timed once; each row of a batch was read."
