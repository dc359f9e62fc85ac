from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.data.records import row_from_record
from clusterprof.data.rows import Message, Row
from clusterprof.errors import DataError

HERE = "f.jsonl, line 41"

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELD_NAMES = st.sampled_from(
    ["id", "_id", "prompt", "messages", "context", "question", "answers", "answer", "x"]
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "?"]), "content": JSON_VALUES})
)


def test_a_prompt_is_a_user_message() -> None:
    row = row_from_record({"prompt": "Hello", "other": 1}, HERE)
    assert row == Row(id="", messages=(Message("user", "Hello"),))
    assert row.use_chat_template


def test_a_context_comes_before_its_question() -> None:
    record = {"id": 7, "context": "Long.", "question": " Why?", "answer": "So."}
    row = row_from_record(record, HERE)
    assert row.messages == (Message("user", "Long.\n\n Why?"),)
    assert (row.id, row.context, row.question, row.answers) == ("7", "Long.", " Why?", ("So.",))
    assert row.question_start is not None
    assert row.messages[0].content[row.question_start :] == "Why?"


def test_an_empty_context_or_question_leaves_the_other() -> None:
    assert row_from_record({"context": "", "question": "Why?"}, HERE).question_start == 0
    assert row_from_record({"context": "Text.", "question": ""}, HERE).question_start is None


def test_messages_keep_their_roles_and_a_final_reply_is_the_answer() -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    row = row_from_record({"messages": turns}, HERE)
    assert row.messages == (Message("system", "s"), Message("user", "u"))
    assert row.answers == ("a",)
    assert row_from_record({"messages": turns, "answers": ["b"]}, HERE).answers == ("b",)


def test_messages_go_before_prompt_and_prompt_before_context() -> None:
    turns = [{"role": "user", "content": "from messages"}]
    record: dict[str, Any] = {"context": "c", "question": "q", "prompt": "from prompt", "messages": turns}
    assert row_from_record(record, HERE).messages[0].content == "from messages"
    del record["messages"]
    assert row_from_record(record, HERE).messages[0].content == "from prompt"


@pytest.mark.parametrize(
    ("field", "value", "answers"),
    [
        ("answers", ["a", "b"], ("a", "b")),
        ("answers", "a", ("a",)),
        ("answer", "a", ("a",)),
        ("answer", ["a"], ("a",)),
        ("answers", {"text": ["a"], "answer_start": [3]}, ("a",)),
        ("answers", [], ()),
        ("answers", ["", "a"], ("a",)),
        ("answers", None, ()),
    ],
)
def test_answers_come_in_several_shapes(field: str, value: object, answers: tuple[str, ...]) -> None:
    assert row_from_record({"prompt": "p", field: value}, HERE).answers == answers


def test_nulls_are_missing_fields() -> None:
    record = {"id": None, "_id": "mine", "prompt": None, "messages": None, "context": "c", "question": "q"}
    assert row_from_record(record, HERE).id == "mine"


def test_optional_fields() -> None:
    row = row_from_record({"prompt": "p", "answer_prefix": "A:", "max_new_tokens": 20}, HERE)
    assert (row.answer_prefix, row.max_new_tokens) == ("A:", 20)
    assert row_from_record({"prompt": "p", "max_new_tokens": "20"}, HERE).max_new_tokens == 20
    assert row_from_record({"prompt": "p", "max_new_tokens": ""}, HERE).max_new_tokens is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "needs 'prompt', 'messages', or 'context' and 'question', and has the fields none"),
        ({"text": "x"}, "and has the fields 'text'"),
        ({"prompt": 3}, "field 'prompt' is the number 3, and must be text"),
        ({"prompt": ["x"]}, "field 'prompt' is a list, and must be text"),
        ({"prompt": {}}, "field 'prompt' is an object, and must be text"),
        ({"prompt": True}, "field 'prompt' is true or false, and must be text"),
        ({"prompt": b"x"}, "field 'prompt' is a bytes, and must be text"),
        ({"prompt": " \n"}, "the prompt is blank"),
        ({"prompt": "a\ud800"}, "field 'prompt' holds half a surrogate pair at character 1"),
        ({"context": "c"}, "field 'question' is missing"),
        ({"context": "c", "input": "q"}, "of LongBench's own files, name the task and the folder"),
        ({"question": "q"}, "field 'context' is missing"),
        ({"context": 1, "question": "q"}, "field 'context' is the number 1"),
        ({"context": "", "question": ""}, "the prompt is blank"),
        ({"prompt": "p", "id": 1.5}, "field 'id' is the number 1.5"),
        ({"prompt": "p", "id": True}, "field 'id' is true or false"),
        ({"prompt": "p", "answers": 4}, "field 'answers' is the number 4, and must be a list of texts"),
        ({"prompt": "p", "answers": ["a", 4]}, "an item of .* field 'answers' is the number 4"),
        ({"prompt": "p", "answers": {"a": 1}}, "field 'answers' is null"),
        ({"prompt": "p", "max_new_tokens": 0}, "field 'max_new_tokens' is the number 0"),
        ({"prompt": "p", "max_new_tokens": "ten"}, "field 'max_new_tokens' is the text 'ten'"),
        ({"prompt": "p", "answer_prefix": 1}, "field 'answer_prefix' is the number 1"),
        ({"messages": "hello"}, "field 'messages' is the text 'hello', and must be a list"),
        ({"messages": []}, "field 'messages' is an empty list"),
        ({"messages": ["x"]}, "message 1 is the text 'x', and must be an object"),
        ({"messages": [{"role": "user"}]}, "message 1: field 'content' is missing"),
        ({"messages": [{"content": "x"}]}, "message 1: field 'role' is missing"),
        ({"messages": [{"role": "user", "content": []}]}, "field 'content' is an empty list"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "role 'tool' is not one of system, user, assistant",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user message at its end"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message at its end"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(record: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=f"^(an item of )?{HERE}: .*{message}|{message}") as raised:
        row_from_record(record, HERE)
    assert HERE in str(raised.value)
    assert "\n" not in str(raised.value)


def is_row_or_named(record: dict[str, object]) -> bool:
    """Whether the record is a usable row, or its error says where it is."""
    try:
        row = row_from_record(record, HERE)
    except DataError as error:
        return HERE in str(error)
    return row.messages[-1].role == "user" and bool(row.messages[-1].content.strip())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELD_NAMES, JSON_VALUES | TURNS, max_size=4))
def test_any_object_is_a_row_or_a_data_error(record: dict[str, object]) -> None:
    assert is_row_or_named(record)
