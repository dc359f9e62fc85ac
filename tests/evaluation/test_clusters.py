from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clusterprof.errors import CompressionError
from clusterprof.evaluation.clusters import explain, runs_of, texts
from clusterprof.methods import ClusterAttn
from clusterprof.profiling.capture import Capture, LayerCapture
from tests.methods.strategies import UNIT, clusterattns, exact_importances, importances
from tests.tiny import tiny_tokenizer

WINDOW = 4


def captured(importance: Tensor) -> Capture:
    """Of a prompt with this importance, ``(layers, kv_heads, prefix)``, and nothing else."""
    none = torch.zeros(0)
    layers = {
        i: LayerCapture(none, none, layer, layer, none, none, none, none, none)
        for i, layer in enumerate(importance)
    }
    length = importance.shape[-1] + WINDOW
    return Capture(layers, {}, length, WINDOW, tokens=none, log_probs=none, scaling=1.0)


def hand_made() -> Capture:
    """Head 1 of layer 0: peaks at 10 and 31, a small one at 50, and next to nothing around."""
    importance = torch.full((1, 2, 60), 1e-6)
    importance[0, 1, [9, 10, 11]] = torch.tensor([0.1, 0.3, 0.1])
    importance[0, 1, [30, 31, 32]] = torch.tensor([0.05, 0.2, 0.05])
    importance[0, 1, 50] = 0.01
    return captured(importance)


def test_obvious_clusters() -> None:
    # Blocks of 16 // 1: a peak in each of 0-15, 16-31, 32-47, 48-59. That of the third block is the second
    # cluster's right half. Three centres survive: 10, 31 and 32, each with 16 // 3 = 5 tokens.
    head = explain(hand_made(), ClusterAttn(num_block=1, theta=0.04, gap_pool=1), 16 + WINDOW, 0, 1)
    assert head.centres.tolist() == [10, 31, 32]
    assert head.dropped.tolist() == [50]
    assert head.clustered.tolist() == [8, 9, 10, 11, 12, 29, 30, 31, 32, 33, 34]
    # The rest of the budget: the small peak, then the lowest of equal positions.
    assert head.filled.tolist() == [0, 1, 2, 3, 50]
    assert head.runs == [(0, 4), (8, 13), (29, 35), (50, 51)]
    assert head.kept.tolist() == [*range(4), *range(8, 13), *range(29, 35), 50]


def test_strongest_runs_are_those_with_the_most_attention_in_the_prompts_order() -> None:
    head = explain(hand_made(), ClusterAttn(num_block=1, theta=0.04, gap_pool=1), 16 + WINDOW, 0, 1)
    assert head.strongest(2) == [(8, 13), (29, 35)]
    assert head.strongest(3) == [(8, 13), (29, 35), (50, 51)]
    assert head.strongest(9) == head.runs
    assert head.attention((8, 13)) == pytest.approx(0.5 + 2e-6)


def test_without_a_centre_everything_kept_is_filled() -> None:
    head = explain(hand_made(), ClusterAttn(num_block=1, theta=0.9), 16 + WINDOW, 0, 1)
    assert head.centres.tolist() == []
    assert head.clustered.tolist() == []
    assert torch.equal(head.filled, head.kept)


@settings(max_examples=200, deadline=None)
@given(
    importance=exact_importances(rows=2, heads=2) | importances(rows=2, heads=2),
    method=clusterattns(),
    data=st.data(),
)
def test_is_what_the_method_does(importance: Tensor, method: ClusterAttn, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, importance.shape[-1]))
    layer, kv_head = data.draw(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]))
    found = captured(importance)
    head = explain(found, method, budget + WINDOW, layer, kv_head)
    kept = method.select(found.observation, budget)[layer, kv_head].tolist()

    assert [position for start, end in head.runs for position in range(start, end)] == kept
    assert head.kept.tolist() == kept
    assert sorted(head.clustered.tolist() + head.filled.tolist()) == kept
    row = importance[layer, kv_head].tolist()
    assert head.importance.tolist() == row

    block = max(1, budget // method.num_block)
    peaks = sorted(head.centres.tolist() + head.dropped.tolist())
    blocks = [range(start, min(start + block, len(row))) for start in range(0, len(row), block)]
    for peak, positions in zip(peaks, blocks, strict=True):
        assert peak in positions
        assert row[peak] == max(row[position] for position in positions)
    # The method compares in float32.
    theta = float(torch.tensor(method.theta))
    assert all(row[centre] >= theta for centre in head.centres.tolist())
    assert all(row[peak] < theta for peak in head.dropped.tolist())

    width = max(1, budget // max(1, len(head.centres)))
    covered = {c - (width - 1) // 2 + i for c in head.centres.tolist() for i in range(width)}
    assert set(head.clustered.tolist()) == covered & set(kept)


@given(st.sets(st.integers(0, 40)))
def test_runs_are_maximal_and_reassemble_the_positions(positions: set[int]) -> None:
    found = runs_of(torch.tensor(sorted(positions), dtype=torch.int64))
    assert [position for start, end in found for position in range(start, end)] == sorted(positions)
    assert all(end < start for (_, end), (start, _) in pairwise(found))


def test_texts_under_runs() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("The magic\nnumber is 42.")["input_ids"]
    assert texts(tokenizer, ids, [(0, 3), (4, 16), (20, 21)], 20) == ["The", "magic\\nnumber", "4"]
    assert texts(tokenizer, ids, [(4, 16)], 5) == ["magic..."]
    assert texts(tokenizer, ids, [], 5) == []


def test_refuses_what_is_not_there() -> None:
    method = ClusterAttn(num_block=1, theta=UNIT)
    with pytest.raises(CompressionError, match="no full attention in a layer 1; it has some in 0"):
        explain(hand_made(), method, 20, 1, 0)
    for kv_head in (-1, 2):
        with pytest.raises(CompressionError, match=f"Layer 0 has no KV head {kv_head}; it has 0 to 1"):
            explain(hand_made(), method, 20, 0, kv_head)


def test_names_the_layer_whose_importance_is_not_finite() -> None:
    importance = torch.rand(2, 2, 30)
    importance[1, 0, 3] = torch.nan
    with pytest.raises(CompressionError, match="layer 1 is not finite"):
        explain(captured(importance), ClusterAttn(num_block=1, theta=UNIT), 20, 1, 1)
