import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from clusterprof.data import build_prompt, longbench
from clusterprof.data.longbench import load_longbench
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.data.rows import Row
from clusterprof.errors import DataError
from tests.data.tokenizers import decode

# The protocol's published answer lengths, and the tasks it feeds without a chat template.
MAX_NEW_TOKENS = {
    128: "narrativeqa qasper samsum",
    512: "gov_report qmsum multi_news",
    64: "multifieldqa_en trec lcc repobench-p",
    32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en",
}
PLAIN = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
NO_INPUT = {"gov_report", "multi_news", "passage_count", "lcc"}


def record(**fields: Any) -> dict[str, Any]:
    base = {
        "input": "Why {context}?",
        "context": "Because {input}.",
        "answers": ["yes"],
        "length": 2,
        "_id": "id1",
    }
    return {**base, "dataset": "qasper", "language": "en", "all_classes": None, **fields}


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def only_row(task: str, folder: Path, templates: Path | None = None, **fields: Any) -> Row:
    write(folder / f"{task}.jsonl", record(**fields))
    return load_longbench(task, folder, templates).rows[0]


def test_the_sixteen_tasks_follow_the_protocol() -> None:
    expected = {name: tokens for tokens, names in MAX_NEW_TOKENS.items() for name in names.split()}
    assert {name: task.max_new_tokens for name, task in LONGBENCH_TASKS.items()} == expected
    assert {name for name, task in LONGBENCH_TASKS.items() if not task.use_chat_template} == PLAIN
    assert {name for name, task in LONGBENCH_TASKS.items() if "{input}" not in task.template} == NO_INPUT


@pytest.mark.parametrize("task", LONGBENCH_TASKS)
def test_every_template_holds_context_and_input_once(task: str, tmp_path: Path) -> None:
    row = only_row(task, tmp_path)
    content = row.messages[0].content
    assert content.count("Because {input}.") == 1
    assert content.count("Why {context}?") == (0 if task in NO_INPUT else 1)
    assert (row.id, row.context, row.answers) == ("id1", "Because {input}.", ("yes",))
    assert row.max_new_tokens == LONGBENCH_TASKS[task].max_new_tokens


@pytest.mark.parametrize("task", LONGBENCH_TASKS)
def test_the_query_begins_with_the_question(
    task: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = only_row(task, tmp_path)
    prompt = build_prompt(row, tokenizer, max_tokens=10_000)
    if task in ("lcc", "repobench-p"):
        assert (row.question, prompt.query_length) == ("", None)
        return
    assert row.question
    assert prompt.query_length is not None
    query = decode(tokenizer, prompt.input_ids[-prompt.query_length :]).lstrip()
    assert query.startswith(row.question)
    if task not in NO_INPUT:
        assert row.question == "Why {context}?"


def test_an_input_that_is_blank_leaves_the_instruction_as_the_question(tmp_path: Path) -> None:
    row = only_row("gov_report", tmp_path, input="")
    assert row.question.startswith("Summarise the report above")
    assert row.question_start is not None
    assert row.messages[0].content[row.question_start :] == row.question


@pytest.mark.parametrize("subfolder", ["", "data"])
def test_a_folder_of_jsonl_also_under_data(tmp_path: Path, subfolder: str) -> None:
    file = write(tmp_path / subfolder / "qasper.jsonl", record())
    dataset = load_longbench("qasper", tmp_path, None)
    assert (dataset.name, dataset.source, dataset.split) == ("qasper", str(file), "test")
    assert len(dataset.rows) == 1


@pytest.mark.parametrize("member", ["data/qasper.jsonl", "qasper.jsonl"])
@pytest.mark.parametrize("give_folder", [True, False])
def test_data_zip_or_the_folder_that_holds_it(tmp_path: Path, member: str, give_folder: bool) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data/other.jsonl", "not JSON")
        packed.writestr(member, json.dumps(record()))
    before = sorted(tmp_path.rglob("*"))
    dataset = load_longbench("qasper", tmp_path if give_folder else archive, None)
    assert dataset.source == f"{archive}/{member}"
    assert dataset.rows[0].context == "Because {input}."
    assert sorted(tmp_path.rglob("*")) == before


def failure(place: Path, task: str = "qasper", templates: Path | None = None) -> str:
    with pytest.raises(DataError) as raised:
        load_longbench(task, place, templates)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_task_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    assert "what is there: no LongBench task" in failure(tmp_path)
    write(tmp_path / "trec.jsonl", record())
    write(tmp_path / "mine.jsonl", record())
    write(tmp_path / "data" / "lcc.jsonl", record())
    assert f"no qasper.jsonl in {tmp_path}; what is there: lcc, trec." in failure(tmp_path)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.writestr("data/samsum.jsonl", "")
    assert "data.zip; what is there: samsum." in failure(tmp_path / "data.zip")


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    assert f"There is no {tmp_path / 'nowhere'}; --data-dir takes" in failure(tmp_path / "nowhere")
    assert "cannot be read: File name too long" in failure(tmp_path / ("x" * 300))


@pytest.mark.parametrize("damage", ["no zip", "cut off", "flipped", "encrypted", "strange method"])
def test_damaged_and_odd_archives(tmp_path: Path, damage: str) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(
            "data/qasper.jsonl", "\n".join(json.dumps(record(_id=str(i), input=str(i))) for i in range(99))
        )
    content = bytearray(archive.read_bytes())
    directory = content.index(b"PK\x01\x02")
    if damage == "no zip":
        content = bytearray(b"hello")
    elif damage == "cut off":
        content = content[:200]
    elif damage == "flipped":
        content[100:120] = bytes(20)
    elif damage == "encrypted":
        content[6] |= 1
        content[directory + 8] |= 1
    else:
        content[8] = content[directory + 10] = 77
    archive.write_bytes(content)
    assert str(archive) in failure(archive)


def test_a_member_that_unpacks_to_too_much_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longbench, "MAX_MEMBER_BYTES", 1 << 20)
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data/qasper.jsonl", bytes((1 << 20) + 1))
    assert archive.stat().st_size < 10_000
    assert "unpacks to more than 1 MiB" in failure(archive)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": None}, "field 'input' is null, and must be text"),
        ({"context": 3}, "field 'context' is the number 3"),
        ({"answers": "yes"}, "field 'answers' is the text 'yes', and must be a list of texts"),
        ({"answers": [1]}, "field 'answers' is the number 1"),
        ({"all_classes": "City"}, "field 'all_classes' is the text 'City', and must be a list of texts"),
        ({"all_classes": {}}, "field 'all_classes' is an object"),
        ({"all_classes": ["City", None]}, "an item of"),
        ({"_id": [1]}, "field '_id' is a list"),
        ({"context": " ", "input": ""}, "'context' and 'input' are both blank"),
    ],
)
def test_rows_that_break_the_format_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "qasper.jsonl", record(), record(**changes))
    found = failure(tmp_path)
    assert f"{file}, line 2: " in found
    assert message in found


@pytest.mark.parametrize("field", ["input", "context", "answers"])
def test_missing_fields_are_named(tmp_path: Path, field: str) -> None:
    file = write(tmp_path / "qasper.jsonl", {k: v for k, v in record().items() if k != field})
    assert f"{file}, line 1: field '{field}' is missing" in failure(tmp_path)


def test_classes_are_read_where_a_task_has_them(tmp_path: Path) -> None:
    classes = ["City", "Order, rank"]
    assert only_row("trec", tmp_path / "list", all_classes=classes).all_classes == ("City", "Order, rank")
    assert only_row("trec", tmp_path / "null", all_classes=None).all_classes == ()
    file = write(tmp_path / "trec.jsonl", {k: v for k, v in record().items() if k != "all_classes"})
    assert load_longbench("trec", file.parent, None).rows[0].all_classes == ()


def test_a_row_without_an_id_gets_one(tmp_path: Path) -> None:
    assert len(only_row("qasper", tmp_path, _id=None).id) == 12


def test_own_templates(tmp_path: Path) -> None:
    templates = tmp_path / "templates.json"
    templates.write_text(json.dumps({"qasper": "{context} {{ok}} {input} {input}!"}))
    row = only_row("qasper", tmp_path, templates)
    assert row.messages[0].content == "Because {input}. {{ok}} Why {context}? Why {context}?!"
    assert row.question_start == len("Because {input}. {{ok}} Why {context}? ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file of templates"),
        (" " * ((1 << 20) + 1), "is larger than 1 MiB"),
        ("[]", "has no template for qasper"),
        ('{"trec": "{context}"}', "has no template for qasper"),
        ('{"qasper": 3}', "the template of qasper is the number 3"),
        ('{"qasper": "{input}"}', "does not contain {context}"),
    ],
)
def test_templates_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    templates = tmp_path / "templates.json"
    templates.write_text(content)
    write(tmp_path / "qasper.jsonl", record())
    found = failure(tmp_path, templates=templates)
    assert str(templates) in found
    assert message in found


def test_templates_that_are_not_there(tmp_path: Path) -> None:
    assert "There is no file" in failure(tmp_path, templates=tmp_path / "templates.json")
