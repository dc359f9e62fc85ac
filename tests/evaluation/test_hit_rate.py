from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.evaluation import decode_attention, hit_rate
from clusterprof.profiling.capture import Capture
from tests.evaluation.subjects import attention_matrices, spoiled
from tests.profiling.subjects import WINDOW, capture
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

# About even attention, over the window and over a single token.
THETA, MU = 0.12, 0.015


def naive_rates(matrix: Tensor, found: Capture, theta: float, mu: float) -> list[list[float | None]]:
    """The paper's formulas on one layer's full attention matrix ``(heads, tokens, tokens)``: by head and step."""
    prompt, prefix = found.prompt_length, found.prompt_length - WINDOW
    group = 2
    rates: list[list[float | None]] = []
    for head in range(len(matrix)):
        shared = range(head // group * group, head // group * group + group)
        seen = []
        for position in range(prefix):
            sums = [sum(float(matrix[h, i, position]) for i in range(prefix, prompt)) for h in shared]
            seen.append(sum(sums) / group > theta)
        rates.append([])
        for step in range(len(found.tokens) - 1):
            current = [float(matrix[head, prompt + step, position]) > mu for position in range(prefix)]
            overlap = sum(a and b for a, b in zip(seen, current, strict=True))
            rates[-1].append(overlap / sum(current) if any(current) else None)
    return rates


def mean(rates: list[list[float | None]], steps: slice = slice(None)) -> float:
    there = [rate for head in rates for rate in head[steps] if rate is not None]
    return sum(there) / len(there)


def sharp_gemma3() -> PreTrainedModel:
    """Its attention is all but even otherwise."""
    model = tiny_gemma3()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, 2.0)
    return model


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, sharp_gemma3])
def test_equals_the_papers_formulas_on_full_attention_matrices(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    found = capture(model)
    matrices = attention_matrices(model, found)
    scores, curves = hit_rate.measure(found, theta=THETA, mu=MU, bin_steps=5)
    naive = {i: naive_rates(matrices[i], found, THETA, MU) for i in found.layers}
    assert curves["layers"] == list(naive)
    assert curves["bin_steps"] == [0, 5, 10]
    expected = [[mean(rates, slice(start, start + 5)) for start in (0, 5, 10)] for rates in naive.values()]
    # Otherwise there would be nothing to tell apart.
    assert 0.1 < min(map(min, expected)) < max(map(max, expected)) < 0.98
    np.testing.assert_allclose(np.array(curves["hit_rate"]), expected, atol=1e-5)
    overall = [head for rates in naive.values() for head in rates]
    assert scores["hit_rate"] == pytest.approx(mean(overall), abs=1e-5)


def test_theta_is_held_against_the_sum_over_the_window() -> None:
    found = capture(tiny_llama())
    layer = found.layers[0]
    importance = torch.zeros_like(layer.importance)
    importance[0, 3] = 0.01
    found = replace(found, layers={0: replace(layer, importance=importance)})
    prefix = importance.shape[-1]
    for theta, marked in ((0.01 * WINDOW - 1e-4, 1), (0.01 * WINDOW + 1e-4, 0)):
        scores, _ = hit_rate.measure(found, theta=theta)
        assert scores["window_share"] == pytest.approx(marked / (2 * prefix))


def test_marking_everything_hits_everything() -> None:
    scores, curves = hit_rate.measure(capture(tiny_llama()), theta=0)
    assert scores == {"hit_rate": 1, "window_share": 1}
    assert curves["hit_rate"] == [[1.0], [1.0]]


def test_marking_nothing_hits_nothing() -> None:
    scores, _ = hit_rate.measure(capture(tiny_llama()), theta=WINDOW)
    assert scores == {"hit_rate": 0, "window_share": 0}


def test_where_nothing_is_looked_at_nothing_is_missed() -> None:
    scores, curves = hit_rate.measure(capture(tiny_llama()), theta=WINDOW, mu=1.0)
    assert scores["hit_rate"] == 1
    assert curves["hit_rate"] == [[1.0], [1.0]]


def test_a_head_that_looks_at_nothing_is_left_out() -> None:
    model = tiny_llama()
    found = capture(model)
    matrices = attention_matrices(model, found)
    # Between the highest attention of one head and that of another, in some step.
    mu = 0.3
    naive = [naive_rates(matrices[i], found, 0.5, mu) for i in found.layers]
    assert any(rate is None for layer in naive for head in layer for rate in head)
    scores, _ = hit_rate.measure(found, theta=0.5, mu=mu)
    assert scores["hit_rate"] == pytest.approx(mean([head for layer in naive for head in layer]), abs=1e-5)


def test_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(tiny_llama())
    whole = hit_rate.measure(found, theta=THETA, mu=MU)
    for steps in (1, 5):
        elements = steps * 4 * (found.prompt_length - WINDOW)
        monkeypatch.setattr(decode_attention, "_BLOCK_ELEMENTS", elements)
        assert hit_rate.measure(found, theta=THETA, mu=MU) == whole


@pytest.mark.parametrize("part", ["importance", "queries", "keys", "logsumexp"])
def test_names_the_layer_whose_attention_is_not_finite(part: str) -> None:
    with pytest.raises(CompressionError, match=r"layer 1 .*not finite"):
        hit_rate.measure(spoiled(capture(tiny_llama()), layer=1, part=part))


def test_defaults_are_the_papers() -> None:
    # Its attention is sharp enough for thresholds this low to leave something out.
    found = capture(tiny_llama(initializer_range=0.5), decode_tokens=70)
    defaults: dict[str, Any] = {"theta": 5e-4, "mu": 5e-5, "bin_steps": 64}
    assert hit_rate.measure(found) == hit_rate.measure(found, **defaults)
    for name, value in defaults.items():
        assert hit_rate.measure(found) != hit_rate.measure(
            found, **{**defaults, name: value // 2 or value / 2}
        )
