"""Evaluation of candidates: replays a compression on every capture and remembers equal kept sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.replay import Replay, replay
from clusterprof.runtime.selection import kept_by_layer


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
    _known: list[dict[bytes, tuple[Scores, Tensor]]] = field(init=False)

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
        return self._sample(i, compression)[0]

    def outputs_by_layer(self, compression: Compression) -> Tensor:
        """Cosine of the attention's outputs in each full-attention layer, the mean over samples: float32 ``(layers,)``.

        Raises
        ------
        CompressionError
            As :meth:`scores`.
        """
        by_sample = [self._sample(i, compression)[1] for i in range(len(self.captures))]
        return torch.stack(by_sample).mean(dim=0)

    def _sample(self, i: int, compression: Compression) -> tuple[Scores, Tensor]:
        capture = self.captures[i]
        kept = kept_by_layer(compression, capture.observation, capture.layers)
        key = kept.to(torch.int32).numpy().tobytes()
        if key not in self._known[i]:
            result = replay(self.model, capture, kept)
            self._known[i][key] = _scores(result), result.attention_output.mean(dim=(1, 2)).cpu()
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
