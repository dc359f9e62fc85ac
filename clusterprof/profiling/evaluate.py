"""Evaluation of candidates: replays a compression on every capture and remembers equal kept sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.replay import Replay, replay_all
from clusterprof.runtime.selection import kept_by_layer

# Scores, and the cosine of the attention's outputs by layer.
_Known = tuple[Scores, Tensor]


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
    _known: list[dict[bytes, _Known]] = field(init=False)

    def __post_init__(self) -> None:
        self._known = [{} for _ in self.captures]

    def scores(self, compression: Compression) -> list[Scores]:
        """One result per capture.

        Raises
        ------
        CompressionError
            If a replay's result is not finite.
        """
        return [scores for scores, _ in self._everywhere(compression)]

    def outputs_by_layer(self, compression: Compression) -> Tensor:
        """Cosine of the attention's outputs in each full-attention layer, the mean over samples: float32 ``(layers,)``.

        Raises
        ------
        CompressionError
            As :meth:`scores`.
        """
        return torch.stack([outputs for _, outputs in self._everywhere(compression)]).mean(dim=0)

    def sample_scores(self, i: int, compressions: Sequence[Compression]) -> list[Scores | CompressionError]:
        """Of one capture, replaying all that is new in one forward; an error where a result is not finite."""
        return [it if isinstance(it, CompressionError) else it[0] for it in self._sample(i, compressions)]

    def _everywhere(self, compression: Compression) -> list[_Known]:
        results = []
        for i in range(len(self.captures)):
            (result,) = self._sample(i, [compression])
            if isinstance(result, CompressionError):
                raise result
            results.append(result)
        return results

    def _sample(self, i: int, compressions: Sequence[Compression]) -> list[_Known | CompressionError]:
        capture, known = self.captures[i], self._known[i]
        kept = [kept_by_layer(each, capture.observation, capture.layers) for each in compressions]
        keys = [each.to(torch.int32).numpy().tobytes() for each in kept]
        new = {key: each for key, each in zip(keys, kept, strict=True) if key not in known}
        failed: dict[bytes, CompressionError] = {}
        if new:
            results = self._replayed(capture, torch.stack(list(new.values())))
            self.replays += len(new)
            for key, result in zip(new, results, strict=True):
                if isinstance(result, CompressionError):
                    failed[key] = result
                else:
                    known[key] = _scores(result), result.attention_output.mean(dim=(1, 2)).cpu()
        return [failed[key] if key in failed else known[key] for key in keys]

    def _replayed(self, capture: Capture, kept: Tensor) -> list[Replay | CompressionError]:
        try:
            return replay_all(self.model, capture, kept)
        except torch.OutOfMemoryError:
            if len(kept) == 1:
                raise
        # One row takes less.
        return [result for row in kept.unsqueeze(1) for result in replay_all(self.model, capture, row)]

    def full_scores(self) -> list[Scores]:
        """Those of the full cache, of each capture."""
        return [Scores.of_full_cache(capture.full_loss) for capture in self.captures]


def _scores(result: Replay) -> Scores:
    return Scores(**{field.name: float(getattr(result, field.name).mean()) for field in fields(Scores)})
