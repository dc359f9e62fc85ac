"""The runtime: compresses a prompt's KV cache during inference; needs torch and transformers only."""

from clusterprof.runtime.cache import CompressedLayer, cache_bytes
from clusterprof.runtime.compress import compress
from clusterprof.runtime.static_cache import StaticCompressedCache

__all__ = ["CompressedLayer", "StaticCompressedCache", "cache_bytes", "compress"]
