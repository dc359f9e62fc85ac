"""LongEval's line retrieval: a long record of look-alike lines, one of which is asked for."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from clusterprof.data.rows import Row, question_row

MAX_NEW_TOKENS = 32
HIGHEST_NUMBER = 50_000

ADJECTIVES = (  # noqa: SIM905
    "able aged agile alert amber ample ancient arid ashen awake azure basic big bitter bland bold brave "
    "brief bright brisk broad bronze busy calm candid careful cheap chief chilly civic clean clear clever "
    "coarse cold common cool copper coral cosy crisp crude cubic curly daily damp dark dear deep dense "
    "distant double dry dull dusty eager early earnest east easy elder empty equal exact faint fair famous "
    "fancy fast fertile fine firm fit flat fluent fond formal frank free fresh frosty full gentle giant "
    "glad global gold grand grave gray great green handy happy hardy harsh heavy hidden hollow honest huge "
    "humble icy ideal inner ivory jolly keen kind large late lavish lazy lean level light limber linen "
    "little local lone long loud loyal lucky magic major mellow merry mild minor misty modern modest muddy "
    "narrow neat new noble noisy north oaken odd olive open oval pale patient plain polite prime proud pure "
    "quick quiet rapid rare ready rich rigid ripe robust rocky rough round royal ruby rural rustic"
).split()
NOUNS = (  # noqa: SIM905
    "acorn anchor apple apron arch arrow aspen attic badge bagel bakery banjo barge barn basin basket beach "
    "beacon beetle bell bench berry birch bison blanket boat bottle boulder bridge brook broom bucket "
    "buffalo button cabin cable cactus camel candle canoe canyon carpet castle cedar cellar chain chair "
    "cherry chimney cider circle cliff cloak clock cloud clover coat cobra comet compass cottage crane "
    "crater creek cricket crow crown cup curtain daisy desk diary dolphin door dove dragon drum eagle easel "
    "elbow engine falcon farm feather fence ferry fiddle field finch flag flute forest fork fossil fountain "
    "fox frame garden garlic gate geyser ginger glacier glove goat goose grain granite grape guitar hammer "
    "harbor harp hat hawk hazel hedge helmet heron hill hinge honey horn hotel igloo inlet island ivy jacket "
    "jar jewel jungle kettle key kite kitten ladder lagoon lake lamp lantern lark lemon lily lion lizard"
).split()


def draw(rng: Random, index: int) -> Callable[[int], Row]:
    """Choose the lines' names and numbers, and which line is asked for; the rows differ by chance alone."""
    depth = rng.random()
    numbers: dict[str, int] = {}

    def make(units: int) -> Row:
        # Drawn only as far as needed: there are far more names than a short prompt has lines.
        while len(numbers) < min(units, len(ADJECTIVES) * len(NOUNS)):
            name = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
            numbers.setdefault(name, rng.randint(1, HIGHEST_NUMBER))
        names = list(numbers)[:units]
        asked = names[int(depth * len(names))]
        record = [f"line {name}: REGISTER_CONTENT is <{numbers[name]}>" for name in names]
        context = (
            "Here is a record of lines. Each has a name, and the number between the angle brackets is its "
            "REGISTER_CONTENT. One of the numbers will be asked for at the end.\n\n" + "\n".join(record)
        )
        question = f"What is the REGISTER_CONTENT in line {asked}? Answer with the number."
        return question_row(
            context,
            question,
            answers=(str(numbers[asked]),),
            between="\n\nThe record ends here. ",
            max_new_tokens=MAX_NEW_TOKENS,
        )

    return make
