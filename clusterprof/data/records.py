"""What a record of a local file or a hub dataset may hold, and the row it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterprof.data.rows import Message, Row
from clusterprof.errors import DataError

FIELDS = (
    "id",
    "_id",
    "messages",
    "prompt",
    "context",
    "question",
    "answers",
    "answer",
    "answer_prefix",
    "max_new_tokens",
)
ROLES = ("system", "user", "assistant")


def row_from_record(record: Mapping[str, Any], where: str) -> Row:
    """Make a row of a record with ``messages``, ``prompt``, or ``context`` and ``question``.

    The first of the three that is there decides; all three go through the chat template where the tokenizer
    has one. A conversation's final assistant message is the answer. A null is a missing field.

    Parameters
    ----------
    record : mapping
        Fields other than `FIELDS` are ignored.
    where : str
        File and line, for error messages.

    Raises
    ------
    DataError
        Naming `where` and the field that is missing or of the wrong type.
    """
    given = {field: record[field] for field in FIELDS if record.get(field) is not None}
    answers = _answers(given, where)
    context = question = ""
    question_start = None
    if "messages" in given:
        messages, reply = _messages(given["messages"], where)
        answers = answers or reply
    elif "prompt" in given:
        messages = (Message("user", text_field(given, "prompt", where)),)
    elif "context" in given or "question" in given:
        if "question" not in given and "input" in record:
            raise DataError(
                f"{where}: field 'question' is missing; of LongBench's own files, name the task and the folder "
                "(--dataset qasper --data-dir FOLDER)."
            )
        context = text_field(given, "context", where)
        question = text_field(given, "question", where)
        content = f"{context}\n\n{question}" if context else question
        messages = (Message("user", content),)
        if question.strip():
            question_start = len(content) - len(question.lstrip())
    else:
        fields = ", ".join(repr(str(field))[:40] for field in list(record)[:10]) or "none"
        raise DataError(
            f"{where}: needs 'prompt', 'messages', or 'context' and 'question', and has the fields {fields}."
        )
    if not messages[-1].content.strip():
        raise DataError(f"{where}: the prompt is blank; every row needs some text.")
    return Row(
        id=id_field(given, where),
        messages=messages,
        context=context,
        question=question,
        question_start=question_start,
        answers=answers,
        max_new_tokens=_max_new_tokens(given, where),
        answer_prefix=text_field(given, "answer_prefix", where) if "answer_prefix" in given else "",
    )


def text_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that has to be text which can be encoded, or raise `DataError`."""
    if field not in record:
        raise DataError(f"{where}: field '{field}' is missing.")
    return checked_text(record[field], f"{where}: field '{field}'")


def checked_text(value: object, what: str) -> str:
    """Return `value` if it is text that can be encoded, or raise `DataError` about `what`."""
    if not isinstance(value, str):
        raise DataError(f"{what} is {_kind(value)}, and must be text.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON's \ud800 escapes get here as valid strings and would only fail inside the tokenizer.
        raise DataError(f"{what} holds half a surrogate pair at character {error.start}.") from error
    return value


def id_field(record: Mapping[str, Any], where: str) -> str:
    """Return the row's own id as text, empty if it has none."""
    field = "id" if "id" in record else "_id"
    value = record.get(field, "")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_text(value, f"{where}: field '{field}'")


def answer_list(value: object, what: str) -> tuple[str, ...]:
    """Return a list of answers without the blank ones, or raise `DataError` about `what`."""
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} is {_kind(value)}, and must be a list of texts.")
    return tuple(answer for answer in (checked_text(item, f"an item of {what}") for item in value) if answer)


def _answers(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    field = "answers" if "answers" in given else "answer"
    value = given.get(field, ())
    if isinstance(value, str):
        value = (value,)
    elif isinstance(value, Mapping):
        # The SQuAD family keeps the texts beside their positions.
        value = value.get("text")
    return answer_list(value, f"{where}: field '{field}'")


def _messages(value: object, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    what = f"{where}: field 'messages'"
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} is {_kind(value)}, and must be a list of at least one message.")
    messages = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping):
            raise DataError(f"{what}: message {number} is {_kind(turn)}, and must be an object.")
        inside = f"{what}, message {number}"
        role = text_field(turn, "role", inside)
        if role not in ROLES:
            raise DataError(f"{inside}: role {role[:40]!r} is not one of {', '.join(ROLES)}.")
        messages.append(Message(role, text_field(turn, "content", inside)))
    reply = (messages.pop().content,) if messages[-1].role == "assistant" else ()
    if not messages or messages[-1].role != "user":
        raise DataError(f"{what} has no user message at its end for the model to answer.")
    return tuple(messages), reply


def _max_new_tokens(given: Mapping[str, Any], where: str) -> int | None:
    value = given.get("max_new_tokens")
    if isinstance(value, str) and len(value) < 10:  # CSV knows only text
        value = int(value) if value.isdecimal() else value or None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise DataError(f"{where}: field 'max_new_tokens' is {_kind(value)}, and must be a whole number above 0.")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return f"the number {str(value)[:20]}"
        case str():
            return f"the text {value[:40]!r}" if value else "empty text"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case Mapping():
            return "an object"
    return f"a {type(value).__name__}"
