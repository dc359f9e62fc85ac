"""Held-out samples: how profiles and baselines do on rows that no tune has seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from clusterprof.evaluation import fit
from clusterprof.evaluation.decode import greedy
from clusterprof.evaluation.generation import Score
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.tasks import Entrant, Task
from clusterprof.profiling.capture import end_tokens
from clusterprof.runtime.selection import kept_positions

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session
    from clusterprof.profiling.capture import Capture


@dataclass(frozen=True)
class HeldOutBenchmark:
    """Attention and next tokens against the full run's, and scored answers where the dataset has any.

    Attributes
    ----------
    score : callable, optional
        Scores an answer.
    decode_tokens : int
        Of an answer, at most.
    """

    score: Score | None
    decode_tokens: int
    name: str = "held-out"

    @property
    def settings(self) -> Mapping[str, Any]:
        """How long an answer may be."""
        return {"decode_tokens": self.decode_tokens}

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """The full cache, and those that evict something of the prompt; the rest are the full run."""
        return entrant.size is None or entrant.evicts(task.prompt)

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Capture the task's prompt, and replay and answer it for everyone who enters.

        Raises
        ------
        CompressionError
            If something is not finite.
        """
        evicting = [it for it in entering if it.size is not None]
        windows = {it: session.window(it, task) for it in evicting}
        full = [it for it in entering if it.size is None]
        # The full run is in every capture.
        for window in sorted(set(windows.values())) or [1]:
            alike = [it for it in evicting if windows[it] == window]
            needs = set().union(*(it.needs for it in alike))
            capture = session.capture(task, window, accumulate="accumulated" in needs)
            while full:
                yield full.pop(), self._full(session, task, capture)
            for size in sorted({it.size for it in alike if it.size is not None}):
                yield from self._at_size(session, task, capture, [it for it in alike if it.size == size])

    def _full(self, session: Session, task: Task, capture: Capture) -> Measured:
        tokens: list[int] = capture.tokens[:-1].tolist()
        scores = {
            "cosine": 1.0,
            "cosine_padded": 1.0,
            "attention_output": 1.0,
            "kl": 0.0,
            "agreement": 1.0,
            "loss": capture.full_loss,
        }
        return self._answered(session, task, scores, {}, tokens)

    def _at_size(
        self, session: Session, task: Task, capture: Capture, alike: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        compressions = [it.compression for it in alike if it.compression is not None]
        kept = [kept_positions(it.method, capture.observation, it.size) for it in compressions]
        answers: list[list[int]] = [[] for _ in alike]
        if self.score is not None:
            answers = greedy(
                session.model,
                capture.prompt_cache.compressed(session.model, torch.stack(kept)),
                int(capture.tokens[0]),
                len(alike),
                max_new_tokens=task.max_new_tokens,
                end_tokens=end_tokens(session.model, session.tokenizer),
            )
        for entrant, compression, tokens in zip(alike, compressions, answers, strict=True):
            scores, curves = fit.measure(session.model, capture, compression)
            yield entrant, self._answered(session, task, scores, curves, tokens)

    def _answered(
        self,
        session: Session,
        task: Task,
        scores: Mapping[str, float],
        curves: Mapping[str, Any],
        tokens: Sequence[int],
    ) -> Measured:
        if self.score is None:
            return Measured(scores, curves)
        text = str(session.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return Measured({**scores, **self.score(task, text)}, curves, text)
