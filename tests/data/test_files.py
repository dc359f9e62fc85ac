import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clusterprof.data import files as files_module
from clusterprof.data.files import load_file
from clusterprof.errors import DataError


def load(path: Path, content: bytes | str) -> list[str]:
    """The prompts of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [row.messages[0].content for row in load_file(path, path.name).rows]


def failure(path: Path, content: bytes | str) -> str:
    """The one sentence that reading a file with this content ends in."""
    with pytest.raises(DataError) as raised:
        load(path, content)
    message = str(raised.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def lines(prompts: Sequence[object]) -> str:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_jsonl_in_order_without_a_final_newline(jsonl: Path) -> None:
    assert load(jsonl, lines(["a", "é\n"]) + '{"prompt": "c"}') == ["a", "é\n", "c"]


def test_jsonl_with_a_bom(jsonl: Path) -> None:
    assert load(jsonl, b"\xef\xbb\xbf" + lines(["a"]).encode()) == ["a"]


def test_jsonl_with_crlf(jsonl: Path) -> None:
    assert load(jsonl, lines(["a", "b"]).replace("\n", "\r\n")) == ["a", "b"]


def test_jsonl_with_blank_lines_counts_them(jsonl: Path) -> None:
    assert load(jsonl, "\n" + lines(["a"]) + "  \n\r\n" + lines(["b"])) == ["a", "b"]
    assert "line 4: field 'prompt'" in failure(jsonl, "\n" + lines(["a"]) + "\n" + lines([1]))


def test_jsonl_with_duplicates_counts_them(jsonl: Path) -> None:
    jsonl.write_text(lines(["a", "b", "a", "a"]))
    dataset = load_file(jsonl, "mine")
    assert (len(dataset.rows), dataset.duplicates) == (2, 2)
    assert (dataset.name, dataset.source) == ("mine", str(jsonl))


def test_jsonl_with_bad_utf8_names_the_line(jsonl: Path) -> None:
    message = failure(jsonl, lines(["a"]).encode() + b'{"prompt": "\xff"}\n')
    assert "line 2: byte 13 is not UTF-8" in message


def test_jsonl_that_is_not_json_names_the_line(jsonl: Path) -> None:
    assert "line 2: is not JSON (Expecting value at column 12)" in failure(
        jsonl, lines(["a"]) + '{"prompt": }\n'
    )


def test_jsonl_with_a_missing_field_names_line_and_fields(jsonl: Path) -> None:
    message = failure(jsonl, lines(["a"] * 40) + '{"context": "c"}\n')
    assert "line 41: field 'question' is missing" in message


@pytest.mark.parametrize("value", ["[1]", '"text"', "3", "null"])
def test_jsonl_rows_must_be_objects(jsonl: Path, value: str) -> None:
    assert "line 1: is not a JSON object" in failure(jsonl, value)


@pytest.mark.parametrize("value", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_json_made_to_exhaust_the_parser_is_refused(jsonl: Path, value: str) -> None:
    assert "line 1: holds JSON that no dataset needs" in failure(jsonl, value)


def test_an_over_long_line_is_refused_by_its_number(jsonl: Path) -> None:
    # 200 MB of nothing on disk: the file is sparse, and reading must stop at the limit.
    jsonl.write_text(lines(["a"]))
    os.truncate(jsonl, 200 << 20)
    with pytest.raises(DataError, match=r"line 2: is longer than 64 MiB"):
        load_file(jsonl, "d")


def test_a_line_at_the_limit_is_read(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = lines(["a" * 30])
    monkeypatch.setattr(files_module, "MAX_LINE_BYTES", len(line))
    assert load(jsonl, line) == ["a" * 30]
    monkeypatch.setattr(files_module, "MAX_LINE_BYTES", len(line) - 1)
    assert "line 1: is longer" in failure(jsonl, line)


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.csv"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    assert "holds no rows" in failure(tmp_path / name, content)


def is_rows_or_named(path: Path) -> bool:
    """Whether the file can be used, or its error says which one it is."""
    try:
        return len(load_file(path, "d").rows) > 0
    except DataError as error:
        return str(path) in str(error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=30) | st.just(b'{"prompt": "a"}'), max_size=4))
@example([b"\x00"])
@example([b'{"prompt": "\\ud800"}'])
def test_any_bytes_are_rows_or_a_data_error(tmp_path: Path, content: list[bytes]) -> None:
    for suffix in files_module.SUFFIXES:
        path = tmp_path / f"any{suffix}"
        path.write_bytes(b"\n".join(content))
        assert is_rows_or_named(path)


def test_json_is_a_list_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert load(path, json.dumps([{"prompt": "a"}, {"context": "b", "question": "c"}], indent=1)) == [
        "a",
        "b\n\nc",
    ]
    assert load(path, b"\xef\xbb\xbf" + b'[{"prompt": "a"}]') == ["a"]


def test_json_errors_name_the_row_or_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert "row 2: field 'prompt' is the number 1" in failure(path, '[{"prompt": "a"}, {"prompt": 1}]')
    assert "row 1: is not a JSON object" in failure(path, "[3]")
    assert "is not a list of rows" in failure(path, '{"prompt": "a"}')
    assert "is not JSON (Expecting value at line 3, column 1)" in failure(path, "[\n1,\n")
    assert "byte 2 is not UTF-8" in failure(path, b"[\xff]")


def test_json_files_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_JSON_BYTES", 1 << 20)
    assert "larger than 1 MiB; save it as JSONL" in failure(tmp_path / "big.json", " " * ((1 << 20) + 1))


def test_csv_with_quotes_newlines_bom_crlf_and_long_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    contexts = ['has, a "quote"', "two\nlines", "x" * 200_000]
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "context", "question", "answer", "max_new_tokens"])
        for number, context in enumerate(contexts):
            writer.writerow([number, context, "Why?", "", ""])
    limit = csv.field_size_limit()
    dataset = load_file(path, "d")
    assert [row.context for row in dataset.rows] == contexts
    assert [row.id for row in dataset.rows] == ["0", "1", "2"]
    assert {(row.answers, row.max_new_tokens) for row in dataset.rows} == {((), None)}
    assert csv.field_size_limit() == limit


def test_csv_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    two_lines = 'prompt,id\n"a\nb",1\n'
    assert "line 4: has 1 fields, and the header names 2" in failure(path, two_lines + "c\n")
    assert "line 4: the prompt is blank" in failure(path, two_lines + ",5\n")
    assert "line 4: is not CSV" in failure(path, two_lines + '"c"d,5\n')
    assert "line 4: is not CSV (unexpected end of data)" in failure(path, two_lines + '"c,5\n')
    assert "line 4: byte 1 is not UTF-8" in failure(path, two_lines.encode() + b"\xff,1\n")
    assert "line 1: two columns have the same name" in failure(path, "prompt,prompt\na,b\n")
    assert "line 2: needs 'prompt'" in failure(path, "text\na\n")


def test_csv_limits_are_put_back_after_an_error(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    failure(tmp_path / "rows.csv", 'prompt\n"a')
    assert csv.field_size_limit() == limit


def test_parquet_of_every_kind_of_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    turns = [{"role": "user", "content": "from messages"}]
    table = {
        "messages": [turns, None, None],
        "prompt": [None, "from prompt", None],
        "context": [None, None, "c"],
        "question": [None, None, "q"],
        "answers": [["a"], None, ["b", "c"]],
        "unused": [1, 2, 3],
    }
    pq.write_table(pa.table(table), path)
    dataset = load_file(path, "d")
    assert [row.messages[0].content for row in dataset.rows] == ["from messages", "from prompt", "c\n\nq"]
    assert [row.answers for row in dataset.rows] == [("a",), (), ("b", "c")]


def test_parquet_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert "is not a Parquet file that can be read" in failure(path, b"PAR1 but no more")
    pq.write_table(pa.table({"text": ["a"]}), path)
    assert "has none of the columns" in failure(path, path.read_bytes())
    pq.write_table(pa.table({"prompt": ["a"] * 100 + [""]}), path)
    assert "row 101: the prompt is blank" in failure(path, path.read_bytes())
    pq.write_table(pa.table({"prompt": ["a long text to lose half of"] * 100}), path, compression=None)
    whole = path.read_bytes()
    assert str(path) in failure(path, whole[:40] + bytes(40) + whole[80:])


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    pq.write_table(pa.table({"prompt": pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"\xff"))}), path)
    assert "is not a Parquet file that can be read" in failure(path, path.read_bytes())


@pytest.mark.parametrize("suffix", files_module.SUFFIXES)
def test_a_disk_that_fails_while_reading(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    path = tmp_path / f"rows{suffix}"
    monkeypatch.setattr(files_module, "open_file", lambda path: Failing(b"x" * 100))
    with pytest.raises(DataError, match=f"{path} .*Input/output error"):
        load_file(path, "d")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(DataError) as raised:
            load_file(path, "d")
        return str(raised.value)

    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "rows.txt").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "There is no file" in message(tmp_path / "absent.jsonl")
    assert "is a folder" in message(tmp_path / "folder.jsonl")
    assert "is not a regular file" in message(tmp_path / "pipe.jsonl")
    assert "is not a .jsonl, .json, .csv or .parquet file" in message(tmp_path / "rows.txt")
    assert "cannot be read" in message(tmp_path / "loop.jsonl")
    assert "cannot be read: File name too long" in message(tmp_path / ("x" * 300 + ".jsonl"))
    assert "There is no file" in message(tmp_path / "\0.jsonl") or "cannot be read" in message(
        tmp_path / "\0.jsonl"
    )


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind root, as whom tests may run.
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "rows.jsonl"
    path.write_text(lines(["a"]))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read: Permission denied\."):
        load_file(path, "d")
