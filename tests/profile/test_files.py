import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.errors import ProfileError
from clusterprof.profile import MAX_BYTES
from tests.profile.examples import changed, document, profile, refusal


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "EOF"),
        (b"   \n", "EOF"),
        (json.dumps(document()).encode()[:-200], "EOF"),
        (b"num_block: 8\n", "invalid JSON"),
        (b"[1, 2]", "object"),
        (b"null", "object"),
        (b'"profile"', "object"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"schema_version": 1} {}', "trailing"),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", "number"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 text (byte 0)"),
        (b'{"a": "\xc3"}', "not UTF-8 text (byte 7)"),
        (b'{"a": "\\ud800"}', "invalid JSON"),
        (b'{"' + b"k" * 10_000 + b'": 1}', "more"),
        (b'{"a\\n\\u001b[31m": 1}', "schema_version"),
    ],
)
def test_not_a_profile(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    assert says in message


def test_message_counts_the_other_problems_and_puts_the_version_first(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"schema_version": 2, "method": "clusterattn", "theta": 1}))
    message = refusal(path)
    assert "schema_version: this release reads version 1 (got 2), and 8 more" in message


def test_repeated_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    text = json.dumps(document())
    path.write_text(text.replace('"num_block": 8', '"num_block": 8, "num_block": 9'))
    assert "num_block is there more than once" in refusal(path)


def test_byte_order_mark_is_accepted_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document()), encoding="utf-8-sig")
    Profile.load(path).save(path)
    assert path.read_bytes().startswith(b"{")


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # sparse: 2 GB that take no room
    started = time.perf_counter()
    assert "2,147,483,648 bytes" in refusal(path)
    assert time.perf_counter() - started < 0.5


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document()).ljust(MAX_BYTES))
    assert Profile.load(path).compression.size == 256
    path.write_text(json.dumps(document()).ljust(MAX_BYTES + 1))
    assert "1,048,577 bytes" in refusal(path)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)
    assert "There is no profile" in refusal(tmp_path / "missing.json")
    assert "two\\nlines" in refusal(tmp_path / "two\nlines")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
    assert "null" in refusal(tmp_path / "a\0b")
    (tmp_path / "file").touch()
    assert "cannot be read" in refusal(tmp_path / "file" / "p.json")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    profile().save(path)
    monkeypatch.setattr(Path, "open", raising(PermissionError(13, "Permission denied")))
    assert "Permission denied" in refusal(path)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


NO_SPACE = OSError(28, "No space left on device")


def test_save_makes_folders_and_keeps_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "p.json"
    profile().save(path)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert [entry.name for entry in path.parent.iterdir()] == ["p.json"]


def test_save_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "p.json"
    link.symlink_to(target)
    profile().save(link)
    assert link.is_symlink()
    assert Profile.load(target) == profile()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("os.fsync", NO_SPACE),
        ("os.fsync", KeyboardInterrupt()),
        ("pathlib.Path.replace", OSError(30, "Read-only file system")),
        ("pathlib.Path.replace", KeyboardInterrupt()),
        ("pathlib.Path.open", PermissionError(13, "Permission denied")),
        ("pathlib.Path.mkdir", OSError(30, "Read-only file system")),
    ],
)
@pytest.mark.parametrize("existing", [True, False])
def test_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException, existing: bool
) -> None:
    path = tmp_path / "p.json"
    if existing:
        path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(where, raising(error))
        with pytest.raises(ProfileError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            profile().save(path)
    if isinstance(error, OSError):
        assert f"{path} cannot be written ({error.strerror}); " in str(caught.value)
        assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == (["p.json"] if existing else [])
    assert not existing or path.read_text() == "old"


def test_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", raising(OSError(22, "Invalid argument")))
    profile().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile()


def test_save_onto_a_folder_or_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "p.json", tmp_path / "a\0b"):
        with pytest.raises(ProfileError, match="cannot be written"):
            profile().save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    ids = [f"{index:0200d}" for index in range(4096)]
    dropped = [{"id": name, "reason": "out of memory " * 10} for name in ids]
    content = changed("dataset.sampled_ids", ids)
    content["search"]["dropped_samples"] = dropped
    huge = Profile.model_validate_json(json.dumps(content))
    with pytest.raises(ProfileError, match="tune on fewer samples"):
        huge.save(tmp_path / "p.json")
    assert not [*tmp_path.iterdir()]


def test_killed_while_saving_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile().save(path)
    loop = (
        "import sys; from clusterprof import Profile; p = Profile.load(sys.argv[1]); print(flush=True)\n"
        "while True: p.save(sys.argv[1])"
    )
    writer = subprocess.Popen([sys.executable, "-c", loop, path], stdout=subprocess.PIPE)
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(50):
            assert Profile.load(path) == profile()
        writer.send_signal(signal.SIGKILL)
    assert Profile.load(path) == profile()
