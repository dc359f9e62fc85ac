import dataclasses
import hashlib
import json

import pytest

from clusterprof.data import rows as rows_module
from clusterprof.data.rows import Message, Row, make_dataset
from clusterprof.errors import DataError


def row(text: str, **fields: object) -> Row:
    return dataclasses.replace(Row(id="", messages=(Message("user", text),)), **fields)  # type: ignore[arg-type]


def test_rows_stay_in_order_and_get_short_ids() -> None:
    dataset = make_dataset("d", "somewhere", "test", [row("b"), row("a", id="mine"), row("c")])
    assert [r.messages[0].content for r in dataset.rows] == ["b", "a", "c"]
    assert dataset.rows[1].id == "mine"
    assert all(len(r.id) == 12 and set(r.id) <= set("0123456789abcdef") for r in dataset.rows[::2])
    assert (dataset.name, dataset.source, dataset.split, dataset.duplicates) == ("d", "somewhere", "test", 0)


def test_duplicates_are_dropped_and_counted_and_their_answers_kept() -> None:
    dataset = make_dataset(
        "d", "s", "", [row("a", answers=("1",)), row("b"), row("a", id="x", answers=("2", "1")), row("a")]
    )
    assert [r.messages[0].content for r in dataset.rows] == ["a", "b"]
    assert dataset.rows[0].answers == ("1", "2")
    assert dataset.duplicates == 2


def test_the_same_text_in_another_role_or_without_a_template_is_no_duplicate() -> None:
    system = Row(id="", messages=(Message("system", "a"), Message("user", "a")))
    different = [row("a"), system, row("a", use_chat_template=False), row("a", answer_prefix="A")]
    dataset = make_dataset("d", "s", "", different)
    assert len({r.id for r in dataset.rows}) == 4


def test_ids_given_twice_are_told_apart() -> None:
    dataset = make_dataset("d", "s", "", [row("a", id="7"), row("b", id="7"), row("c", id="7")])
    ids = [r.id for r in dataset.rows]
    assert ids[0] == "7"
    assert len(set(ids)) == 3
    assert all(identifier.startswith("7-") for identifier in ids[1:])


def test_forged_ids_are_refused() -> None:
    digest = hashlib.sha256(json.dumps([[["user", "b"]], True, ""]).encode()).hexdigest()
    forged = [row("a", id="7"), row("x", id=f"7-{digest[:12]}"), row("y", id=f"7-{digest}"), row("b", id="7")]
    with pytest.raises(DataError, match="id '7' stands for several rows"):
        make_dataset("d", "s", "", forged)


def test_the_content_hash_covers_every_field_and_nothing_else() -> None:
    base = make_dataset("d", "s", "", [row("a"), row("b")])
    assert (
        base.content_hash == make_dataset("other", "place", "x", [row("a"), row("b"), row("b")]).content_hash
    )
    changed = [
        [row("b"), row("a")],
        [row("a"), row("c")],
        [row("a"), row("b", id="i")],
        [row("a"), row("b", answers=("x",))],
        [row("a"), row("b", max_new_tokens=3)],
        [row("a"), row("b", all_classes=("x",))],
    ]
    hashes = {make_dataset("d", "s", "", rows).content_hash for rows in changed} | {base.content_hash}
    assert len(hashes) == len(changed) + 1
    assert len(base.content_hash) == 64


def test_rows_without_classes_have_the_hash_they_had_before_there_were_classes() -> None:
    fields = {
        "id": "i",
        "messages": [{"role": "user", "content": "a"}],
        "context": "",
        "question": "",
        "question_start": None,
        "answers": [],
        "max_new_tokens": None,
        "use_chat_template": True,
        "answer_prefix": "",
    }
    expected = hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + b"\n").hexdigest()
    assert make_dataset("d", "s", "", [row("a", id="i")]).content_hash == expected


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl holds no rows"):
        make_dataset("d", "f.jsonl", "", [])


def test_more_text_than_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_TEXT_CHARACTERS", 10)
    with pytest.raises(DataError, match="more than 10 characters"):
        make_dataset("d", "s", "", (row(letter * 6) for letter in "ab"))
