"""`decode_budget`: what was generated is compressed as well, and the cache stays bounded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import Method, SnapKV, StreamingLLM, TopK
from clusterprof.runtime import StaticCompressedCache
from clusterprof.runtime.attention import decoder_of
from tests.runtime.lockstep import (
    SMALL,
    Lockstep,
    assert_holds,
    logits_along,
    naive_rows,
    new_tokens,
    prompts,
)
from tests.runtime.subjects import (
    compressed_layers,
    continuation,
    forward,
    generate,
    pad_left,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

BUDGET = 24
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])


def lockstep(model: PreTrainedModel, *lengths: int, **options: Any) -> Lockstep:
    return Lockstep(model.double(), SMALL, prompts(*lengths), **{"decode_budget": BUDGET, **options})


@MODELS
def test_evicts_what_the_reference_does(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, BUDGET))
        # Full, and not yet over.
        assert run.rows[0].stored == 20 + BUDGET
        run.decode(new_tokens(1, 1))
        assert run.rows[0].stored == 20 + BUDGET // 2
        run.decode(new_tokens(1, 30, seed=2))
    prompt = [slots[:20] for layer in run.rows[0].compressible for slots in run.rows[0].slots[layer]]
    assert all(position < 60 for slots in prompt for position in slots)


@pytest.mark.parametrize(
    "method", [SnapKV(kernel_size=3), StreamingLLM(initial_tokens=2), TopK()], ids=lambda method: method.name
)
def test_any_method_chooses(method: Method) -> None:
    compression = SMALL.model_copy(update={"method": method})
    run = Lockstep(tiny_llama().double(), compression, prompts(30), decode_budget=BUDGET)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 40))
    assert run.rows[0].stored == 20 + 14


@pytest.mark.parametrize("budget", [10, 11, 31])
def test_least_and_odd_budgets(budget: int) -> None:
    run = lockstep(tiny_llama(), 30, decode_budget=budget)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, budget + 1))
        assert run.rows[0].stored == 20 + budget // 2
        run.decode(new_tokens(1, 12, seed=2))


@MODELS
def test_padding_goes_first_in_a_batch(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60, 41, 12, 3)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(4, 26))
        # 13 slots went: 8 of them were padding in the third row, all in the fourth.
        tokens = [[slot for slot in row.slots[1][0] if slot >= 0] for row in run.rows]
        assert [len(row) for row in tokens] == [33, 33, 33, 29]
        assert tokens[3] == list(range(3 + 26))
        assert set(range(12)) < set(tokens[2])
        run.decode(new_tokens(4, 17, seed=2))
    assert [len([slot for slot in row.slots[1][0] if slot >= 0]) for row in run.rows] == [37] * 4


def test_padding_of_prompts_within_the_size_goes_first_too() -> None:
    run = lockstep(tiny_llama(), 18, 11, 2)
    with run.compressing():
        run.prompt()
        assert run.rows[2].stored == 18
        run.decode(new_tokens(3, 45))


@torch.no_grad()
def test_rows_without_padding_in_the_cache_equal_their_single_runs() -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 41, 20)
    batch, mask = pad_left(rows)
    with compress(model, SMALL, decode_budget=BUDGET):
        together = continuation(model, batch, 70, attention_mask=mask)
        assert together == [continuation(model, row, 70)[0] for row in rows]


@contextmanager
def slots_of_every_step(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Most slots that any layer has in use, and allocated, after each forward."""
    seen: list[tuple[int, int]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        layers = compressed_layers(output.cache if "cache" in output else output.past_key_values)
        assert len(layers) == 2
        seen.append((max(x.stored for x in layers), max(x.keys.shape[2] for x in layers)))  # type: ignore[union-attr]

    # Registered in the context, so that it comes after what evicts.
    handle = decoder_of(model).register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def test_two_thousand_tokens_stay_within_size_and_budget() -> None:
    model = tiny_llama(eos_token_id=None, max_position_embeddings=4096)
    (prompt,) = prompts(200)
    (naive,) = naive_rows(model, SMALL, [200], decode_budget=BUDGET)
    with compress(model, SMALL, decode_budget=BUDGET), slots_of_every_step(model) as slots:
        result = generate(model, prompt, 2010, output_logits=True)
    answer = result.sequences[0, 200:]
    # Not the same few tokens over and over, which any cache would give.
    assert len(set(answer[-500:].tolist())) > 20
    assert len(slots) == len(answer) == 2010
    assert result.cache.get_seq_length() == 200 + 2009
    assert slots[0] == (20, 20)
    assert max(used for used, _ in slots) == 20 + BUDGET
    assert max(allocated for _, allocated in slots) <= 20 + BUDGET + 64
    assert min(used for used, _ in slots[BUDGET + 1 :]) == 20 + BUDGET // 2

    expected = logits_along(naive, prompt, answer[:300])
    assert torch.equal(expected.argmax(dim=-1), answer[:300])
    found = torch.cat(result.logits[:300]).double()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_beams_take_their_queries_along() -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 12)
    batch, mask = pad_left(rows)
    references = naive_rows(model, SMALL, [60, 60, 12, 12], decode_budget=BUDGET)
    with compress(model, SMALL, decode_budget=BUDGET):
        result = generate(
            model,
            batch,
            45,
            attention_mask=mask,
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
            length_penalty=0.0,
        )
    assert set(stored_lengths(result.cache)) == {20 + 12 + (44 - 25) % 13}
    assert len({tuple(sequence) for sequence in result.sequences.tolist()}) == 4
    for index, naive in enumerate(references):
        answer, score = result.sequences[index, 60:], result.sequences_scores[index]
        logits = logits_along(naive, rows[index // 2], answer)
        found = logits.log_softmax(-1).gather(1, answer[:, None]).sum()
        torch.testing.assert_close(found.float(), score.float(), atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_samples_of_one_prompt_are_evicted_one_by_one() -> None:
    model = tiny_llama(eos_token_id=None).double()
    (prompt,) = prompts(60)
    references = naive_rows(model, SMALL, [60] * 2, decode_budget=BUDGET)
    torch.manual_seed(0)
    with compress(model, SMALL, decode_budget=BUDGET):
        result = generate(
            model, prompt, 40, do_sample=True, top_k=0, num_return_sequences=2, output_logits=True
        )
    for row, naive in enumerate(references):
        expected = logits_along(naive, prompt, result.sequences[row, 60:])
        found = torch.stack([logits[row] for logits in result.logits])
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        assert_holds(result.cache, row, naive)


@torch.no_grad()
def test_a_prompt_in_chunks_changes_nothing() -> None:
    model = tiny_llama(eos_token_id=None).double()
    (prompt,) = prompts(60)
    (naive,) = naive_rows(model, SMALL, [60], decode_budget=BUDGET)
    with compress(model, SMALL, decode_budget=BUDGET):
        result = generate(model, prompt, 40, prefill_chunk_size=7, output_logits=True)
    expected = logits_along(naive, prompt, result.sequences[0, 60:])
    torch.testing.assert_close(torch.cat(result.logits).double(), expected, atol=1e-5, rtol=1e-5)
    assert_holds(result.cache, 0, naive)


@MODELS
def test_a_long_later_turn_passes_the_budget_at_once(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 5))
        run.turn(new_tokens(1, 70, seed=2))
        assert run.rows[0].stored == 20 + BUDGET // 2
        run.decode(new_tokens(1, 15, seed=3))
        # Shorter than the window, whose other queries are of the answer before.
        run.turn(new_tokens(1, 2, seed=4))
        run.decode(new_tokens(1, 9, seed=5))


def test_a_long_later_turn_of_a_padded_batch() -> None:
    run = lockstep(tiny_llama(), 60, 12, 3)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(3, 5))
        run.turn(new_tokens(3, 22, seed=2))
        run.decode(new_tokens(3, 14, seed=3))
        run.turn(new_tokens(3, 50, seed=4))
        run.decode(new_tokens(3, 2, seed=5))


def test_a_turn_within_the_budget_observes_with_the_answer_that_passes_it() -> None:
    run = lockstep(tiny_llama(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 5))
        run.turn(new_tokens(1, BUDGET - 6, seed=2))
        run.decode(new_tokens(1, 2, seed=3))
        assert run.rows[0].stored == 20 + BUDGET // 2


def test_a_turn_shorter_than_the_window_passes_the_budget() -> None:
    run = lockstep(tiny_llama(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, BUDGET - 1))
        run.turn(new_tokens(1, 2, seed=2))
        assert run.rows[0].stored == 20 + BUDGET // 2


@pytest.mark.parametrize("outside", [3, 18, 40])
def test_tokens_decoded_outside_the_context_do_not_observe(outside: int) -> None:
    run = lockstep(tiny_llama(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 5))
    run.feed_outside(new_tokens(1, outside, seed=2))
    assert run.rows[0].stored == 20 + 5 + outside
    with run.compressing():
        run.decode(new_tokens(1, 40, seed=3))


def test_an_answer_taken_back_is_told_from_the_one_that_replaces_it() -> None:
    run = lockstep(tiny_llama(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, BUDGET - 2))
    # What was observed ends where this begins, and yet is another answer.
    run.take_back(2)
    run.feed_outside(new_tokens(1, 2, seed=2))
    with run.compressing():
        run.decode(new_tokens(1, 3, seed=3))


@pytest.mark.parametrize("later_turns", ["append", "compress"])
def test_a_turn_outgrows_the_size_after_the_answer_outgrew_the_budget(later_turns: str) -> None:
    run = lockstep(tiny_llama(), 6, 3, later_turns=later_turns)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 26))
        assert run.rows[0].stored == 6 + 13
        run.turn(new_tokens(2, 30, seed=2))
        # It is the one that is compressed to the size, not to what is left of the budget.
        assert run.rows[0].stored == 20
        run.decode(new_tokens(2, 30, seed=3))


def test_later_turns_are_compressed_and_their_answers_too() -> None:
    run = lockstep(tiny_llama(), 60, 25, 9, later_turns="compress")
    with run.compressing():
        run.prompt()
        for turn, length in enumerate([30, 2, 50], start=1):
            run.decode(new_tokens(3, 26, seed=turn))
            run.turn(new_tokens(3, length, seed=10 + turn))
            assert run.rows[0].stored == 20
        run.decode(new_tokens(3, 30))


def test_a_budget_too_small_for_the_window_is_refused() -> None:
    reason = "decode_budget is 9; with an observation window of 4 it must be at least 10"
    with pytest.raises(CompressionError, match=reason), compress(tiny_llama(), SMALL, decode_budget=9):
        pytest.fail("entered")


def test_a_static_cache_is_refused() -> None:
    model = tiny_llama()
    cache = StaticCompressedCache(model.config, SMALL, max_new_tokens=100)
    reason = "decode_budget does not work with a StaticCompressedCache"
    with pytest.raises(CompressionError, match=reason), compress(model, SMALL, decode_budget=BUDGET):
        forward(model, new_tokens(1, 60), cache=cache)


@torch.no_grad()
def test_a_compiled_decode_step_is_refused() -> None:
    model = tiny_llama()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    # Dynamo raises an error of its own, which quotes ours.
    unsupported: type[Exception] = torch._dynamo.exc.Unsupported
    with compress(model, SMALL, decode_budget=BUDGET):
        cache = forward(model, new_tokens(1, 60)).cache
        with pytest.raises(unsupported, match="without decode_budget"):
            forward(compiled, new_tokens(1, 1), cache=cache)
