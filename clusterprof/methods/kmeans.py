"""K-means over position and importance, the paper's first clustering baseline (section 4.2, Figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class KMeansClusters(Method):
    """Keep whole K-means clusters of tokens, those with the highest mean importance.

    Attributes
    ----------
    clusters : int
        How many clusters per head, at most one per token. The paper does not give its number.
    """

    name: Literal["kmeans"] = "kmeans"
    title: ClassVar[str] = "K-means"
    clusters: int = Field(default=32, ge=1, le=1_000_000)

    def check_installed(self) -> None:
        """See :meth:`Method.check_installed`."""
        from clusterprof.methods.clustering import scikit_learn

        scikit_learn(self.name)

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`; raises a ClusterprofError where scikit-learn is not installed."""
        from clusterprof.methods.clustering import keep_clusters, scikit_learn

        cluster = scikit_learn(self.name)
        # Comes with scikit-learn.
        from threadpoolctl import threadpool_limits

        count = min(self.clusters, observation.importance.shape[-1])
        # No two tokens have the same position, so there are as many distinct points as tokens.
        kmeans = cluster.KMeans(count, n_init=1, random_state=0)
        # Several threads would add up in any order, which could move a token to another cluster.
        with threadpool_limits(limits=1, user_api="openmp"):
            return keep_clusters(observation.importance, budget, kmeans.fit_predict)
