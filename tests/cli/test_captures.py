"""`captures ls|clean`."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clusterprof.models import BUILTIN_ID
from clusterprof.profiling.capture_files import capture_files, look_into
from clusterprof.profiling.store import CaptureStore
from tests.cli.conftest import QUICK, Run
from tests.profiling.subjects import ORIGIN, capture
from tests.tiny import tiny_llama

DAY = 86_400


@pytest.fixture
def folder(run: Run, tmp_path: Path, profile_file: Path) -> Path:
    """The captures of a tune, in the cache of this test."""
    made = profile_file.parent / "cache" / "captures"
    return Path(shutil.copytree(made, tmp_path / "cache" / "captures"))


def saved(folder: Path, model: str) -> Path:
    """A capture of another model."""
    store = CaptureStore(folder, replace(ORIGIN, model=model, weights=model))
    store.save((5, 6, 7), capture(tiny_llama(), decode_tokens=4))
    return store.path((5, 6, 7), 8)


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_ls_lists_what_a_tune_left(run: Run, folder: Path, model_folder: Path) -> None:
    document = run("captures", "ls", "--json").json()
    assert document["folder"] == str(folder)
    entries = document["captures"]
    assert {entry["file"] for entry in entries} == names(folder)
    assert document["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    headers = [header for _, header in map(look_into, capture_files(folder)) if header is not None]
    assert len(headers) == len(entries) == 3
    for entry, header in zip(entries, headers, strict=True):
        assert entry["state"] == "usable"
        assert (entry["model"], entry["window"]) == (str(model_folder), 8)
        assert entry["prompt_tokens"] == header.prompt_length > 100
        assert 1 <= entry["decoded_tokens"] <= 4
        path = folder / entry["file"]
        assert entry["bytes"] == path.stat().st_size
        used = datetime.fromisoformat(entry["last_used"])
        assert used == datetime.fromtimestamp(int(path.stat().st_mtime), UTC)


def test_ls_is_for_people(run: Run, folder: Path) -> None:
    saved(folder, "org/other")
    (folder / f"{'1' * 40}.safetensors").write_bytes(b"garbage")
    age(folder / f"{'1' * 40}.safetensors", 3)
    finished = run("captures", "ls")
    assert finished.code == 0
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line
    ]
    assert len(rows) == 5
    # The least recently used first.
    assert rows[0][:5] == ["(damaged)", "", "", "", "7 bytes"]
    day = f"{datetime.fromtimestamp(time.time() - 3 * DAY):%Y-%m-%d}"
    assert rows[0][5].startswith(day)
    assert ["org/other", "60", "8", "4"] in [row[:4] for row in rows]
    assert re.search(r"^5 files, [\d.]+ kB in .*captures clean", finished.err)


def test_ls_of_nothing_says_so_and_makes_nothing(run: Run, tmp_path: Path) -> None:
    finished = run("captures", "ls")
    assert (finished.code, finished.out) == (0, "")
    assert "There are no captures in" in finished.err
    document = run("captures", "ls", "--json").json()
    assert (document["bytes"], document["captures"]) == (0, [])
    assert run("captures", "clean", "--json").json() == {"files": 0, "deleted": 0, "bytes": 0}
    assert not (tmp_path / "cache").exists()


def test_a_models_name_is_escaped(run: Run, folder: Path) -> None:
    saved(folder, "bad\x1b[2Jname")
    finished = run("captures", "ls")
    assert "bad\\x1b[2Jname" in finished.out
    assert "\x1b" not in finished.out


def test_clean_deletes_captures_and_leftovers_and_nothing_else(run: Run, folder: Path) -> None:
    leftover, busy = (folder / f"{'0' * 40}.{letter * 32}.tmp" for letter in "ab")
    for path in (leftover, busy, folder / "notes.txt", folder / "model.safetensors"):
        path.write_bytes(b"x" * 100)
    age(leftover, 1)
    (folder / f"{'2' * 40}.safetensors").write_bytes(b"damaged")
    (folder / "more").mkdir()
    kept = {busy.name, "notes.txt", "model.safetensors", "more"}
    freed = sum(path.stat().st_size for path in folder.iterdir() if path.name not in kept)
    assert run("captures", "clean", "--json").json() == {"files": 6, "deleted": 5, "bytes": freed}
    assert names(folder) == kept


def test_clean_says_how_much_it_freed(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "captures"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number:040x}.safetensors").write_bytes(b"x" * 1000)
    age(folder / f"{0:040x}.safetensors", 8)
    finished = run("captures", "clean", "--older-than", 7)
    assert (finished.code, finished.out) == (0, "deleted 1 of 3 files, 1.0 kB freed\n")
    assert run("captures", "clean").out == "deleted 2 of 2 files, 2.0 kB freed\n"


def test_clean_of_old_ones(run: Run, folder: Path) -> None:
    first, second, third = sorted(folder.iterdir())
    for path, days in ((first, 0.4), (second, 2), (third, 30)):
        age(path, days)
    assert run("captures", "clean", "--older-than", 7, "--json").json()["deleted"] == 1
    assert names(folder) == {first.name, second.name}
    assert run("captures", "clean", "--older-than", 0.5, "--json").json()["deleted"] == 1
    assert names(folder) == {first.name}
    assert run("captures", "clean", "--older-than", 0, "--json").json()["deleted"] == 1


def test_clean_of_one_model(run: Run, folder: Path, model_folder: Path) -> None:
    ours = names(folder)
    others = {saved(folder, model).name for model in ("org/other", BUILTIN_ID)}
    # Whose they are is not known.
    damaged = folder / f"{'2' * 40}.safetensors"
    damaged.write_bytes(b"damaged")
    age(damaged, 9)
    finished = run("captures", "clean", "--model", "org/nobody")
    assert (finished.code, finished.out) == (0, "deleted 0 of 6 files, 0 bytes freed\n")
    assert "captures ls" in finished.err
    assert (
        run("captures", "clean", "--model", model_folder, "--older-than", 1, "--json").json()["deleted"] == 0
    )
    assert names(folder) == {*ours, *others, damaged.name}
    assert run("captures", "clean", "--model", model_folder, "--json").json()["deleted"] == 3
    assert names(folder) == {*others, damaged.name}
    assert run("captures", "clean", "--model", "builtin", "--json").json()["deleted"] == 1
    assert run("captures", "clean", "--model", "org/other", "--json").json()["deleted"] == 1
    assert names(folder) == {damaged.name}


@pytest.mark.parametrize("days", ["-1", "nan", "inf", "week"])
def test_days_out_of_range_are_wrong_usage(run: Run, days: str) -> None:
    finished = run("captures", "clean", "--older-than", days)
    assert finished.code == 2
    assert "--older-than" in finished.err


def test_what_a_run_still_maps_may_be_cleaned(run: Run, tmp_path: Path) -> None:
    store = CaptureStore(tmp_path / "cache" / "captures", ORIGIN)
    held = store.save((5, 6, 7), capture(tiny_llama(), decode_tokens=4))
    expected = held.log_probs.clone()
    assert run("captures", "clean", "--json").json()["deleted"] == 1
    assert held.log_probs.equal(expected)
    assert store.load((5, 6, 7), 8) is None


def test_after_a_clean_the_captures_are_made_anew(
    run: Run, folder: Path, model_folder: Path, dataset_file: Path
) -> None:
    command = ["tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--trials", 1]
    assert run(*command).err.count("found on disk") >= 2
    run("captures", "clean")
    assert "found on disk" not in run(*command).err
    assert len(names(folder)) == 3


def test_the_bound_of_a_tune_deletes_the_captures_of_others_alone(
    run: Run, folder: Path, model_folder: Path, dataset_file: Path
) -> None:
    other = saved(folder, "org/other")
    ours = names(folder) - {other.name}
    for path in folder.iterdir():
        age(path, 1)
    finished = run(
        "tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--trials", 1, "--window", 9,
        "--capture-memory", "1KiB",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "more than the 1.0 kB of --capture-memory: all of them are kept" in finished.err
    assert len(names(folder)) == 3
    assert not names(folder) & {*ours, other.name}


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["clean"]])
def test_torch_is_not_loaded(run: Run, folder: Path, command: list[str]) -> None:
    code = (
        "import sys\nfrom contextlib import suppress\nfrom clusterprof.cli import main\n"
        f"with suppress(SystemExit): main(['captures', *{command}])\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert not {"torch", "transformers", "optuna", "datasets"} & set(done.stderr.splitlines()[-1].split())


def test_what_cannot_be_deleted_is_an_error(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A user who may not write there; root may write everywhere.
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    finished = run("captures", "clean")
    assert finished.code == 1
    assert finished.out == "deleted 0 of 3 files, 0 bytes freed\n"
    assert f"3 of 3 files in {folder} could not be deleted" in finished.err
