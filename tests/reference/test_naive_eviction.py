"""Checks the slow reference of eviction itself: by hand, and against the untouched model."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.methods import H2O, Method, StreamingLLM, TopK
from tests.reference.naive_eviction import NaiveRow
from tests.runtime.subjects import random_stream
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

STREAM = random_stream()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
def test_without_eviction_it_is_the_untouched_model(build: Callable[..., PreTrainedModel]) -> None:
    model = build().double()
    row = NaiveRow(model, TopK(), size=100, window=4, padding=3)
    logits = torch.cat([row.turn(STREAM[:50]), row.decode(int(STREAM[50]))[None], row.turn(STREAM[51:60])])
    with torch.no_grad():
        expected = model(STREAM[None, :60]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=0)
    assert row.slots == [[list(range(-3, 60))] * 2] * 2


def test_importance_is_the_attention_of_the_eager_model() -> None:
    model = tiny_llama().double()
    row = NaiveRow(model, TopK(), size=100, window=4)
    row.turn(STREAM[:30])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(STREAM[None, :30], output_attentions=True).attentions
    for layer in range(2):
        for head in range(2):
            expected = attentions[layer][0, 2 * head : 2 * head + 2, -3:].mean(dim=(0, 1))
            found = [row._importance(layer, head, position, observers=3) for position in range(27)]
            torch.testing.assert_close(torch.tensor(found).double(), expected[:27], atol=1e-6, rtol=0)


def test_what_is_received_is_the_sum_of_the_eager_models_attention() -> None:
    model = tiny_llama().double()
    row = NaiveRow(model, TopK(), size=100, window=4)
    row.turn(STREAM[:30])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(STREAM[None, :30], output_attentions=True).attentions
    for layer in range(2):
        for head in range(2):
            expected = attentions[layer][0, 2 * head : 2 * head + 2].mean(dim=0).sum(dim=0)
            found = torch.tensor([row.received[layer][head][position] for position in range(30)])
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def every_head(row: NaiveRow) -> list[int]:
    """What each head holds, where the method does not look at the attention."""
    (slots,) = {tuple(slots) for layer in row.slots for slots in layer}
    return list(slots)


SINK: Method = StreamingLLM(initial_tokens=1)


def test_positions_of_a_row_by_hand() -> None:
    row = NaiveRow(tiny_llama(), SINK, size=6, window=2, decode_budget=6)
    row.turn(STREAM[:10])
    # Of 0 to 7 the first and the last three, and the window.
    prompt = [0, 5, 6, 7, 8, 9]
    assert every_head(row) == prompt
    for token in STREAM[10:16].tolist():
        row.decode(token)
    assert every_head(row) == [*prompt, 10, 11, 12, 13, 14, 15]
    row.decode(int(STREAM[16]))
    # Three are left: the window, and of 10 to 14 the first.
    assert every_head(row) == [*prompt, 10, 15, 16]
    row.turn(STREAM[17:22])
    # Eight are over the budget again: the window, and the first of 10, 15 to 19.
    assert every_head(row) == [*prompt, 10, 20, 21]


def test_positions_of_a_padded_row_by_hand() -> None:
    row = NaiveRow(tiny_llama(), SINK, size=6, window=2, padding=6, decode_budget=6, later_turns="compress")
    row.turn(STREAM[:4])
    assert every_head(row) == [-2, -1, 0, 1, 2, 3]
    for token in STREAM[4:11].tolist():
        row.decode(token)
    # Four of 13 slots go: both paddings, and two of 4 to 8.
    assert every_head(row) == [0, 1, 2, 3, 4, 7, 8, 9, 10]
    row.turn(STREAM[11:12])
    assert every_head(row) == [0, 7, 8, 9, 10, 11]


def test_a_first_turn_within_the_size_stays_and_the_one_that_outgrows_it_does_not() -> None:
    row = NaiveRow(tiny_llama(), SINK, size=6, window=2)
    row.turn(STREAM[:3])
    row.decode(int(STREAM[3]))
    row.turn(STREAM[4:6])
    assert every_head(row) == [0, 1, 2, 3, 4, 5]
    row.turn(STREAM[6:9])
    assert every_head(row) == [0, 4, 5, 6, 7, 8]
    row.turn(STREAM[9:12])
    assert every_head(row) == [0, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_method_that_evicts_while_decoding_by_hand() -> None:
    method = StreamingLLM(initial_tokens=1, evict_while_decoding=True)
    row = NaiveRow(tiny_llama(), method, size=6, window=2, padding=4)
    row.turn(STREAM[:4])
    assert every_head(row) == [-2, -1, 0, 1, 2, 3]
    for position, expected in [
        (4, [-1, 0, 1, 2, 3, 4]),
        (5, [0, 1, 2, 3, 4, 5]),
        (6, [0, 2, 3, 4, 5, 6]),
        (7, [0, 3, 4, 5, 6, 7]),
    ]:
        row.decode(int(STREAM[position]))
        assert every_head(row) == expected
    row.turn(STREAM[8:11])
    assert every_head(row) == [0, 6, 7, 8, 9, 10]


def test_h2o_keeps_what_received_most_and_the_latest_half() -> None:
    row = NaiveRow(tiny_llama(), H2O(evict_while_decoding=True), size=6, window=2)
    row.turn(STREAM[:10])
    for token in STREAM[10:14].tolist():
        before = [list(slots) for slots in row.slots[0]]
        row.decode(token)
        for head, slots in enumerate(row.slots[0]):
            recent = [*before[head], row.length - 1][-3:]
            received = row.received[0][head]
            rest = sorted(before[head][:-2], key=lambda position: -received[position])
            assert slots == [*sorted(rest[:3]), *recent]
