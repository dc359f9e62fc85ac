"""Subjects: the caches that are measured against each other, compressed ones all at the same size."""

from dataclasses import dataclass

from clusterprof.methods import MethodConfig, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Compression


@dataclass(frozen=True)
class Subject:
    """One cache to measure.

    Attributes
    ----------
    name, label : str
        For documents and for people.
    compression : Compression, optional
        What the prompt is compressed to; without it the cache is the full one.
    preallocated : bool
        Whether a full cache has room for the new tokens from the start; its prefill is the other full cache's.
    """

    name: str
    label: str
    compression: Compression | None = None
    preallocated: bool = False

    def compresses(self, tokens: int) -> bool:
        """Whether anything of a prompt of so many tokens is left out."""
        return self.compression is not None and tokens > self.compression.size


FULL = Subject("full", "full cache")
PREALLOCATED = Subject("full_preallocated", "full, preallocated", preallocated=True)


def subjects(ours: Compression, *, tuned: bool) -> list[Subject]:
    """Return the full caches, ours, and the baselines at our size and window.

    Parameters
    ----------
    ours : Compression
        Its window is a number of tokens.
    tuned : bool
        Whether it comes from a profile; for the label.
    """
    label = f"profile ({ours.method.name})" if tuned else ours.method.title
    baselines: list[MethodConfig] = [SnapKV(), StreamingLLM(), TopK()]
    return [
        FULL,
        PREALLOCATED,
        Subject("ours", label, ours),
        *(Subject(method.name, method.title, ours.uniform(method)) for method in baselines),
    ]
