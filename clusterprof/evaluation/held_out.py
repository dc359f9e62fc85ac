"""Held-out samples: how profiles and baselines do on rows that no tune has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from clusterprof.evaluation import fit
from clusterprof.evaluation.decode import greedy
from clusterprof.evaluation.generation import Score
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.session import kept
from clusterprof.evaluation.tasks import Entrant, Task
from clusterprof.profiling.capture import end_tokens
from clusterprof.profiling.objective import VERSION as SCORES_VERSION
from clusterprof.profiling.objective import Scores

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session
    from clusterprof.profiling.capture import Capture


@dataclass(frozen=True)
class HeldOutBenchmark:
    """Attention and next tokens against the full run's, and scored answers where the dataset has any, and whole ones.

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
        """How long an answer may be, which are scored, and what else is measured."""
        return {"decode_tokens": self.decode_tokens, "scored": "whole answers", "scores": SCORES_VERSION}

    def is_scored(self, task: Task) -> bool:
        """Whether answers to a task are scored: not if they may be cut that the row's own protocol would not cut."""
        return self.score is not None and _longest(task) <= task.max_new_tokens

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
        full = [it for it in entering if it.size is None]
        evicting = [it for it in entering if it.size is not None]
        # The full run is in every capture.
        captured: Iterable[tuple[Capture, list[Entrant]]] = (
            session.by_window(task, evicting) if evicting else [(session.capture(task, 1), [])]
        )
        for capture, alike in captured:
            while full:
                yield full.pop(), self._full(session, task, capture)
            for size in sorted({it.size for it in alike if it.size is not None}):
                yield from self._at_size(session, task, capture, [it for it in alike if it.size == size])

    def _full(self, session: Session, task: Task, capture: Capture) -> Measured:
        tokens: list[int] = capture.tokens[:-1].tolist()
        return self._answered(session, task, asdict(Scores.of_full_cache(capture.full_loss)), {}, tokens)

    def _at_size(
        self, session: Session, task: Task, capture: Capture, alike: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        chosen = [kept(it, capture.observation, capture.layers) for it in alike]
        answers: list[list[int]] = [[] for _ in alike]
        if self.is_scored(task):
            answers = greedy(
                session.model,
                capture.prompt_cache.compressed(session.model, torch.stack(chosen)),
                int(capture.tokens[0]),
                len(alike),
                max_new_tokens=_longest(task),
                end_tokens=end_tokens(session.model, session.tokenizer),
            )
        for entrant, positions, tokens in zip(alike, chosen, answers, strict=True):
            scores, curves = fit.measure(session.model, capture, positions)
            yield entrant, self._answered(session, task, scores, curves, tokens)

    def _answered(
        self,
        session: Session,
        task: Task,
        scores: Mapping[str, float],
        curves: Mapping[str, Any],
        tokens: Sequence[int],
    ) -> Measured:
        if self.score is None or not self.is_scored(task):
            return Measured(scores, curves)
        answer = list(tokens)[: _longest(task)]
        text = str(session.tokenizer.decode(answer, skip_special_tokens=True))
        return Measured({**scores, **self.score(task, text)}, curves, text)


def _longest(task: Task) -> int:
    """Tokens of an answer that is scored: as many as the row's own protocol generates, if it has one."""
    return task.row.max_new_tokens or task.max_new_tokens
