"""The runtime: compresses a prompt's KV cache during inference; needs torch and transformers only."""

from clusterprof.runtime.cache import CompressedCache, CompressedLayer, cache_bytes
from clusterprof.runtime.compress import compress

__all__ = ["CompressedCache", "CompressedLayer", "cache_bytes", "compress"]
