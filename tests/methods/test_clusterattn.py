import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from clusterprof.methods import ClusterAttn, Observation, Pooling, SnapKV
from tests.methods.strategies import UNIT, exact_importances, observed, odd, poolings
from tests.reference.selection import select_clusterattn


def head(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.float32)[None, None] * UNIT


@settings(max_examples=400, deadline=None)
@given(
    importance=exact_importances(),
    num_block=st.integers(1, 40),
    # Exact thetas also meet the case of a centre that equals theta.
    theta=st.integers(0, 1024).map(lambda count: count * UNIT),
    gap_pool=odd(63),
    gap_pooling=poolings,
    data=st.data(),
)
def test_follows_the_steps_of_the_reference(
    importance: Tensor,
    num_block: int,
    theta: float,
    gap_pool: int,
    gap_pooling: Pooling,
    data: st.DataObject,
) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    method = ClusterAttn(num_block=num_block, theta=theta, gap_pool=gap_pool, gap_pooling=gap_pooling)
    expected = select_clusterattn(importance[0, 0].tolist(), budget, num_block, theta, gap_pool, gap_pooling)
    assert method.select(observed(importance), budget)[0, 0].tolist() == expected


@settings(deadline=None)
@given(mean=exact_importances(longest=40), data=st.data())
def test_max_goes_by_the_highest_importance_alone(mean: Tensor, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 1024), min_size=mean.shape[-1], max_size=mean.shape[-1]))
    budget = data.draw(st.integers(1, mean.shape[-1]))
    peak = head(counts)
    method = ClusterAttn(num_block=2, theta=100 * UNIT, importance="max")
    expected = select_clusterattn(peak[0, 0].tolist(), budget, 2, 100 * UNIT)
    assert method.select(Observation(mean, 4, peak=peak), budget)[0, 0].tolist() == expected


@pytest.mark.parametrize(("gap_pool", "gap_pooling"), [(1, "avg"), (15, "avg"), (15, "max")])
@pytest.mark.parametrize("num_block", [1, 2, 8, 32])
@pytest.mark.parametrize("theta", [0.0, 3 * UNIT, 40 * UNIT, 1.0])
def test_follows_the_reference_on_a_long_prefix(
    num_block: int, theta: float, gap_pool: int, gap_pooling: Pooling
) -> None:
    generator = torch.Generator().manual_seed(num_block)
    # Skewed like attention: mostly next to nothing, with a few peaks.
    counts = (torch.rand(1, 2, 1500, generator=generator) ** 8 * 64).floor()
    method = ClusterAttn(num_block=num_block, theta=theta, gap_pool=gap_pool, gap_pooling=gap_pooling)
    kept = method.select(observed(counts * UNIT), 224)
    for h in range(2):
        head_counts = (counts[0, h] * UNIT).tolist()
        expected = select_clusterattn(head_counts, 224, num_block, theta, gap_pool, gap_pooling)
        assert kept[0, h].tolist() == expected


def test_by_default_gaps_are_filled_by_averages_over_fifteen() -> None:
    method = ClusterAttn(num_block=8, theta=2e-3)
    assert (method.gap_pool, method.gap_pooling) == (15, "avg")


@settings(max_examples=100, deadline=None)
@given(importance=exact_importances(rows=2, heads=2), num_block=st.integers(1, 8), data=st.data())
def test_without_a_centre_it_is_snapkv(importance: Tensor, num_block: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    pool, pooling = data.draw(odd(31)), data.draw(poolings)
    importance = importance.clamp(max=0.5)
    method = ClusterAttn(num_block=num_block, theta=0.75, gap_pool=pool, gap_pooling=pooling)
    pooled = SnapKV(kernel_size=pool, pooling=pooling).select(observed(importance), budget)
    assert torch.equal(method.select(observed(importance), budget), pooled)


def test_each_head_has_its_own_neighbourhood_width() -> None:
    # One survivor gets all of the budget around it; three get a third of it each.
    one = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 90, 0, 0, 0, 0, 0]
    three = [0, 90, 0, 0, 0, 0, 0, 0, 0, 0, 90, 0, 0, 0, 0, 0, 0, 0, 0, 90, 0]
    importance = torch.cat([head(one), head(three)], dim=1)
    kept = ClusterAttn(num_block=1, theta=50 * UNIT, gap_pool=1).select(observed(importance), 9)
    assert kept[0].tolist() == [[*range(11, 20)], [0, 1, 2, 9, 10, 11, 18, 19, 20]]


@pytest.mark.parametrize(
    ("size", "theta"),
    [(64, 2e-3), (1024, 2e-3), (2048, 1e-3), (4096, 8e-4), (131_072, 8e-4), (1448, math.sqrt(2e-6))],
)
def test_paper_default(size: int, theta: float) -> None:
    default = ClusterAttn.paper_default(size)
    assert default.num_block == 8
    assert default.theta == pytest.approx(theta, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_block": 0},
        {"num_block": -1},
        {"num_block": 1.5},
        {"num_block": 10**9},
        {"theta": math.nan},
        {"theta": math.inf},
        {"theta": -1e-9},
        {"theta": 1.0001},
        {"gap_pool": 0},
        {"gap_pool": 2},
        {"gap_pool": 1025},
        {"gap_pooling": "mean"},
        {"name": "snapkv"},
        {"kernel_size": 5},
    ],
    ids=str,
)
def test_refuses_parameters_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ClusterAttn.model_validate({"num_block": 8, "theta": 2e-3} | wrong)


def test_parameters_cannot_be_changed_past_the_checks() -> None:
    method = ClusterAttn(num_block=8, theta=2e-3)
    with pytest.raises(ValidationError, match="frozen"):
        method.theta = math.nan
