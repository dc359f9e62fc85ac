"""Documentation to summarise or explain: open answers, as an assistant that reads manuals gives them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from clusterprof.data.builtin.prose import documentation_lines
from clusterprof.data.rows import Row, question_row

MAX_NEW_TOKENS = 128

QUESTIONS = (
    "Summarise the documentation above in one paragraph.",
    "List the five most important points of the documentation above.",
    "Explain the documentation above to somebody who is new to Python.",
    "Explain what a programmer is most likely to get wrong here, according to the documentation above.",
    "Write a short introduction to the documentation above for a colleague who has no time to read it.",
    "Describe which rules the documentation above states, and why they matter.",
)


def draw(rng: Random, index: int) -> Callable[[int], Row]:
    """Choose the question, and the line of one of the longest topics where the documentation starts."""
    topics = documentation_lines()
    first = index % len(topics)
    lines = topics[first]
    # A start in the first half, at a paragraph.
    starts = [0] + [i + 1 for i, line in enumerate(lines[: len(lines) // 2]) if not line.strip()]
    start = rng.choice(starts)
    rest = [i for i in range(len(topics)) if i != first]
    rng.shuffle(rest)
    text = list(lines[start:])
    # Twice: the whole reference falls a little short of the longest prompts.
    for other in rest * 2:
        text += ["", "", *topics[other]]
    question = rng.choice(QUESTIONS)

    def make(units: int) -> Row:
        context = "\n".join(text[:units]).strip()
        return question_row(context, question, max_new_tokens=MAX_NEW_TOKENS)

    return make
