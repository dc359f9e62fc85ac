from itertools import pairwise

import pytest

from clusterprof.evaluation.ablation import contestants, points
from clusterprof.methods import ClusterAttn, NGram

SIZES = [64, 128, 1024, 2048, 4096]


def clusterattns(size: int) -> list[ClusterAttn]:
    return [point.method for point in points(size) if isinstance(point.method, ClusterAttn)]


@pytest.mark.parametrize("size", SIZES)
def test_the_papers_values_come_first_and_once(size: int) -> None:
    default = ClusterAttn.paper_default(size)
    found = clusterattns(size)
    assert found[0] == default
    assert found.count(default) == 1


@pytest.mark.parametrize("size", SIZES)
def test_one_parameter_changes_at_a_time(size: int) -> None:
    default, *others = clusterattns(size)
    for method in others:
        changed = {
            name for name in ClusterAttn.model_fields if getattr(method, name) != getattr(default, name)
        }
        assert changed in ({"num_block"}, {"theta"})


@pytest.mark.parametrize("size", SIZES)
def test_curves_cover_the_papers_ranges(size: int) -> None:
    default, *others = clusterattns(size)
    thetas = sorted(it.theta for it in others if it.num_block == default.num_block)
    assert len(thetas) == 18
    assert (thetas[0], thetas[-1]) == (1e-5, 0.3)
    # Log-spaced: no step is much longer than another.
    steps = [high / low for low, high in pairwise(thetas)]
    assert max(steps) / min(steps) < 1.02
    blocks = [default.num_block, *(it.num_block for it in others if it.theta == default.theta)]
    assert (min(blocks), max(blocks)) == (1, 32)


@pytest.mark.parametrize("size", SIZES)
def test_labels_tell_every_point_from_the_others(size: int) -> None:
    found = points(size)
    assert len({tuple(point.labels.items()) for point in found}) == len(found)
    for point in found:
        parameters = point.method.model_dump()
        assert point.labels == {name: parameters[name] for name in point.labels}


def test_n_grams_are_those_of_table_12() -> None:
    assert [point.method for point in points(128) if "n" in point.labels] == [
        NGram(n=n) for n in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_contestants_are_the_points_at_their_size(size: int) -> None:
    found = contestants(size)
    assert [(it.compression(size, 32).method, dict(it.labels)) for it in found] == [
        (point.method, point.labels) for point in points(size)
    ]
    assert {it.size for it in found} == {size}
    assert {it.label for it in found} == {"clusterattn", "ngram"}
