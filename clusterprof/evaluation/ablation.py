"""Ablation: ClusterAttn around the paper's values, one parameter at a time (Figures 12, 13), and n-grams (Table 12)."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.evaluation.contestants import Contestant
from clusterprof.methods import ClusterAttn, MethodConfig, NGram

NUM_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NGRAMS = (1, 2, 3, 4)
# From where every peak is a centre to where none is.
_THETAS = (1e-5, 0.3)
_STEPS = 18


@dataclass(frozen=True)
class Point:
    """A method to replay, and the labels that tell it from the others."""

    labels: dict[str, int | float]
    method: MethodConfig


def points(size: int) -> list[Point]:
    """The points of both curves of ClusterAttn and the n-grams, none twice.

    The paper's values come first and are on both curves: those with the first point's ``num_block`` are the curve
    of theta, those with its ``theta`` that of num_block, whose points head by head are Figure 12.

    Parameters
    ----------
    size : int
        Prompt tokens kept per KV head, the window included.
    """
    default = ClusterAttn.paper_default(size)
    thetas = [default.model_copy(update={"theta": theta}) for theta in _theta_grid()]
    blocks = [default.model_copy(update={"num_block": count}) for count in NUM_BLOCKS]
    candidates = [default, *(method for method in thetas + blocks if method != default)]
    clusterattn = [Point({"num_block": it.num_block, "theta": it.theta}, it) for it in candidates]
    return clusterattn + [Point({"n": n}, NGram(n=n)) for n in NGRAMS]


def contestants(size: int) -> list[Contestant]:
    """The points as contestants at a size, told apart by their labels."""
    return [
        Contestant(
            point.method.name,
            "ablation",
            lambda _, method=point.method: method,  # type: ignore[misc]
            size=size,
            labels=tuple(point.labels.items()),
        )
        for point in points(size)
    ]


def _theta_grid() -> list[float]:
    low, high = _THETAS
    return [float(f"{low * (high / low) ** (step / (_STEPS - 1)):.3g}") for step in range(_STEPS)]
