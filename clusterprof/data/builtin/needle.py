"""Needle in a haystack: one sentence with a number in prose that has nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable
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


def draw(rng: Random, index: int) -> Callable[[int], Row]:
    """Choose city, number and where in the reference the haystack starts."""
    city = CITIES[index]
    number = str(rng.randrange(10**4, 10**7))
    # Steps of the golden ratio spread any number of rows evenly over the depths.
    depth = (index + 0.5) * GOLDEN_RATIO % 1
    text = sentences()
    start = rng.randrange(len(text))
    question = f"What is the special magic number for {city} mentioned in the text above?"

    def make(units: int) -> Row:
        haystack = [text[(start + offset) % len(text)] for offset in range(units)]
        haystack.insert(round(depth * units), f"The special magic number for {city} is: {number}.")
        context = " ".join(haystack)
        return question_row(context, question, answers=(number,), max_new_tokens=MAX_NEW_TOKENS)

    return make
