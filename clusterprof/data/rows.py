"""The rows every dataset is made of, and how rows become a dataset: duplicates, ids and the content hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from clusterprof.errors import DataError

# Rows live in memory; more text than this is a mistake or an attack, and fails before the machine does.
MAX_TEXT_CHARACTERS = 1 << 30

MAX_ID_CHARACTERS = 100


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One sample of a workload, before any tokenizer has seen it.

    Attributes
    ----------
    id : str
        Unique within its dataset; empty until `make_dataset` has filled it in.
    messages : tuple of Message
        What the model is asked, the last message being the user's.
    context, question : str
        The long part and the asking part of the prompt, where they are known apart; else empty.
    question_start : int or None
        Where the question begins in the last message, in characters; None if there is no known question.
    answers : tuple of str
        Accepted answers; empty if none is known.
    all_classes : tuple of str
        What the answer is chosen from in a classification task; else empty.
    max_new_tokens : int or None
        How many tokens the task's protocol generates; None if it does not say.
    use_chat_template : bool
        False where the protocol feeds the plain text (few-shot and code tasks).
    answer_prefix : str
        Text the answer is made to start with; it follows the generation prompt.
    """

    id: str
    messages: tuple[Message, ...]
    context: str = ""
    question: str = ""
    question_start: int | None = None
    answers: tuple[str, ...] = ()
    all_classes: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    use_chat_template: bool = True
    answer_prefix: str = ""


def question_row(
    context: str,
    question: str,
    *,
    max_new_tokens: int,
    answers: tuple[str, ...] = (),
    between: str = "\n\n",
) -> Row:
    """Make a row of one user message: the context, what comes between, and the question at its end."""
    content = f"{context}{between}{question}"
    return Row(
        id="",
        messages=(Message("user", content),),
        context=context,
        question=question,
        question_start=len(content) - len(question),
        answers=answers,
        max_new_tokens=max_new_tokens,
    )


@dataclass(frozen=True)
class Dataset:
    """Rows with distinct prompts and distinct ids, and where they came from.

    Attributes
    ----------
    name, source, split : str
        The name it was asked for by, its origin in words (generator, file, hub id), and the split.
    rows : tuple of Row
        In the order of the source.
    content_hash : str
        SHA-256 over all rows, hexadecimal.
    duplicates : int
        Rows dropped because an earlier one has the same prompt.
    """

    name: str
    source: str
    split: str
    rows: tuple[Row, ...]
    content_hash: str
    duplicates: int


def make_dataset(name: str, source: str, split: str, rows: Iterable[Row]) -> Dataset:
    """Drop rows whose prompt was there before, give every row a unique id, and hash the whole.

    The answers of a dropped row are added to those of the row that stays: two annotators of the same
    question are two accepted answers.

    Raises
    ------
    DataError
        If there are no rows, or more text than fits in memory.
    """
    distinct: dict[tuple[object, ...], Row] = {}
    seen = characters = 0
    for row in rows:
        seen += 1
        characters += sum(len(message.content) for message in row.messages)
        if characters > MAX_TEXT_CHARACTERS:
            raise DataError(
                f"{source} holds more than {MAX_TEXT_CHARACTERS:,} characters of prompts; "
                "give a part of it, since all rows are kept in memory."
            )
        prompt = (row.messages, row.use_chat_template, row.answer_prefix)
        first = distinct.get(prompt)
        if first is None:
            distinct[prompt] = row
        else:
            answers = tuple(dict.fromkeys(first.answers + row.answers))
            distinct[prompt] = dataclasses.replace(first, answers=answers)
    if not distinct:
        raise DataError(f"{source} holds no rows; give a dataset with at least one.")
    named = _with_unique_ids(distinct.values())
    return Dataset(name, source, split, named, _content_hash(named), seen - len(named))


def _with_unique_ids(rows: Iterable[Row]) -> tuple[Row, ...]:
    taken: set[str] = set()
    named = []
    for row in rows:
        digest = _prompt_hash(row)
        # Ids go into profiles and onto terminals: an unprintable or endless one is replaced by the digest.
        usable = row.id.isprintable() and 0 < len(row.id) <= MAX_ID_CHARACTERS
        identifier = row.id if usable else digest[:12]
        # The digests of distinct prompts differ, so the last candidate is free unless a file forges it.
        for candidate in (identifier, f"{identifier}-{digest[:12]}", f"{identifier}-{digest}"):
            if candidate not in taken:
                break
        else:
            raise DataError(f"id {identifier!r} stands for several rows; give every row an id of its own.")
        taken.add(candidate)
        named.append(dataclasses.replace(row, id=candidate))
    return tuple(named)


def _prompt_hash(row: Row) -> str:
    turns = [[message.role, message.content] for message in row.messages]
    return hashlib.sha256(json.dumps([turns, row.use_chat_template, row.answer_prefix]).encode()).hexdigest()


def _content_hash(rows: Iterable[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        fields = dataclasses.asdict(row)
        if not row.all_classes:
            # Such rows keep the hash that profiles recorded before there were classes.
            del fields["all_classes"]
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
