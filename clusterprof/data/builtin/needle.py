"""Needle in a haystack: one sentence to find again in prose that has nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from clusterprof.data.builtin.prose import sentences
from clusterprof.data.rows import Row, question_row

MAX_NEW_TOKENS = 32
GOLDEN_RATIO = (5**0.5 - 1) / 2

# One per row, so that no two rows ask the same.
CITIES = (  # noqa: SIM905
    "Accra Algiers Amsterdam Ankara Antwerp Athens Baku Bangkok Barcelona Bergen Bogota Boston Brisbane "
    "Budapest Cairo Calgary Caracas Casablanca Chicago Colombo Dakar Damascus Dublin Durban Edinburgh "
    "Florence Geneva Glasgow Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kathmandu Kyoto Lagos Lima "
    "Lisbon Madrid Manila Marseille Melbourne Montreal Mumbai Nairobi Naples Osaka Oslo Perth Prague Quito "
    "Riga Santiago Seoul Sofia Tunis Vienna Warsaw Zagreb"
).split()
FOODS = ("a sandwich", "a bowl of noodles", "an apple pie", "a plate of dumplings", "a cheese omelette")
PLACES = ("Dolores Park", "Harbour Square", "the Botanical Garden", "Castle Meadow", "the Old Orchard")


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question it answers, and what the answer has to hold."""

    kind: str
    statement: str
    question: str
    answer: str

    def hidden(self, haystack: Sequence[str], depth: float) -> Row:
        """The row of a haystack's sentences with this one among them; depth 0 is before all, 1 after."""
        hay = list(haystack)
        hay.insert(round(depth * len(hay)), self.statement)
        return question_row(
            " ".join(hay), self.question, answers=(self.answer,), max_new_tokens=MAX_NEW_TOKENS
        )


def _number(rng: Random, city: str) -> Needle:
    number = str(rng.randrange(10**4, 10**7))
    return Needle(
        "number",
        f"The special magic number for {city} is: {number}.",
        f"What is the special magic number for {city} mentioned in the text above?",
        number,
    )


def _activity(rng: Random, city: str) -> Needle:
    food, place = rng.choice(FOODS), rng.choice(PLACES)
    return Needle(
        "activity",
        f"The best thing to do in {city} is eat {food} and sit in {place} on a sunny day.",
        f"What is the best thing to do in {city}, according to the text above?",
        place.removeprefix("the "),
    )


def _departure(rng: Random, city: str) -> Needle:
    time = f"{rng.randrange(18, 24)}:{rng.randrange(10, 60)}"
    return Needle(
        "departure",
        f"The night train to {city} leaves from platform {rng.randrange(1, 20)} at {time}.",
        f"At what time does the night train to {city} leave, according to the text above?",
        time,
    )


KINDS = (_number, _activity, _departure)


def draw(rng: Random, index: int) -> Callable[[int], Row]:
    """Choose the needle and where in the reference the haystack starts; the kinds take turns."""
    needle = KINDS[index % len(KINDS)](rng, CITIES[index])
    # Steps of the golden ratio spread any number of rows evenly over the depths.
    depth = (index + 0.5) * GOLDEN_RATIO % 1
    text = sentences()
    start = rng.randrange(len(text))

    def make(units: int) -> Row:
        return needle.hidden([text[(start + offset) % len(text)] for offset in range(units)], depth)

    return make
