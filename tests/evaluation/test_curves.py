from math import isnan

import pytest

from clusterprof.errors import DataError
from clusterprof.evaluation.curves import mean_curve, places
from clusterprof.evaluation.records import Record
from tests.evaluation.examples import record


def curve(*rows: list[float]) -> Record:
    return record(prompt=str(rows), curves={"hit_rate": list(rows)})


def test_the_mean_is_place_by_place() -> None:
    assert mean_curve([curve([0, 1], [2, 3]), curve([1, 1], [4, 0])], "hit_rate") == [[0.5, 1], [3, 1.5]]


def test_places_that_only_some_have_are_means_over_those() -> None:
    found = mean_curve([curve([1.0], [1.0, 2.0]), curve([3.0, 5.0]), curve([], [3.0])], "hit_rate")
    assert found == [[2.0, 5.0], [2.0, 2.0]]


def test_nobody_has_a_value() -> None:
    (row, other) = mean_curve([curve([1.0, 1.0], [1.0]), curve([1.0], [1.0])], "hit_rate")
    assert (len(row), len(other)) == (2, 1)
    assert not any(map(isnan, [*row, *other]))


@pytest.mark.parametrize(
    "value", [None, [], 1.0, "text", [1.0, 2.0], [[1.0], ["2"]], [[True]], [[None]], {"a": [1.0]}, [[[1.0]]]]
)
def test_what_is_no_curve_is_one_sentence(value: object) -> None:
    curves = {} if value is None else {"hit_rate": value}
    with pytest.raises(
        DataError, match=r"The needle result of snapkv for the prompt needle-0 has no hit_rate"
    ):
        mean_curve([record(curves=curves)], "hit_rate")


def test_places_are_named_or_counted() -> None:
    records = [record(curves={"layers": [5, 11]}), record(curves={"layers": [5]}), record()]
    assert places(records, "layers", 2) == [5, 11]
    assert places(records, "layers", 3) == [0, 1, 2]
    assert places([record(curves={"layers": "all"})], "layers", 1) == [0]
