import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import Tensor

from clusterprof.methods import (
    ClusterAttn,
    MethodConfig,
    Pooling,
    Reduction,
    SnapKV,
    StreamingLLM,
    default_method,
    method_names,
)
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName
from clusterprof.profiling.spaces import SearchSpace, search_space, theta_range
from clusterprof.runtime.selection import kept_positions
from tests.methods.strategies import odd, poolings, reductions
from tests.profiling.test_theta_range import EXTREMES, attention_like, with_importance

SIZE, WINDOW = 256, 32
CAPTURES = [with_importance(attention_like(seed) / 50, WINDOW) for seed in range(2)]

# Written down by hand; theta's range is tested apart.
DECLARED: dict[str, dict[str, Any]] = {
    "clusterattn": {
        "num_block": (1, 32),
        "gap_pool": (1, 63),
        "gap_pooling": ("avg", "max"),
        "importance": ("mean", "max"),
    },
    "snapkv": {"kernel_size": (1, 63), "pooling": ("avg", "max"), "importance": ("mean", "max")},
    "topk": {},
    "streaming_llm": {"initial_tokens": (0, 64)},
    "h2o": {"recent_share": (0.1, 0.9)},
    "kmeans": {"clusters": (2, 128)},
    "dbscan": {"eps": (1e-3, 0.2), "min_samples": (1, 20)},
    "ngram": {"n": (1, 4)},
}


def space_of(
    name: str, captures: list[Capture] = CAPTURES, size: int = SIZE, objective: ObjectiveName = "kl"
) -> SearchSpace:
    return search_space(name, captures, size, WINDOW, objective)


def test_every_method_has_a_space() -> None:
    assert DECLARED.keys() == set(method_names())
    for name, declared in DECLARED.items():
        ranges = space_of(name).ranges()
        if name == "clusterattn":
            assert ranges.pop("theta") == theta_range(CAPTURES, SIZE)
        assert ranges == declared


@pytest.mark.parametrize("objective", DIRECTIONS)
@pytest.mark.parametrize("name", method_names())
def test_objectives_of_attention_do_not_choose_the_reduction(name: str, objective: ObjectiveName) -> None:
    searched = space_of(name, objective=objective).distributions.keys()
    every = DECLARED[name].keys() | ({"theta"} if name == "clusterattn" else set())
    assert searched == (
        every if objective in {"log_kl", "kl", "agreement", "loss"} else every - {"importance"}
    )


@pytest.mark.parametrize("name", method_names())
@pytest.mark.parametrize("size", [34, 36, 64, 256, 4096])
def test_the_default_is_in_its_space(name: str, size: int) -> None:
    space = space_of(name, size=size)
    assert space.first.keys() == space.distributions.keys()
    for parameter, distribution in space.distributions.items():
        assert distribution._contains(distribution.to_internal_repr(space.first[parameter]))
    default = default_method(name, size)
    assert space.compression(space.first) == Compression(size=size, window=WINDOW, method=default)
    points = space.points()
    assert points is None or points.count(space.first) == 1


def ends(space: SearchSpace) -> list[dict[str, Any]]:
    """Every corner of a space."""
    axes = []
    for distribution in space.distributions.values():
        if isinstance(distribution, CategoricalDistribution):
            axes.append(list(distribution.choices))
        else:
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            axes.append([distribution.low, distribution.high])
    return [dict(zip(space.distributions, corner, strict=True)) for corner in itertools.product(*axes)]


@pytest.mark.parametrize("name", method_names())
def test_every_point_is_a_valid_method_that_differs_in_what_is_searched_alone(name: str) -> None:
    space = space_of(name)
    default = space.default.model_dump()
    for point in [*ends(space), *(space.points() or [])]:
        compression = space.compression(point)
        assert type(compression.method) is type(space.default)
        assert compression.method.model_dump() == default | point
        # A method made from what a profile holds is checked there, too.
        assert Compression.model_validate_json(compression.model_dump_json()) == compression


@pytest.mark.parametrize(
    ("name", "count"),
    [("snapkv", 128), ("topk", 1), ("streaming_llm", 65), ("kmeans", 127), ("ngram", 4)],
)
def test_finite_spaces_list_each_point_once(name: str, count: int) -> None:
    points = space_of(name).points()
    assert points is not None
    assert len(points) == len({tuple(point.values()) for point in points}) == count


@pytest.mark.parametrize("name", ["clusterattn", "h2o", "dbscan"])
def test_continuous_spaces_have_no_list(name: str) -> None:
    assert space_of(name).points() is None


def test_kernels_are_odd_and_neighbours_are_side_by_side() -> None:
    points = space_of("snapkv").points()
    assert points is not None
    assert [point["kernel_size"] for point in points] == [n for n in range(1, 64, 2) for _ in range(4)]
    assert [point["pooling"] for point in points] == ["avg", "avg", "max", "max"] * 32
    assert [point["importance"] for point in points] == ["mean", "max"] * 64


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 100))
def test_initial_tokens_stay_below_the_smallest_budget(windows: list[int], budget: int) -> None:
    captures = [with_importance(attention_like(), window) for window in windows]
    size = max(windows) + budget
    high = search_space("streaming_llm", captures, size, "query", "kl").ranges()["initial_tokens"][1]
    # The default is always among what is tried; where it fills the budget, it is the last.
    assert high == max(4, min(64, size - max(windows) - 1))
    if budget > 4:
        assert high < budget


def test_the_window_is_kept() -> None:
    assert search_space("topk", CAPTURES, SIZE, "query", "cosine").compression({}).window == "query"


def test_evicting_while_decoding_is_not_searched() -> None:
    for name in method_names():
        space = space_of(name)
        assert "evict_while_decoding" not in space.distributions
        assert not getattr(space.default, "evict_while_decoding", False)


def test_what_is_not_searched_stays_as_in_the_default() -> None:
    default: MethodConfig = ClusterAttn(num_block=8, theta=1e-3, gap_pool=3)
    space = SearchSpace(default, SIZE, WINDOW, {"num_block": IntDistribution(1, 32)})
    assert space.compression({"num_block": 2}).method == ClusterAttn(num_block=2, theta=1e-3, gap_pool=3)
    other = SearchSpace(StreamingLLM(initial_tokens=9), SIZE, WINDOW, {})
    assert other.compression({}).method == StreamingLLM(initial_tokens=9)
    assert other.points() == [{}]


@pytest.mark.parametrize("parameter", ["theta", "eps"])
def test_scales_are_logarithmic(parameter: str) -> None:
    name = {"theta": "clusterattn", "eps": "dbscan"}[parameter]
    distribution = space_of(name).distributions[parameter]
    assert isinstance(distribution, FloatDistribution)
    assert distribution.log


@pytest.mark.parametrize("most", [1, 2, 15, 16, 50, 500])
@pytest.mark.parametrize("name", method_names())
def test_a_grid_is_no_larger_than_asked_for_and_lies_in_the_space(name: str, most: int) -> None:
    space = space_of(name)
    grid = space.grid(most)
    choices = [
        len(it.choices) for it in space.distributions.values() if isinstance(it, CategoricalDistribution)
    ]
    assert 1 <= len(grid) <= max(most, int(np.prod(choices)))
    assert len({tuple(point.values()) for point in grid}) == len(grid)
    for point in grid:
        space.compression(point)
        for parameter, distribution in space.distributions.items():
            assert distribution._contains(distribution.to_internal_repr(point[parameter]))


def test_a_grid_reaches_the_ends_and_is_logarithmic_where_the_scale_is() -> None:
    space = space_of("clusterattn")
    grid = space.grid(3 * 3 * 3 * 2 * 2)
    low, high = theta_range(CAPTURES, SIZE)
    values = {name: sorted({point[name] for point in grid}) for name in space.distributions}
    assert values["num_block"] == [1, 17, 32]
    assert values["theta"] == pytest.approx([low, (low * high) ** 0.5, high])
    assert values["gap_pool"] == [1, 33, 63]
    assert len(grid) == 108
    # Every point of a finite space, if there is room for all of them.
    assert sorted(map(str, space_of("snapkv").grid(128))) == sorted(
        map(str, space_of("snapkv").points() or [])
    )


@given(
    kernel=odd(63),
    pooling=poolings,
    importance=reductions,
    objective=st.sampled_from(["kl", "cosine"]),
    mean=st.sampled_from([attention_like() / 50, *EXTREMES.values()]),
)
def test_clusterattn_can_choose_as_snapkv_does(
    kernel: int, pooling: Pooling, importance: Reduction, objective: ObjectiveName, mean: Tensor
) -> None:
    """Without a centre, filled by the same pooling."""
    peak = (mean * torch.linspace(1, 4, mean.shape[-1])).clamp(max=1 + 2**-23)
    captured = with_importance(mean, WINDOW, peak)
    space = search_space("clusterattn", [captured], SIZE, WINDOW, objective)
    if "importance" not in space.distributions:
        importance = "mean"
    snapkv = SnapKV(kernel_size=kernel, pooling=pooling, importance=importance)
    point = space.like(snapkv)
    assert point is not None
    assert point.keys() == space.distributions.keys()
    for parameter, distribution in space.distributions.items():
        assert distribution._contains(distribution.to_internal_repr(point[parameter]))
    ours, theirs = (
        kept_positions(method, captured.observation, SIZE)
        for method in (space.compression(point).method, snapkv)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["snapkv", "topk", "kmeans"])
def test_other_methods_cannot(name: str) -> None:
    assert space_of(name).like(SnapKV()) is None
    assert space_of("clusterattn").like(ClusterAttn(num_block=2, theta=0.1)) is None
