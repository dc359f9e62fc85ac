import csv
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from clusterprof.data import list_datasets, load_dataset, loading
from clusterprof.data.builtin import GENERATORS
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.errors import DataError
from tests.data.tokenizers import STRICT, byte_level


def test_every_named_dataset_is_listed_with_a_description_and_a_source() -> None:
    listed = list_datasets()
    assert [info.name for info in listed] == [*GENERATORS, *LONGBENCH_TASKS]
    assert len(listed) == 4 + 16
    assert all(info.description and info.source for info in listed)


def test_a_generator_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = load_dataset("lines", tokenizer=tokenizer, tokens=600, seed=3)
    assert dataset.name == "lines"
    assert "600 tokens" in dataset.source


def test_a_task_from_a_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {"input": "q", "context": "c", "answers": ["a"], "_id": "1"}
    (tmp_path / "trec.jsonl").write_text(json.dumps(row))
    templates = tmp_path / "templates.json"
    templates.write_text(json.dumps({"trec": "mine: {context}/{input}"}))
    dataset = load_dataset("trec", tokenizer=tokenizer, data_dir=tmp_path, templates=templates)
    assert dataset.rows[0].messages[0].content == "mine: c/q"


def test_a_local_file_by_its_path(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "rows.CSV").open("w", newline="") as stream:
        csv.writer(stream).writerows([["prompt"], ["a"]])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "rows.CSV"), "rows.CSV", "./rows.CSV", "~/rows.CSV"):
        dataset = load_dataset(name, tokenizer=tokenizer)
        assert dataset.name == name
        assert len(dataset.rows) == 1


def test_a_hub_id_goes_to_the_hub(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise DataError("not today")

    monkeypatch.setattr(loading, "load_hub_dataset", refuse)
    for name in ("org/name", "org/name:config@train"):
        with pytest.raises(DataError, match="not today"):
            load_dataset(name, tokenizer=tokenizer)
    assert asked == ["org/name", "org/name:config@train"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nedle", "did you mean needle"),
        ("qaspr", "did you mean qasper"),
        ("something else", "the named ones are needle, lines, docs, code, narrativeqa"),
        ("", "is a folder"),
        ("x" * 5000, "There is no dataset"),
        ("absent.jsonl", "There is no file absent.jsonl"),
        ("some/absent.parquet", "There is no file"),
        ("~nobody-of-that-name/rows.jsonl", "There is no file"),
    ],
)
def test_names_that_mean_nothing(tokenizer: PreTrainedTokenizerFast, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(name, tokenizer=tokenizer)


def test_a_folder_is_not_a_dataset(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder; give one \.jsonl"):
        load_dataset(str(tmp_path), tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["qasper", "rows.jsonl", "org/name"])
def test_tokens_are_for_generators_only(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(DataError, match=f"--tokens .*needle, lines, docs, code.*{name}"):
        load_dataset(name, tokenizer=tokenizer, tokens=1000)


@pytest.mark.parametrize("name", ["needle", "rows.jsonl", "org/name"])
@pytest.mark.parametrize("flag", ["--data-dir", "--templates"])
def test_longbench_options_are_for_longbench_only(
    tokenizer: PreTrainedTokenizerFast, name: str, flag: str, tmp_path: Path
) -> None:
    data_dir, templates = (tmp_path, None) if flag == "--data-dir" else (None, tmp_path)
    with pytest.raises(DataError, match=f"{flag} is for LongBench's tasks"):
        load_dataset(name, tokenizer=tokenizer, data_dir=data_dir, templates=templates)


def test_rows_the_chat_template_refuses_fail_at_load(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "mine", "messages": turns}))
    with pytest.raises(DataError, match=r"Row 'mine': .*turns must alternate"):
        load_dataset(str(path), tokenizer=byte_level(STRICT))
