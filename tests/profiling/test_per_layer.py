"""Values per layer: found where they are planted, and never taken where a replay does not show them."""

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.methods import ClusterAttn, MethodConfig
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import ObjectiveName, Scores, is_better, mean_scores
from clusterprof.profiling.per_layer import CANDIDATES, GROUPS, most_steps, search_per_layer
from tests.profiling.subjects import WINDOW, capture, random_prompt
from tests.tiny import tiny_llama

THETAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
# Layers with full attention, in a model that has others, too.
LAYERS = (1, 3, 5, 7, 9, 11, 13, 15)
BEST = dict(zip(LAYERS, (0.5, 0.5, 0.2, 0.2, 0.3, 0.3, 0.05, 0.05), strict=True))


def at(theta: float, num_block: int = 2) -> Compression:
    return Compression(
        size=24, window=WINDOW, method=ClusterAttn(num_block=num_block, theta=theta, gap_pool=3)
    )


POINTS = [at(theta) for theta in THETAS]


class Planted(Evaluator):
    """Each layer has a theta of its own at which it is best; what is known costs no replay.

    ``misleading`` replays are worse than their layers are, ``fails`` those that cannot be replayed.
    """

    def __init__(self) -> None:
        self.captures: Any = [SimpleNamespace(layers=dict.fromkeys(LAYERS))]
        self.replays = 0
        self.known: list[list[MethodConfig]] = []
        self.asked: list[Compression] = []
        self.misleading: Callable[[Compression], bool] = lambda compression: False
        self.fails: Callable[[Compression], bool] = lambda compression: False

    def by_layer(self, compression: Compression) -> Tensor:
        methods = [compression.method_of(layer) for layer in LAYERS]
        if methods not in self.known:
            if self.fails(compression):
                raise CompressionError("not finite")
            self.known.append(methods)
            self.asked.append(compression)
            self.replays += 1
        thetas = [compression.method_of(layer).model_dump()["theta"] for layer in LAYERS]
        return torch.tensor(
            [1 - abs(theta - BEST[layer]) for theta, layer in zip(thetas, LAYERS, strict=True)]
        )

    def outputs_by_layer(self, compression: Compression) -> Tensor:
        return self.by_layer(compression)

    def scores(self, compression: Compression) -> list[Scores]:
        value = float(self.by_layer(compression).mean()) - 10 * self.misleading(compression)
        return [Scores(value - d, 0.1, 0.1, 1 - value + d, 0.1, 0.1, 0.1) for d in (-0.25, 0.25)]


def run(
    evaluator: Evaluator,
    uniform: Compression,
    points: list[Compression],
    objective: ObjectiveName = "cosine",
    on_step: Callable[[], None] = lambda: None,
) -> Any:
    return search_per_layer(
        evaluator, uniform, points, objective=objective, on_step=on_step, on_interrupt=lambda: None
    )


def thetas_by_layer(compression: Compression) -> dict[int, float]:
    return {layer: compression.method_of(layer).model_dump()["theta"] for layer in LAYERS}


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_a_planted_optimum_of_each_group_is_found(objective: ObjectiveName) -> None:
    evaluator, uniform = Planted(), at(0.3)
    evaluator.scores(uniform)
    steps: list[None] = []
    found = run(evaluator, uniform, POINTS, objective, lambda: steps.append(None))
    assert found.best is not None
    assert found.best.method == uniform.method
    assert thetas_by_layer(found.best) == BEST
    # The third group is best as it is.
    assert [override.layers for override in found.best.overrides] == [(1, 3), (5, 7), (13, 15)]
    assert found.replays == evaluator.replays - 1
    assert found.tried == found.replays - (len(POINTS) - 1) <= GROUPS * CANDIDATES
    assert len(steps) <= most_steps(POINTS, len(LAYERS)) == len(POINTS) + GROUPS * CANDIDATES


def test_at_most_so_many_points_are_replayed_for_a_group() -> None:
    evaluator = Planted()
    points = [at(theta, num_block) for theta in THETAS for num_block in (1, 2, 3, 4)]
    found = run(evaluator, at(0.3), points)
    mixed = [it for it in evaluator.asked if it.overrides]
    assert len(mixed) == found.tried == GROUPS * CANDIDATES
    # The ones whose own layers are nearest.
    assert {it.overrides[0].method.model_dump()["theta"] for it in mixed[:CANDIDATES]} == {0.5}


def test_a_change_that_no_replay_confirms_is_not_taken() -> None:
    evaluator = Planted()
    evaluator.misleading = lambda it: bool(it.overrides)
    found = run(evaluator, at(0.3), POINTS)
    assert found.best is None
    assert found.tried > 0
    # That of one group does not keep the others from theirs.
    evaluator = Planted()
    evaluator.misleading = lambda it: it.method_of(1) != it.method
    found = run(evaluator, at(0.3), POINTS)
    assert [override.layers for override in found.best.overrides] == [(5, 7), (13, 15)]


def test_what_cannot_be_replayed_is_passed_over() -> None:
    evaluator = Planted()
    evaluator.fails = lambda it: it == at(0.2) or it.method_of(15) == at(0.05).method != it.method
    found = run(evaluator, at(0.3), POINTS)
    assert thetas_by_layer(found.best) == BEST | {5: 0.3, 7: 0.3, 13: 0.1, 15: 0.1}


def test_without_another_point_there_is_nothing_to_take() -> None:
    found = run(Planted(), at(0.3), [at(0.3), at(0.3)])
    assert (found.best, found.tried) == (None, 0)


def test_ctrl_c_ends_it_after_a_step() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps: list[None] = []

    def step() -> None:
        steps.append(None)
        if len(steps) == 8:
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            run(Planted(), at(0.3), POINTS, on_step=step)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(steps) == 8


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(num_hidden_layers=5)


@pytest.fixture(scope="module")
def captures(model: PreTrainedModel) -> list[Capture]:
    return [capture(model, random_prompt(length, seed=length), decode_tokens=5) for length in (60, 45)]


@pytest.mark.parametrize("objective", ["cosine", "kl", "attention_output"])
def test_by_real_replays_it_is_never_worse_than_the_same_values_in_all_layers(
    model: PreTrainedModel, captures: list[Capture], objective: ObjectiveName
) -> None:
    evaluator = Evaluator(model, captures)
    points = [at(theta, num_block) for theta in (1e-3, 0.02, 0.05, 0.1) for num_block in (1, 3, 6)]
    values = {point: mean_scores(evaluator.scores(point))[objective] for point in points}
    uniform = points[0]
    for point, value in values.items():
        uniform = point if is_better(value, values[uniform], objective) else uniform
    before = evaluator.replays
    found = run(evaluator, uniform, points, objective)
    assert found.replays == evaluator.replays - before <= GROUPS * CANDIDATES * len(captures)
    assert found.best is not None
    # By another evaluator, which looks nothing up.
    again = mean_scores(Evaluator(model, captures).scores(found.best))[objective]
    assert is_better(again, values[uniform], objective)
    covered = [layer for override in found.best.overrides for layer in override.layers]
    assert set(covered) <= set(range(5))
    assert {override.layers for override in found.best.overrides} <= {(0, 1), (2,), (3,), (4,)}
