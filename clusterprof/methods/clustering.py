"""Keeping whole clusters of tokens, whatever found the clusters; shared by K-means and DBSCAN."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clusterprof.errors import ClusterprofError
from clusterprof.methods.ranking import keep_highest

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Points (length, 2) in, the cluster of each out; -1 is noise.
Clustering = Callable[["NDArray[np.float64]"], "NDArray[Any]"]


def scikit_learn(method: str) -> ModuleType:
    """The module ``sklearn.cluster``, or a ClusterprofError that names the method and says how to install it."""
    try:
        import sklearn.cluster
    except ModuleNotFoundError as error:
        raise ClusterprofError(
            f"{method} needs scikit-learn; install it with pip install 'clusterprof[baselines]'."
        ) from error
    module: ModuleType = sklearn.cluster
    return module


def keep_clusters(importance: Tensor, budget: int, clustering: Clustering) -> Tensor:
    """Cluster each head's tokens by position and importance, and keep the clusters that fit in the budget.

    Clusters come whole, by mean importance, up to the first that does not fit; the highest importance among the
    other tokens fills the rest.

    Parameters
    ----------
    importance : Tensor
        float32, non-negative, ``(batch, kv_heads, length)``.
    budget : int
        Tokens to keep per head.
    clustering : callable
        Takes points ``(length, 2)``, position and importance, both scaled to 0..1, and returns each one's cluster.

    Returns
    -------
    Tensor
        int64 ``(batch, kv_heads, budget)``, sorted ascending, on the importance's device.
    """
    heads = importance.flatten(0, 1).cpu().double().numpy()
    covered = np.stack([_whole_clusters(head, clustering(_points(head)), budget) for head in heads])
    first = torch.from_numpy(covered).view(importance.shape).to(importance.device)
    return keep_highest(importance, budget, first=first)


def _points(head: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coordinates ``(length, 2)``: position / length and importance / its highest."""
    return np.column_stack([np.arange(len(head)) / len(head), head / (head.max() or 1)])


def _whole_clusters(head: NDArray[np.float64], labels: NDArray[Any], budget: int) -> NDArray[np.bool_]:
    """Which tokens ``(length,)`` belong to a cluster that is kept whole."""
    names, first, member, sizes = np.unique(
        labels, return_index=True, return_inverse=True, return_counts=True
    )
    means = np.bincount(member, weights=head) / sizes
    clusters = np.flatnonzero(names >= 0)
    # The earlier of two equal clusters goes first.
    order = clusters[np.lexsort((first[clusters], -means[clusters]))]
    kept = order[np.cumsum(sizes[order]) <= budget]
    return np.isin(member, kept)
