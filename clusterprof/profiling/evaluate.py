"""Evaluation of candidates: replays a compression on every capture and remembers equal kept sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.replay import Replay, replay
from clusterprof.runtime.selection import kept_positions


@dataclass
class Evaluator:
    """Scores compressions on a fixed set of captures.

    Attributes
    ----------
    replays : int
        How many replays were run; a kept set seen before is looked up instead.
    """

    model: PreTrainedModel
    captures: Sequence[Capture]
    replays: int = 0
    _known: list[dict[bytes, Scores]] = field(init=False)

    def __post_init__(self) -> None:
        self._known = [{} for _ in self.captures]

    def scores(self, compression: Compression) -> list[Scores]:
        """One result per capture.

        Raises
        ------
        CompressionError
            If a replay's result is not finite.
        """
        return [self.sample_scores(i, compression) for i in range(len(self.captures))]

    def sample_scores(self, i: int, compression: Compression) -> Scores:
        """Of one capture; raises as :meth:`scores`."""
        kept = kept_positions(compression.method, self.captures[i].observation, compression.size)
        key = kept.to(torch.int32).numpy().tobytes()
        if key not in self._known[i]:
            self._known[i][key] = _scores(replay(self.model, self.captures[i], kept))
            self.replays += 1
        return self._known[i][key]

    def full_scores(self) -> list[Scores]:
        """The full cache against itself: what no method can beat."""
        return [Scores(1.0, 1.0, 1.0, 0.0, 1.0, capture.full_loss) for capture in self.captures]


def _scores(result: Replay) -> Scores:
    return Scores(
        cosine=float(result.cosine.mean()),
        cosine_padded=float(result.cosine_padded.mean()),
        attention_output=float(result.attention_output.mean()),
        kl=float(result.kl.mean()),
        agreement=float(result.agreement.mean()),
        loss=float(result.loss.mean()),
    )
