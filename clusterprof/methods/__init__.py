"""Compression methods: importance of the prefix tokens in, kept positions out."""

from typing import Annotated

from pydantic import Field

from clusterprof.methods.base import Method, Observation
from clusterprof.methods.clusterattn import ClusterAttn
from clusterprof.methods.snapkv import SnapKV
from clusterprof.methods.streaming_llm import StreamingLLM
from clusterprof.methods.topk import TopK

MethodConfig = Annotated[ClusterAttn | SnapKV | StreamingLLM | TopK, Field(discriminator="name")]

__all__ = ["ClusterAttn", "Method", "MethodConfig", "Observation", "SnapKV", "StreamingLLM", "TopK"]
