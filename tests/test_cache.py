import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof import cache
from clusterprof.errors import ClusterprofError

# Builds slowly enough for a second process to meet the first, and logs that it did.
BUILD = """
import sys, time
from pathlib import Path
from clusterprof.cache import build_folder

def build(folder):
    with Path(sys.argv[1]).open("a") as log:
        log.write("built\\n")
    (folder / "half").write_text("x" * 10)
    time.sleep(float(sys.argv[2]))
    (folder / "other").write_text("y" * 20)

print(build_folder("model", "1", build))
"""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLUSTERPROF_CACHE", str(folder))
    return folder


def start(log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fill(folder: Path) -> None:
    (folder / "weights").write_text("whole")


def never(folder: Path) -> None:
    pytest.fail(f"built again in {folder}")


def test_the_variable_names_the_cache_folder(cache_folder: Path) -> None:
    assert not cache_folder.exists()
    assert cache.cache_dir() == cache_folder
    assert cache_folder.is_dir()


def test_without_the_variable_it_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CLUSTERPROF_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, appauthor: tmp_path / name)
    assert cache.cache_dir() == tmp_path / "clusterprof"


def test_no_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERPROF_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ClusterprofError, match=r"no home folder .* set CLUSTERPROF_CACHE"):
        cache.cache_dir()


def test_a_folder_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLUSTERPROF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ClusterprofError, match=r"file/cache cannot be written \(Not a directory\)"):
        cache.cache_dir()


def test_a_read_only_cache_serves_what_it_has_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    cache.build_folder("model", "1", fill)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert cache.build_folder("model", "1", never) == cache_folder / "model"
    with pytest.raises(ClusterprofError, match="no permission to write there"):
        cache.build_folder("model", "2", never)


def test_it_is_built_once(cache_folder: Path) -> None:
    folder = cache.build_folder("model", "1", fill)
    assert folder == cache_folder / "model"
    assert (folder / "weights").read_text() == "whole"
    assert cache.build_folder("model", "1", never) == folder


@pytest.mark.parametrize(
    "marker", [None, "", "[]", '{"fingerprint": "1"}', '{"fingerprint": "1", "files": 3}']
)
def test_a_folder_without_a_whole_marker_is_replaced(cache_folder: Path, marker: str | None) -> None:
    old = cache_folder / "model"
    old.mkdir(parents=True)
    (old / "weights").write_text("ha")
    if marker is not None:
        (old / "clusterprof.json").write_text(marker)
    assert (cache.build_folder("model", "1", fill) / "weights").read_text() == "whole"


def test_a_folder_of_another_format_is_replaced() -> None:
    cache.build_folder("model", "1", lambda folder: (folder / "old").touch())
    folder = cache.build_folder("model", "2", fill)
    assert {path.name for path in folder.iterdir()} == {"weights", "clusterprof.json"}


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_folder_is_built_anew(damage: str) -> None:
    weights = cache.build_folder("model", "1", fill) / "weights"
    if damage == "cut":
        weights.write_text("who")
    else:
        weights.unlink()
    cache.build_folder("model", "1", fill)
    assert weights.read_text() == "whole"


def test_what_an_interrupted_build_left_is_removed(cache_folder: Path) -> None:
    left = cache_folder / "model.partial"
    left.mkdir(parents=True)
    (left / "junk").touch()
    folder = cache.build_folder("model", "1", fill)
    assert {path.name for path in folder.iterdir()} == {"weights", "clusterprof.json"}
    assert not left.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad")])
def test_a_failed_build_leaves_nothing(cache_folder: Path, error: BaseException) -> None:
    def build(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        cache.build_folder("model", "1", build)
    assert {path.name for path in cache_folder.iterdir()} <= {"model.lock"}


def test_a_full_disk_is_one_sentence(cache_folder: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ClusterprofError, match=r"cannot be written \(No space left on device\); make room"):
        cache.build_folder("model", "1", build)


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    processes = [start(tmp_path / "log", 2.5) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert (tmp_path / "log").read_text() == "built\n"
    assert outputs[0][0] == outputs[1][0]
    assert sum("Waiting for another process" in stderr for _, stderr in outputs) == 1


def test_after_a_kill_the_next_process_builds(cache_folder: Path, tmp_path: Path) -> None:
    killed = start(tmp_path / "log", 60)
    deadline = time.monotonic() + 30
    while not (cache_folder / "model.partial" / "half").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (cache_folder / "model").exists()

    after = start(tmp_path / "log", 0)
    stdout, stderr = after.communicate(timeout=30)
    assert after.returncode == 0, stderr
    marker = json.loads((Path(stdout.strip()) / "clusterprof.json").read_text())
    assert marker["files"] == {"half": 10, "other": 20}
