"""Values per layer: which of the points that a search tried serve which layers best, settled by replays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clusterprof.errors import spares_the_run
from clusterprof.methods import MethodConfig
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.interrupt import held_back_interrupt
from clusterprof.profiling.objective import ObjectiveName, is_better, mean_scores

# Groups of neighbouring layers: with more of them there is more to replay, and more to fit to the tuning prompts alone.
GROUPS = 4
# Points that are replayed for each group.
CANDIDATES = 3


@dataclass(frozen=True)
class PerLayer:
    """What a search per layer found.

    Attributes
    ----------
    best : Compression, optional
        With overrides; None if on the tuning prompts nothing was better than the same values in all layers.
    tried : int
        Combinations that were replayed.
    replays : int
        What all of it took; of a study from before, also its points anew.
    """

    best: Compression | None
    tried: int
    replays: int


def search_per_layer(
    evaluator: Evaluator,
    uniform: Compression,
    points: Sequence[Compression],
    *,
    objective: ObjectiveName,
    on_step: Callable[[], None],
    on_interrupt: Callable[[], None],
) -> PerLayer:
    """Give one group of layers after the other the values with which the objective is best.

    Every replay compares attention layer by layer, so each point that was tried says how good its values are for each
    group: by the cosine of the attention's outputs there. The best few of a group are replayed, together with what the
    groups before it have got.

    Parameters
    ----------
    evaluator : Evaluator
        Of the tuning prompts.
    uniform : Compression
        The best point.
    points : sequence of Compression
        All that were tried, each the same in all layers.
    on_step : callable
        Called at most :func:`most_steps` times, as the search advances.
    on_interrupt : callable
        Called when Ctrl-C comes.

    Raises
    ------
    KeyboardInterrupt
        After a Ctrl-C, when the step under way is over.
    """
    before = evaluator.replays
    layers = list(evaluator.captures[0].layers)
    with held_back_interrupt(on_interrupt) as check_interrupt:

        def step() -> None:
            on_step()
            check_interrupt()

        outputs = _outputs(evaluator, points, step)
        greedy = _Greedy(evaluator, objective, step, uniform)
        for group in torch.arange(len(layers)).tensor_split(min(GROUPS, len(layers))):
            ranked = sorted(outputs, key=lambda point: -float(outputs[point][group].mean()))
            greedy.choose(tuple(layers[i] for i in group.tolist()), [point.method for point in ranked])
    best = greedy.best if greedy.best.overrides else None
    return PerLayer(best, greedy.tried, evaluator.replays - before)


def most_steps(points: Sequence[Compression], layers: int) -> int:
    """How many steps a search takes at most in a model with so many full-attention layers."""
    return len(set(points)) + min(GROUPS, layers) * CANDIDATES


def _outputs(
    evaluator: Evaluator, points: Sequence[Compression], step: Callable[[], None]
) -> dict[Compression, Tensor]:
    """Cosine of the attention's outputs by layer, of all points that can be replayed."""
    outputs = {}
    for point in dict.fromkeys(points):
        try:
            outputs[point] = evaluator.outputs_by_layer(point)
        except Exception as error:
            if not spares_the_run(error):
                raise
        step()
    return outputs


class _Greedy:
    """The best compression so far, changed in one group of layers at a time."""

    def __init__(
        self, evaluator: Evaluator, objective: ObjectiveName, step: Callable[[], None], uniform: Compression
    ) -> None:
        self._evaluator, self._objective, self._step = evaluator, objective, step
        self.best, self.tried = uniform, 0
        self._value = self._value_of(uniform)

    def choose(self, layers: tuple[int, ...], methods: Sequence[MethodConfig]) -> None:
        """Take the best of the first methods that keep something new in these layers, if it is an improvement."""
        start, tried = self.best, 0
        for method in methods:
            before = self._evaluator.replays
            candidate = Compression(
                window=start.window,
                size=start.size,
                method=start.method,
                overrides=(*start.overrides, LayerOverride(layers=layers, method=method)),
            )
            try:
                value = self._value_of(candidate)
            except Exception as error:
                if not spares_the_run(error):
                    raise
                continue
            if is_better(value, self._value, self._objective):
                self.best, self._value = candidate, value
            # What was looked up keeps the same tokens as something before.
            if self._evaluator.replays > before:
                tried += 1
                self._step()
            if tried == CANDIDATES:
                break
        self.tried += tried

    def _value_of(self, compression: Compression) -> float:
        return mean_scores(self._evaluator.scores(compression))[self._objective]
