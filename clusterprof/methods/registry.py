"""Which methods there are, by name, and the values that their papers give them."""

from typing import Annotated

from pydantic import Field

from clusterprof.errors import ClusterprofError
from clusterprof.methods.base import Method
from clusterprof.methods.clusterattn import ClusterAttn
from clusterprof.methods.dbscan import DBSCANClusters
from clusterprof.methods.h2o import H2O
from clusterprof.methods.kmeans import KMeansClusters
from clusterprof.methods.ngram import NGram
from clusterprof.methods.snapkv import SnapKV
from clusterprof.methods.streaming_llm import StreamingLLM
from clusterprof.methods.topk import TopK

MethodConfig = Annotated[
    ClusterAttn | SnapKV | TopK | StreamingLLM | H2O | KMeansClusters | DBSCANClusters | NGram,
    Field(discriminator="name"),
]

METHODS: dict[str, type[Method]] = {
    "clusterattn": ClusterAttn,
    "snapkv": SnapKV,
    "topk": TopK,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "kmeans": KMeansClusters,
    "dbscan": DBSCANClusters,
    "ngram": NGram,
}


def method_names() -> tuple[str, ...]:
    """Names of all methods that compress, in the order in which comparisons show them."""
    return tuple(METHODS)


def default_method(name: str, size: int, *, evict_while_decoding: bool = False) -> MethodConfig:
    """A method with its paper's values.

    Parameters
    ----------
    name : str
        One of :func:`method_names`.
    size : int
        Prompt tokens kept per KV head, the window included.
    evict_while_decoding : bool
        Let it hold the cache at ``size`` tokens at every decode step, too.

    Raises
    ------
    ClusterprofError
        If the method only compresses prompts and was asked to evict while decoding.
    """
    method: MethodConfig = METHODS[name].paper_default(size)  # type: ignore[assignment]
    if not evict_while_decoding:
        return method
    if not isinstance(method, H2O | StreamingLLM):
        able = " and ".join(
            other for other in METHODS if "evict_while_decoding" in METHODS[other].model_fields
        )
        raise ClusterprofError(
            f"{name} compresses prompts only, it does not evict while decoding; the methods that do are {able}."
        )
    return method.model_copy(update={"evict_while_decoding": True})
