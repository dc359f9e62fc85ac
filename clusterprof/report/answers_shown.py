"""Answers side by side: what would have been right, and what each method made the model say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterprof.evaluation.groups import comparable, methods_in, prompt_key
from clusterprof.text import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.evaluation.groups import Group, PromptKey
    from clusterprof.evaluation.records import Record

SAMPLES = "samples"
# Of a benchmark that is about its scores, a few answers show what they are about.
_PROMPTS, _PROMPTS_OF_SAMPLES = 3, 50
_REFERENCES = 3
_LONGEST = 1200


@dataclass(frozen=True)
class Text:
    """An answer as it is shown: whose, at which size, and how it was scored."""

    method: str
    size: int | None
    text: str
    scores: str = ""


@dataclass(frozen=True)
class Answered:
    """A prompt and its answers."""

    prompt: str
    labels: str
    tokens: int
    references: tuple[str, ...]
    texts: tuple[Text, ...]


def answers_of(group: Group) -> list[Answered]:
    """Return the answers to a group's first prompts; all of them if it is there to show answers."""
    prompts: dict[PromptKey, list[Record]] = {}
    for record in group.records:
        if record.text is not None:
            prompts.setdefault(prompt_key(record), []).append(record)
    most = _PROMPTS_OF_SAMPLES if group.bench == SAMPLES else _PROMPTS
    order = methods_in(group.records)
    return [_answered(records, order) for records in list(prompts.values())[:most]]


def _answered(records: Sequence[Record], order: Sequence[str]) -> Answered:
    first = records[0]
    ranked = sorted(records, key=lambda record: (order.index(record.method), record.size or 0))
    labels = (f"{name} {value}" for name, value in first.labels.items() if name != "fits")
    return Answered(
        prompt=f"{first.dataset} {first.prompt}",
        labels=", ".join(labels),
        tokens=first.prompt_tokens,
        references=tuple(visible(text) for text in first.references[:_REFERENCES]),
        texts=tuple(Text(it.method, it.size, visible(it.text or ""), _scores(it)) for it in ranked),
    )


def _scores(record: Record) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in record.scores.items())


def visible(text: str) -> str:
    """Return a text as a page shows it: cut if it is long, and with nothing in it that a reader would not see."""
    shown = "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text[:_LONGEST]
    ).strip()
    rest = len(text) - _LONGEST
    return f"{shown}… ({rest:,} more characters)" if rest > 0 else shown


def answer_tables(records: Iterable[Record]) -> list[Table]:
    """Return a table for each prompt of a run that is there to show answers: references, and what was generated."""
    from rich.table import Table
    from rich.text import Text

    tables = []
    for group in comparable(records):
        for answered in answers_of(group) if group.bench == SAMPLES else []:
            title = one_line(f"{answered.prompt} ({answered.tokens:,} tokens)")
            table = Table("method", "size", "answer", title=title, title_justify="left", show_lines=True)
            for reference in answered.references:
                table.add_row("reference", "", Text(reference))
            for text in answered.texts:
                size = "all" if text.size is None else f"{text.size:,}"
                table.add_row(Text(text.method), size, Text(text.text))
            tables.append(table)
    return tables
