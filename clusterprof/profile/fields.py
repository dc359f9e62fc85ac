"""The kinds of values a profile may hold, each with its range."""

import json
import re
from datetime import datetime
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

# Above 2**53 JSON readers that store numbers as doubles lose digits.
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]

# Scores are float32 sums: the ends of their ranges are missed by a rounding error now and then.
_ROUNDING = 1e-3
Cosine = Annotated[float, Field(ge=-1 - _ROUNDING, le=1 + _ROUNDING)]
Share = Annotated[float, Field(ge=0, le=1)]
Divergence = Annotated[float, Field(ge=-_ROUNDING, le=1e6)]
# Of any objective.
Value = Annotated[float, Field(ge=-1e6, le=1e6)]
# Thirty years.
Seconds = Annotated[float, Field(ge=0, le=1e9)]

# These are shown in a terminal as they are: no control characters, line breaks or changes of direction.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _printable(text: str) -> str:
    if _UNPRINTABLE.search(text):
        raise ValueError("it must have no control characters or line breaks, and be valid text")
    return text


Line = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
Label = Annotated[Line, StringConstraints(min_length=1)]
SampleId = Annotated[Line, StringConstraints(min_length=1, max_length=200)]
Name = SampleId
Reason = Label
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

Ends = TypeVar("Ends", tuple[float, float], tuple[int, int])


def _first_version(value: object) -> object:
    # True and 1.0 equal 1, which is all that a literal asks for.
    if type(value) is not int or value != 1:
        raise ValueError("this release reads version 1")
    return value


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("every number must be finite") from error
    return value


def _one_problem(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    # Otherwise each kind of window would have a complaint of its own.
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError('it must be "query" or a whole number from 1 to 2**53') from error


def _ordered(value: Ends) -> Ends:
    if value[0] > value[1]:
        raise ValueError("the first number must not be above the second")
    return value


def _kind_of_range(value: object) -> str:
    kinds = {type(end) for end in value} if isinstance(value, list | tuple) else set()
    return "names" if str in kinds else "integers" if kinds == {int} else "numbers"


def _utc(moment: datetime) -> datetime:
    if moment.utcoffset():
        raise ValueError("the time must be in UTC")
    return moment


def without_credentials(url: str) -> str:
    """Cut user, password and query from a storage URL; a file path stays as it is."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    address = rest.partition("?")[0]
    # No host (sqlite:///file): an @ belongs to the path. With a host, the last @ ends the password,
    # which may itself hold an @ or a slash.
    return scheme + separator + (address if address.startswith("/") else address.rpartition("@")[2])


SchemaVersion = Annotated[Literal[1], BeforeValidator(_first_version)]
Window = Annotated[PositiveCount | Literal["query"], WrapValidator(_one_problem)]
FiniteJson = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
Interval = Annotated[tuple[Value, Value], AfterValidator(_ordered)]
ParameterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
# Where a parameter was searched: from one number to another, or among names.
Range = Annotated[
    Annotated[tuple[Count, Count], AfterValidator(_ordered), Tag("integers")]
    | Annotated[Interval, Tag("numbers")]
    | Annotated[tuple[Name, ...], Field(min_length=1, max_length=64), Tag("names")],
    Discriminator(_kind_of_range),
]
StorageUrl = Annotated[Label, AfterValidator(without_credentials)]
UtcTime = Annotated[AwareDatetime, AfterValidator(_utc)]
