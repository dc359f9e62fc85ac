"""DBSCAN over position and importance, the paper's second clustering baseline (section 4.2, Figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from clusterprof.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from clusterprof.methods.base import Observation


class DBSCANClusters(Method):
    """Keep whole DBSCAN clusters of tokens, those with the highest mean importance; noise is in no cluster.

    The paper does not give its values; these are to be tuned.

    Attributes
    ----------
    eps : float
        Largest distance of neighbours, where the prefix is 1 long and the highest importance is 1 high.
    min_samples : int
        Tokens within ``eps``, itself included, that make a token the core of a cluster.
    """

    name: Literal["dbscan"] = "dbscan"
    title: ClassVar[str] = "DBSCAN"
    eps: float = Field(default=0.01, gt=0, le=1)
    min_samples: int = Field(default=5, ge=1, le=1_000_000)

    def check_installed(self) -> None:
        """See :meth:`Method.check_installed`."""
        from clusterprof.methods.clustering import scikit_learn

        scikit_learn(self.name)

    def select(self, observation: Observation, budget: int) -> Tensor:
        """See :meth:`Method.select`; raises a ClusterprofError where scikit-learn is not installed."""
        from clusterprof.methods.clustering import keep_clusters, scikit_learn

        cluster = scikit_learn(self.name)
        dbscan = cluster.DBSCAN(eps=self.eps, min_samples=self.min_samples)
        return keep_clusters(observation.importance, budget, dbscan.fit_predict)
