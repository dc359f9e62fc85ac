import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.errors import DataError
from clusterprof.evaluation import records as records_module
from clusterprof.evaluation.records import Record, numbers, open_run, read_records, record_key
from tests.evaluation.examples import every_run, record, write_run
from tests.profile.examples import profile

PROMPTS = ("needle-0", "needle-1", "needle-2")


def three() -> list[Record]:
    return [record(prompt=prompt) for prompt in PROMPTS]


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_records(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "run.jsonl"
    measured = [it for run in every_run().values() for it in run[:3]]
    with open_run(path) as run:
        assert run.records == {}
        for it in measured:
            run.add(it)
        assert run.records == {it.key: it for it in measured}
    assert read_records(path) == measured
    assert path.read_bytes().count(b"\n") == len(measured)
    with open_run(path) as run:
        assert list(run.records.values()) == measured


def test_a_document_is_told_from_a_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    assert refusal(path) == (
        f"{path} is a JSON document, such as a profile (`clusterprof profiles show`), and no file of eval or compare, "
        "which has a record in each line."
    )


def test_a_line_leaves_out_what_is_as_usual(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_run(path) as run:
        run.add(record(method="full"))
    line = json.loads(path.read_text())
    assert line.keys() == {
        "key", "bench", "environment", "dataset", "prompt", "prompt_tokens", "labels", "method", "origin",
        "parameters", "scores",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": {"tokens": 1000, "depth": 0.0, "half": 1.0, "kind": "number"}},
        {"labels": {"theta": 1e-5, "num_block": 2**53}},
        {"text": "two\nlines, \x1b[2J, \u2028 and 漢字\U0001f600", "references": ("a\nb", "")},
        {"window": "query"},
        {"scores": {"loss": -0.0, "kl": 1e-300}},
        {"curves": {"by_head": [[0.5, 1.0], [1, 0]], "layers": [0, 5]}},
        {"dataset": f"/{'long-folder/' * 40}rows.jsonl"},
        {"text": "", "labels": {}, "scores": {}},
    ],
)
def test_values_keep_their_kind(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    measured = record(**fields)
    with open_run(path) as run:
        run.add(measured)
    (again,) = read_records(path)
    assert again == measured
    # 1 and 1.0 are equal, but not the same label.
    assert repr(again) == repr(measured)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_one_line(text: str) -> None:
    line = record(text=text).model_dump_json(exclude_defaults=True).encode()
    assert b"\n" not in line
    assert Record.model_validate_json(line).text == text


@pytest.mark.parametrize("left", [1, 40, -2])
def test_a_line_torn_by_a_crash_is_dropped_and_the_run_goes_on(left: int, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", three())
    content = path.read_bytes()
    start = content[:-1].rfind(b"\n") + 1
    path.write_bytes(content[:start] + content[start:][:left])
    assert read_records(path) == three()[:2]
    with open_run(path) as run:
        assert list(run.records.values()) == three()[:2]
        run.add(three()[2])
    assert path.read_bytes() == content


def test_a_last_record_without_its_lines_end_is_kept(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", three())
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert read_records(path) == three()
    assert path.read_bytes() == content[:-1]
    more = record(prompt="needle-3")
    with open_run(path) as run:
        assert list(run.records.values()) == three()
        run.add(more)
    assert read_records(path) == [*three(), more]


def test_a_first_line_that_was_torn_leaves_an_empty_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"key":"a1')
    with open_run(path) as run:
        assert run.records == {}
    assert path.read_bytes() == b""


def test_of_two_results_with_one_key_the_later_counts(tmp_path: Path) -> None:
    first, later = record(key="a" * 64, text="first"), record(key="a" * 64, text="later")
    with open_run(write_run(tmp_path / "run.jsonl", [first, later])) as run:
        assert list(run.records.values()) == [later]


# A record's line, changed into what it must not be.
BAD: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{'key': 1}", "JSON"),
    "a list": ("[]", "input should be an object"),
    "a number": ("1", "input should be an object"),
    "null": ("null", "input should be an object"),
    "another object": ('{"prompt": "a row of a data set"}', "key: field required"),
    "no key": ({"key": None}, "key"),
    "a short key": ({"key": "abc"}, "key"),
    "NaN": ('"accuracy": NaN', "scores.accuracy"),
    "infinity": ('"accuracy": Infinity', "scores.accuracy"),
    "infinity inside a curve": ({"curves": {"x": [float("inf")]}}, "curves"),
    "a huge number": ({"scores": {"loss": 1e300}}, "scores.loss"),
    "a long number": (f'"prompt_tokens": 1{"0" * 5000}', "number out of range"),
    "a negative length": ({"prompt_tokens": -1}, "prompt_tokens"),
    "no length": ({"prompt_tokens": 0}, "prompt_tokens"),
    "a window of no tokens": ({"window": 0}, "window"),
    "a text as the size": ({"size": "big"}, "size"),
    "another version": ({"schema_version": 2}, "this release reads version 1"),
    "an unknown field": ({"extra": 1}, "extra"),
    "control characters": ({"method": "snap\u001b[2Jkv"}, "method"),
    "a change of direction": ({"prompt": "a\u202eb"}, "prompt"),
    "an endless name": ({"method": "x" * 101}, "method"),
    "a nested label": ({"labels": {"tokens": [1]}}, "labels.tokens"),
    "no UTF-8": ("\udcff", "JSON"),
    "a deep one": ("[" * 10_000, "JSON"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_is_no_record_is_named(bad: str, tmp_path: Path) -> None:
    change, problem = BAD[bad]
    path = write_run(tmp_path / "run.jsonl", three())
    first, second, third = path.read_text().splitlines()
    if isinstance(change, dict):
        second = json.dumps(json.loads(second) | change)
    elif change.startswith('"'):
        name = change.partition(":")[0]
        before, _, rest = second.partition(f"{name}:")
        second = before + change + rest[min(rest.index(end) for end in ",}" if end in rest) :]
    else:
        second = change
    path.write_bytes("\n".join([first, second, third, ""]).encode(errors="surrogateescape"))
    message = refusal(path)
    assert f"{path}, line 2: is not a record" in message
    assert problem in message
    assert message.isprintable()
    with pytest.raises(DataError, match="line 2"), open_run(path):
        pass
    # It is somebody's file: not a byte of it is touched.
    assert path.read_bytes().count(b"\n") == 3


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(record().model_dump_json() + "\n", encoding="utf-8-sig")
    assert read_records(path) == [record()]


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", three())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    assert read_records(path) == three()


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b" " * ((1 << 20) + 1) + b"\n")
    assert "line 1: is longer than 1 MiB" in refusal(path)


@pytest.mark.parametrize("path", ["nowhere.jsonl", "."])
def test_what_cannot_be_read_is_named(path: str, tmp_path: Path) -> None:
    assert f"The results {tmp_path / path} cannot be read" in refusal(tmp_path / path)


def test_an_empty_file_is_a_run_without_results(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()
    assert read_records(path) == []


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_run(path) as run:
        run.add(record())
        with pytest.raises(DataError, match="Another process is adding to"), open_run(path):
            pass
        code = (
            "import sys; from pathlib import Path; from clusterprof.errors import DataError\n"
            "from clusterprof.evaluation.records import open_run\n"
            "try:\n"
            "    with open_run(Path(sys.argv[1])): print('opened')\n"
            "except DataError as error: print(error)"
        )
        other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        assert other.stdout.startswith("Another process is adding to")
        # Reading is for everybody.
        assert read_records(path) == [record()]
    with open_run(path) as run:
        assert len(run.records) == 1


def test_a_file_has_one_lock_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "run.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    # Whether or not it is there already.
    for _ in range(2):
        for one, other in ((path, link), (link, path), (link, tmp_path / "folder" / ".." / "link.jsonl")):
            with open_run(one) as run:
                with pytest.raises(DataError, match="Another process is adding to"), open_run(other):
                    pass
                run.add(record())
    assert link.is_symlink()
    assert read_records(path) == [record()] * 6
    assert not (tmp_path / "link.jsonl.lock").exists()


def test_after_an_error_another_may_open_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ZeroDivisionError), open_run(path):
        raise ZeroDivisionError
    path.write_text("no record\n")
    for _ in range(2):
        with pytest.raises(DataError, match="line 1"), open_run(path):
            pass


@pytest.mark.parametrize(
    ("name", "reason"), [("file/run.jsonl", "File exists|Not a directory"), ("x" * 300, "too long")]
)
def test_a_place_that_cannot_be_written_is_named(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(DataError, match=f"results cannot be written to .*({reason})"), open_run(path):
        pass


def test_a_full_disk_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    first, second, _ = three()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run(path) as run:
        run.add(first)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(DataError, match=r"No space left on device\); make room .* is kept\.$"):
                run.add(second)
        assert list(run.records.values()) == [first]
    # As much as the disk still took of the second.
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\n") + 20])
    with open_run(path) as run:
        run.add(second)
    assert read_records(path) == [first, second]


def test_a_disk_that_is_really_full_is_a_sentence() -> None:
    run = records_module.RunFile(Path("/dev/full"), [])
    with pytest.raises(DataError, match="No space left on device"):
        run.add(record())


def test_a_key_is_the_hash_of_its_parts_whatever_their_order() -> None:
    written = b'{"a": [1, 2], "b": {"c": null, "d": "\\u00e4"}}'
    assert record_key({"b": {"d": "ä", "c": None}, "a": (1, 2)}) == hashlib.sha256(written).hexdigest()
    assert record_key({"a": 1}) != record_key({"a": 1.0}) != record_key({"a": "1"})


def test_numbers_keep_six_digits() -> None:
    assert numbers([[1 / 3, 1e-9 / 3], [2.0, 123456.789]]) == [[0.333333, 3.33333e-10], [2.0, 123457.0]]
    assert numbers([]) == []


def test_a_file_that_was_never_a_runs_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "mine"}]')
    with pytest.raises(DataError, match=r"rows\.json is not a file of eval or compare"), open_run(path):
        pass
    assert path.read_text() == '[{"prompt": "mine"}]'
