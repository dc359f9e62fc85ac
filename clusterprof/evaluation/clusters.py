"""Clusters: what ClusterAttn made of one head's importance, and the text under it (paper, Figures 1 and 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from clusterprof.errors import CompressionError
from clusterprof.evaluation.decode_attention import full_attention_layer
from clusterprof.methods import ClusterAttn, Observation
from clusterprof.profiling.capture import Capture
from clusterprof.runtime.cache import check_finite
from clusterprof.text import one_line

# First position, and the one after the last.
Run = tuple[int, int]


@dataclass(frozen=True)
class HeadClusters:
    """The prefix as one KV head sees it; positions are int64 and sorted.

    Attributes
    ----------
    layer, kv_head : int
        Which head.
    method : ClusterAttn
        What chose.
    importance : Tensor
        Float32 ``(prefix_length,)``.
    centres, dropped : Tensor
        Positions of the peaks that became centres, and of those below theta.
    kept, clustered, filled : Tensor
        Positions that survive, and which of them lie in a cluster or, where budget was left, in a gap.
    """

    layer: int
    kv_head: int
    method: ClusterAttn
    importance: Tensor
    centres: Tensor
    dropped: Tensor
    kept: Tensor
    clustered: Tensor
    filled: Tensor

    @property
    def runs(self) -> list[Run]:
        """The kept set as runs of consecutive positions."""
        return runs_of(self.kept)

    def strongest(self, count: int) -> list[Run]:
        """At most so many runs, those that the window looks at most, in the order of the prefix."""
        by_attention = sorted(self.runs, key=lambda run: -self.attention(run))
        return sorted(by_attention[:count])

    def attention(self, run: Run) -> float:
        """A run's importance in all: where that is a mean, its share of the window's attention."""
        return float(self.importance[slice(*run)].sum())


def explain(capture: Capture, method: ClusterAttn, size: int, layer: int, kv_head: int) -> HeadClusters:
    """What a method does to one head of a captured prompt.

    Parameters
    ----------
    capture : Capture
        Of a prompt longer than ``size``.
    method : ClusterAttn
        With its parameters.
    size : int
        Prompt tokens kept, the window included.
    layer, kv_head : int
        By index in the model.

    Raises
    ------
    CompressionError
        If there is no such head, or its importance is not finite.
    """
    of_layer = full_attention_layer(capture, layer)
    heads = of_layer.importance
    if not 0 <= kv_head < len(heads):
        raise CompressionError(f"Layer {layer} has no KV head {kv_head}; it has 0 to {len(heads) - 1}.")
    check_finite(heads, layer)
    mean, peak = (of_head[None, kv_head : kv_head + 1] for of_head in (heads, of_layer.peak))
    observation = Observation(mean, window=capture.window, peak=peak)
    importance = observation.reduced(method.importance)
    budget = size - capture.window
    clusters = method.clusters(importance, budget)
    kept = method.select(observation, budget)[0, 0]
    centres, survives = clusters.centres[0, 0], clusters.survives[0, 0]
    in_cluster = clusters.covered[0, 0, kept]
    return HeadClusters(
        layer=layer,
        kv_head=kv_head,
        method=method,
        importance=importance[0, 0],
        centres=centres[survives],
        dropped=centres[~survives],
        kept=kept,
        clustered=kept[in_cluster],
        filled=kept[~in_cluster],
    )


def runs_of(positions: Tensor) -> list[Run]:
    """Sorted positions ``(count,)`` as runs of consecutive ones."""
    if not len(positions):
        return []
    breaks = torch.nonzero(positions.diff() > 1)[:, 0] + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in positions.tensor_split(breaks)]


def texts(
    tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], runs: Sequence[Run], limit: int
) -> list[str]:
    """The text under each run of a prompt, on one line and cut to ``limit`` characters."""
    return [one_line(str(tokenizer.decode(list(input_ids[slice(*run)]))), limit) for run in runs]
