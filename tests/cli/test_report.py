import json
import os
from pathlib import Path

import pytest

from clusterprof.report import page as page_module
from tests.cli.conftest import Run
from tests.evaluation.examples import longbench_run, needle_run, record, samples_run, write_run

FEW = ("clusterattn",)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "longbench.jsonl", longbench_run(FEW, sizes=(256,))),
        write_run(tmp_path / "samples.jsonl", samples_run()),
    ]


def test_a_page_of_several_runs(run: Run, runs: list[Path]) -> None:
    finished = run("report", *runs, "-o", "pages/all.html")
    assert (finished.code, finished.out) == (0, "")
    assert finished.err == "Reading 2 files\nDrawing 50 results\nThe page is in pages/all.html\n"
    page = Path("pages/all.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "longbench.jsonl (40 results), samples.jsonl (10 results)" in page
    assert list(Path("pages").iterdir()) == [Path("pages/all.html")]


def test_by_default_it_is_report_html_and_an_older_one_is_replaced(run: Run, runs: list[Path]) -> None:
    Path("report.html").write_text("older", encoding="utf-8")
    assert run("report", runs[1]).code == 0
    assert "samples.jsonl" in Path("report.html").read_text(encoding="utf-8")
    assert list(Path().iterdir()) == [Path("report.html")]


def test_a_run_that_is_named_twice_is_one(run: Run, runs: list[Path]) -> None:
    assert "Reading 1 file\nDrawing 10 results\n" in run("report", runs[1], runs[1]).err


def test_no_run_is_wrong_usage(run: Run) -> None:
    assert run("report").code == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no run {path}; check the path, or make one with `clusterprof eval`."),
        ("", "The run {path} has no results yet; continue it with the command that began it."),
        ('{"bench": "nee', "The run {path} has no results yet; continue it with the command that began it."),
        ("[]\n", "{path}, line 1: is not a record of eval or compare (input should be an object)."),
        ("NaN\n", "{path}, line 1: is not a record of eval or compare (input should be an object)."),
    ],
    ids=["missing", "empty", "only a torn line", "a list", "no JSON object"],
)
def test_what_is_no_run_is_one_sentence(run: Run, tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    finished = run("report", path)
    assert (finished.code, finished.out) == (1, "")
    assert finished.err.splitlines()[-1] == f"error: {sentence.format(path=path)}"
    assert not Path("report.html").exists()


def test_numbers_that_are_none_are_refused(run: Run, tmp_path: Path) -> None:
    document = json.loads(record().model_dump_json())
    document["scores"]["accuracy"] = float("inf")
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    finished = run("report", path)
    assert finished.code == 1
    assert "line 1: is not a record of eval or compare (scores.accuracy: " in finished.err


def test_folders_and_pipes_are_no_runs(run: Run, tmp_path: Path) -> None:
    assert "is a folder; name the files in it" in run("report", tmp_path).err
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in run("report", tmp_path / "pipe").err


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("..", "it is a folder; name a file in it with --output"),
        ("/dev/null", "it is not a regular file; name one with --output"),
        ("/dev/null/page.html", "/dev/null is not a folder; name another with --output"),
    ],
)
def test_where_no_page_can_be_is_said_before_anything_is_read(run: Run, output: str, reason: str) -> None:
    finished = run("report", "no such run", "-o", output)
    assert finished.code == 1
    assert finished.err == f"error: cannot write the page {output}: {reason}\n"


@pytest.mark.parametrize("folder", ["taken", "taken/plots"])
def test_where_no_plots_can_be_is_said_before_anything_is_read(run: Run, tmp_path: Path, folder: str) -> None:
    (tmp_path / "taken").touch()
    finished = run("report", "nowhere.jsonl", "--plots", str(tmp_path / folder))
    assert finished.code == 2
    assert "--plots" in finished.err


def test_a_page_that_cannot_be_written_after_all(
    run: Run, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", "/somewhere/.tmp")

    monkeypatch.setattr("clusterprof.profile.files.replace_file", full)
    finished = run("report", runs[1])
    assert finished.code == 1
    assert finished.err.splitlines()[-1] == (
        "error: The page report.html cannot be written (No space left on device); name another file with --output."
    )


def test_contradicting_runs_are_one_sentence(run: Run, tmp_path: Path) -> None:
    files = [write_run(tmp_path / f"{right}", [record(scores={"accuracy": right})]) for right in (0.0, 1.0)]
    finished = run("report", *files)
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("error: There are two different needle results of snapkv")


def test_ctrl_c_leaves_no_page(run: Run, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(runs: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(page_module, "render", interrupted)
    finished = run("report", runs[1])
    assert (finished.code, finished.err.splitlines()[-1]) == (1, "error: Interrupted; no page was written.")
    assert list(Path().iterdir()) == []


def test_a_name_that_terminals_would_obey(run: Run, runs: list[Path]) -> None:
    finished = run("report", runs[1], "-o", "a\x1b[2Jb.html")
    assert finished.code == 0
    assert "\x1b" not in finished.err


def test_plots_and_numbers_for_other_documents(run: Run, tmp_path: Path) -> None:
    path = write_run(tmp_path / "needle.jsonl", needle_run(("snapkv",)))
    finished = run("report", path, "-o", tmp_path / "page.html", "--plots", tmp_path / "plots", "--json")
    assert finished.code == 0
    (group,) = finished.json()["groups"]
    assert group["bench"] == "needle"
    plots = sorted((tmp_path / "plots").iterdir())
    # The heat maps of each size; and one over all sizes, if there are several.
    sizes = {mean["size"] for mean in group["means"]} - {None}
    assert len(plots) == len(sizes) + (len(sizes) > 1)
    for plot in plots:
        assert plot.name.startswith("needle-")
        assert plot.read_text().startswith("<?xml")


def test_a_run_is_not_overwritten_by_its_page(run: Run, runs: list[Path]) -> None:
    before = runs[1].read_text()
    finished = run("report", *runs, "-o", runs[1])
    assert finished.code == 2
    assert "would be lost" in finished.err
    assert runs[1].read_text() == before
