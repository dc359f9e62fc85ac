"""Compression methods: what was observed of the prefix in, kept positions out."""

from clusterprof.methods.base import Method, Need, Observation, Pooling, Reduction
from clusterprof.methods.clusterattn import ClusterAttn
from clusterprof.methods.dbscan import DBSCANClusters
from clusterprof.methods.full import Full
from clusterprof.methods.h2o import H2O
from clusterprof.methods.kmeans import KMeansClusters
from clusterprof.methods.ngram import NGram
from clusterprof.methods.registry import METHODS, MethodConfig, default_method, method_names
from clusterprof.methods.snapkv import SnapKV
from clusterprof.methods.streaming_llm import StreamingLLM
from clusterprof.methods.topk import TopK

__all__ = [
    "H2O",
    "METHODS",
    "ClusterAttn",
    "DBSCANClusters",
    "Full",
    "KMeansClusters",
    "Method",
    "MethodConfig",
    "NGram",
    "Need",
    "Observation",
    "Pooling",
    "Reduction",
    "SnapKV",
    "StreamingLLM",
    "TopK",
    "default_method",
    "method_names",
]
