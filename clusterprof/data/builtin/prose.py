"""Plain sentences out of CPython's language reference, as `pydoc_data.topics` carries it."""

from __future__ import annotations

import re
from functools import cache

# Code, grammar, lists, tables and footnotes start with one of these; what is left is prose.
_NOT_PROSE = (" ", "*", "+", "|", ">>>", "[", "'")
_UNDERLINE = re.compile(r'^[*=\-~^"]{4,}$', re.MULTILINE)
_MARKUP = re.compile(r"``|\*\*|`|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@cache
def sentences() -> tuple[str, ...]:
    """Return every prose sentence of the language reference, in order, each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            if "::=" in block or block.startswith(_NOT_PROSE) or _UNDERLINE.search(block):
                continue
            paragraph = _MARKUP.sub("", " ".join(block.split()))
            if len(paragraph) >= 80 and paragraph.endswith(".") and paragraph[0].isupper():
                paragraphs[paragraph] = None
    return tuple(sentence for paragraph in paragraphs for sentence in split_sentences(paragraph))


def split_sentences(text: str) -> tuple[str, ...]:
    """Cut a text after every full stop, exclamation and question mark that a capital follows."""
    return tuple(_SENTENCE_END.split(" ".join(text.split())))


@cache
def documentation_lines() -> tuple[tuple[str, ...], ...]:
    """Return the lines of every topic of the language reference, longest topic first."""
    from pydoc_data.topics import topics

    longest_first = sorted(topics, key=lambda name: (-len(topics[name]), name))
    return tuple(tuple(topics[name].strip().splitlines()) for name in longest_first)
