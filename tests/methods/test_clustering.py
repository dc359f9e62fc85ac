"""K-means and DBSCAN: the filling against its plain-loop reference, the clusters against scikit-learn's labels."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from sklearn.cluster import DBSCAN, KMeans
from torch import Tensor

from clusterprof.errors import ClusterprofError
from clusterprof.methods import DBSCANClusters, KMeansClusters, Method
from clusterprof.methods.clustering import keep_clusters
from tests.methods.strategies import UNIT, exact_importances, observed
from tests.reference.selection import select_clusters

METHODS = [KMeansClusters(), DBSCANClusters()]


def labelled(labels: list[int]) -> Callable[[NDArray[np.float64]], NDArray[np.int64]]:
    return lambda points: np.array(labels)


def points(importance: list[float]) -> NDArray[np.float64]:
    highest = max(importance) or 1.0
    return np.array([[i / len(importance), p / highest] for i, p in enumerate(importance)])


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # By mean: cluster 7 with 30, 0 with 20, 3 with 2, 5 with 0. Noise is 4 and 50.
        (1, [9]),
        (2, [4, 5]),
        (3, [4, 5, 9]),
        # Cluster 0 does not fit, and those after it have no turn: single tokens, 50 and 24.
        (4, [0, 4, 5, 9]),
        (5, [0, 1, 2, 4, 5]),
        # Cluster 3 does not fit, so 5 has no turn.
        (6, [0, 1, 2, 4, 5, 9]),
        (7, [0, 1, 2, 4, 5, 6, 7]),
        # The lowest cluster is before the highest noise.
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
    ],
)
def test_whole_clusters_then_single_tokens_by_hand(budget: int, expected: list[int]) -> None:
    importance = torch.tensor([[[24, 20, 16, 0, 35, 25, 1, 3, 4, 50]]]) * UNIT
    labels = [0, 0, 0, 5, 7, 7, 3, 3, -1, -1]
    assert keep_clusters(importance, budget, labelled(labels)).tolist() == [[expected]]


@settings(max_examples=150, deadline=None)
@given(importance=exact_importances(longest=40), data=st.data())
def test_filling_follows_the_reference(importance: Tensor, data: st.DataObject) -> None:
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    labels = data.draw(st.lists(st.integers(-1, 5), min_size=length, max_size=length))
    kept = keep_clusters(importance, budget, labelled(labels))
    assert kept[0, 0].tolist() == select_clusters(importance[0, 0].tolist(), budget, labels)


@settings(max_examples=60, deadline=None)
@given(importance=exact_importances(heads=2, longest=40), clusters=st.integers(1, 12), data=st.data())
def test_kmeans_clusters_position_and_importance(
    importance: Tensor, clusters: int, data: st.DataObject
) -> None:
    length = importance.shape[-1]
    budget = data.draw(st.integers(1, length))
    kept = KMeansClusters(clusters=clusters).select(observed(importance), budget)
    for head in range(2):
        values = importance[0, head].tolist()
        labels = KMeans(min(clusters, length), n_init=1, random_state=0).fit_predict(points(values))
        assert kept[0, head].tolist() == select_clusters(values, budget, labels.tolist())


@settings(max_examples=60, deadline=None)
@given(
    importance=exact_importances(heads=2),
    eps=st.floats(0, 0.2, exclude_min=True),
    min_samples=st.integers(1, 9),
    data=st.data(),
)
def test_dbscan_clusters_position_and_importance(
    importance: Tensor, eps: float, min_samples: int, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    kept = DBSCANClusters(eps=eps, min_samples=min_samples).select(observed(importance), budget)
    for head in range(2):
        values = importance[0, head].tolist()
        labels = DBSCAN(eps=eps, min_samples=min_samples).fit_predict(points(values))
        assert kept[0, head].tolist() == select_clusters(values, budget, labels.tolist())


@pytest.mark.parametrize(
    "method", [KMeansClusters(clusters=2), DBSCANClusters(eps=0.2, min_samples=3)], ids=str
)
def test_two_blobs(method: Method) -> None:
    # Low at the start, high at the end; of the high ones 5 is a little below all others.
    importance = torch.tensor([[[5, 1, 4, 2, 3, 700, 1000, 990, 980, 1000]]]) * UNIT
    kept = method.select(observed(importance), 7)
    assert kept.tolist() == [[[0, 2, *range(5, 10)]]]


def test_noise_is_in_no_cluster() -> None:
    # 20 tokens as high as can be, and a lone one half as high; the rest is in two flat clusters, both too long.
    importance = torch.zeros(1, 1, 100)
    importance[..., 40:60] = 1
    importance[..., 80] = 0.5
    kept = DBSCANClusters(eps=0.05, min_samples=5).select(observed(importance), 25)
    assert kept.tolist() == [[[0, 1, 2, 3, *range(40, 60), 80]]]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("height", [0.0, 2.0**-149, 1.0])
@pytest.mark.parametrize("length", [1, 2, 31, 33, 100])
def test_flat_importance_and_short_prefixes_need_no_warning(
    method: Method, height: float, length: int
) -> None:
    importance = torch.full((1, 2, length), height)
    for budget in {1, (length + 1) // 2, length}:
        assert method.select(observed(importance), budget).shape == (1, 2, budget)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_says_how_to_install_scikit_learn(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(
        ClusterprofError, match=r"needs scikit-learn; .* pip install 'clusterprof\[baselines\]'\.$"
    ):
        method.select(observed(torch.rand(1, 1, 9)), 4)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (KMeansClusters, {"clusters": 0}),
        (KMeansClusters, {"eps": 0.1}),
        (DBSCANClusters, {"eps": 0.0}),
        (DBSCANClusters, {"eps": 1.1}),
        (DBSCANClusters, {"eps": math.nan}),
        (DBSCANClusters, {"min_samples": 0}),
    ],
    ids=str,
)
def test_refuses_parameters_out_of_range(method: type[Method], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        method.model_validate(wrong)
