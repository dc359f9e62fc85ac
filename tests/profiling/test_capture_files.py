import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clusterprof.profiling.capture_files import (
    VERSION,
    CaptureFile,
    CaptureHeader,
    capture_files,
    delete,
    look_into,
)
from clusterprof.profiling.store import CaptureStore
from tests.profiling.subjects import ORIGIN, WINDOW, capture
from tests.tiny import tiny_llama

HEADER = CaptureHeader(version=VERSION, model="m", prompt_length=60, window=8, decoded=4, scaling=0.25)


def written(folder: Path, number: int, text: str | None) -> Path:
    """A capture's file by its name, with such a header."""
    path = folder / f"{number:040x}.safetensors"
    save_file({"tokens": torch.zeros(2)}, path, metadata=None if text is None else {"capture": text})
    return path


def only(folder: Path) -> CaptureFile:
    (file,) = capture_files(folder)
    return file


def test_a_saved_capture_says_what_it_is(tmp_path: Path) -> None:
    before = time.time() - 1
    store = CaptureStore(tmp_path / "captures", ORIGIN)
    store.save((5, 6, 7), capture(tiny_llama(), decode_tokens=4))
    file = only(store.folder)
    path = store.path((5, 6, 7), WINDOW)
    assert (file.path, file.bytes, file.finished, file.busy) == (path, path.stat().st_size, True, False)
    assert before < file.used < time.time() + 1
    state, header = look_into(file)
    assert state == "usable"
    assert header is not None
    assert (header.model, header.prompt_length, header.window, header.decoded) == ("org/tiny", 60, WINDOW, 4)


def test_no_folder_holds_no_captures(tmp_path: Path) -> None:
    assert capture_files(tmp_path / "captures") == []


def test_only_captures_are_listed_the_oldest_first(tmp_path: Path) -> None:
    paths = [written(tmp_path, number, HEADER.model_dump_json()) for number in range(3)]
    for path, moment in zip(paths, (300, 100, 200), strict=True):
        os.utime(path, (moment, moment))
    name = "0" * 40
    for other in ("notes.txt", f"{name[1:]}.safetensors", f"{name}.safetensors.bak", "x.tmp", f"{name}.json"):
        (tmp_path / other).write_text("somebody's own")
    (tmp_path / f"{'f' * 40}.safetensors").mkdir()
    for letter, target in (
        ("e", tmp_path / "nowhere"),
        ("d", paths[0]),
        ("c", tmp_path / f"{'c' * 40}.safetensors"),
    ):
        (tmp_path / f"{letter * 40}.safetensors").symlink_to(target)
    found = capture_files(tmp_path)
    assert [file.path for file in found] == [paths[1], paths[2], paths[0]]
    assert [file.used for file in found] == [100, 200, 300]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (HEADER.model_dump_json(), "usable"),
        # As versions 1 to 4 wrote it, and as a later one may.
        (json.dumps({"prompt_length": 60, "window": 8, "scaling": 0.25}), "of another version"),
        (HEADER.model_copy(update={"version": VERSION + 1}).model_dump_json(), "of another version"),
        (json.dumps({**HEADER.model_dump(), "more": 1}), "of another version"),
        (None, "damaged"),
    ],
)
def test_versions_are_told_apart(tmp_path: Path, text: str | None, state: str) -> None:
    written(tmp_path, 1, text)
    assert look_into(only(tmp_path)) == (state, HEADER if state == "usable" else None)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 4096, (2**60).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, 1, None).write_bytes(content)
    assert look_into(only(tmp_path)) == ("damaged", None)


@pytest.mark.parametrize(("age", "state"), [(60, "being written"), (2 * 3600, "left unfinished")])
def test_an_unfinished_file_is_somebodys_until_it_is_old(tmp_path: Path, age: int, state: str) -> None:
    path = tmp_path / f"{'0' * 40}.{'1' * 32}.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age,) * 2)
    file = only(tmp_path)
    assert not file.finished
    assert file.busy == (state == "being written")
    assert look_into(file) == (state, None)


def test_deleting_tells_what_is_gone_by_it(tmp_path: Path) -> None:
    for number in range(2):
        written(tmp_path, number, None)
    files = capture_files(tmp_path)
    files[0].path.unlink()
    assert delete(files) == files[1:]
    assert list(tmp_path.iterdir()) == []
