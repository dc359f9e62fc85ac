"""Benchmarks on captures: they compare attention with the full run's, and need no answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterprof.evaluation import fit, hit_rate
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.session import kept
from clusterprof.evaluation.tasks import Entrant, Task
from clusterprof.profiling.objective import VERSION as SCORES_VERSION

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session


@dataclass(frozen=True)
class HitRateBenchmark:
    """The paper's hit rate (Figure 4), which no method changes: only the full cache enters.

    Attributes
    ----------
    window : int
        Tokens of the observation window.
    decode_tokens : int
        Of a capture, at most.
    """

    window: int
    decode_tokens: int
    name: str = "hit-rate"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The window, and the paper's thresholds."""
        return {
            "window": self.window,
            "decode_tokens": self.decode_tokens,
            "theta": hit_rate.THETA,
            "mu": hit_rate.MU,
        }

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Every entrant."""
        return True

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Capture the task's prompt, and compare what window and answer look at."""
        scores, curves = hit_rate.measure(session.capture(task, self.window))
        for entrant in entering:
            yield entrant, Measured(scores, curves)


@dataclass(frozen=True)
class FitBenchmark:
    """How close each entrant's attention and next tokens stay to the full run's (Figures 6, 12, 13, Table 12)."""

    name: str
    decode_tokens: int

    @property
    def settings(self) -> Mapping[str, Any]:
        """How long an answer may be, and which scores there are."""
        return {"decode_tokens": self.decode_tokens, "scores": SCORES_VERSION}

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Those that evict something of the prompt; the rest are the full run."""
        return entrant.evicts(task.prompt)

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Replay every entrant on the task's capture."""
        for capture, alike in session.by_window(task, entering):
            for entrant in alike:
                chosen = kept(entrant, capture.observation, capture.layers)
                yield entrant, Measured(*fit.measure(session.model, capture, chosen))
