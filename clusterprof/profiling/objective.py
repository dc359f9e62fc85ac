"""Objective: what a replay is worth, as one number per sample and as a mean over samples."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

ObjectiveName = Literal["cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"]

# Raise it when the same kept positions get other scores than before, or more of them.
VERSION = 2

# Nats; what moves the next token's distribution by less counts as if it did not.
NEGLIGIBLE_KL = 1e-3

# What a search goes by unless told otherwise; docs/objective.md says why.
DEFAULT: ObjectiveName = "log_kl"

# Those that compare attention; the others go by what comes out of the model.
OF_ATTENTION: frozenset[ObjectiveName] = frozenset({"cosine", "cosine_padded", "attention_output"})

# Optuna's word for which way is better.
DIRECTIONS: dict[ObjectiveName, Literal["maximize", "minimize"]] = {
    "cosine": "maximize",
    "cosine_padded": "maximize",
    "attention_output": "maximize",
    "kl": "minimize",
    "agreement": "maximize",
    "loss": "minimize",
    "log_kl": "minimize",
}


@dataclass(frozen=True)
class Scores:
    """Means over steps, heads and layers (and samples); see :class:`clusterprof.profiling.replay.Replay`."""

    cosine: float
    cosine_padded: float
    attention_output: float
    kl: float
    agreement: float
    loss: float
    log_kl: float

    @classmethod
    def of_full_cache(cls, loss: float) -> "Scores":
        """The full cache against itself: what no method can beat; ``loss`` is the full run's own."""
        return cls(1.0, 1.0, 1.0, 0.0, 1.0, loss, math.log(NEGLIGIBLE_KL))

    def __getitem__(self, objective: ObjectiveName) -> float:
        return float(getattr(self, objective))


def is_better(value: float, other: float, objective: ObjectiveName) -> bool:
    """Whether a value of an objective is better than another."""
    return value > other if DIRECTIONS[objective] == "maximize" else value < other


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Mean over samples, each with the same weight (paper section 3.4)."""
    rows = [list(asdict(sample).values()) for sample in scores]
    return Scores(*np.mean(rows, axis=0).tolist())
