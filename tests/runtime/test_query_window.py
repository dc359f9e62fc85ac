"""`query_length`: the observation window is the prompt's question, in each row its own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import TopK
from clusterprof.profile import Compression
from tests.runtime.lockstep import SMALL, Lockstep, new_tokens, prompts
from tests.runtime.subjects import continuation, forward, generate, pad_left, stored_lengths
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

QUERY = SMALL.model_copy(update={"window": "query"})
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])


def lockstep(model: PreTrainedModel, *lengths: int, **options: Any) -> Lockstep:
    return Lockstep(model.double(), QUERY, prompts(*lengths), **options)


@MODELS
def test_the_question_observes_and_stays(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60, query_length=11)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 5))
    for layer in run.rows[0].compressible:
        assert all(set(range(49, 60)) <= set(slots) for slots in run.rows[0].slots[layer])


@pytest.mark.parametrize("length", [1, 4, 19])
def test_a_question_equals_a_window_of_its_length(length: int, kept_sets: list[Tensor]) -> None:
    model = tiny_llama()
    (prompt,) = prompts(60)
    found = []
    for compression, options in (
        (SMALL.model_copy(update={"window": length}), {}),
        (QUERY, {"query_length": length}),
        (QUERY, {"query_length": [np.int64(length)]}),
    ):
        with torch.no_grad(), compress(model, compression, **options):
            cache = forward(model, prompt).cache
            found.append(forward(model, prompt[:, :1], cache=cache).logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for window, number, numbers in zip(kept_sets[:2], kept_sets[2:4], kept_sets[4:], strict=True):
        assert torch.equal(window, number)
        assert torch.equal(window, numbers)


@MODELS
def test_each_row_has_a_question_of_its_own(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60, 60, 41, 12, query_length=[11, 3, 7, 15])
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(4, 4))


@pytest.mark.parametrize(
    ("lengths", "questions"),
    [
        ((60, 60, 60), [11, 1, 11]),
        ((60, 41, 25), [3, 19, 6]),
        # The last rows are shorter than the size, and than their questions' length.
        ((60, 18, 3), [3, 7, 5]),
        ((60, 41, 12), 6),
        ((60, 41, 12), [6]),
    ],
)
@torch.no_grad()
def test_rows_of_a_batch_equal_their_single_runs(
    lengths: tuple[int, ...], questions: int | list[int]
) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(*lengths)
    batch, mask = pad_left(rows)
    with compress(model, QUERY, query_length=questions):
        together = continuation(model, batch, 12, attention_mask=mask)
    for row, prompt in enumerate(rows):
        with compress(model, QUERY, query_length=own(questions, row)):
            assert continuation(model, prompt, 12) == [together[row]]


def own(questions: int | Sequence[int], row: int) -> int:
    """The question's length of one row."""
    if isinstance(questions, int):
        return questions
    return questions[row if len(questions) > 1 else 0]


@pytest.mark.parametrize("questions", [[11, 3], 11])
@torch.no_grad()
def test_beams_share_the_question_of_their_prompt(questions: int | list[int]) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 41)
    batch, mask = pad_left(rows)
    # The first of a prompt's four rows is the one that its beams all begin from.
    beams = {"num_beams": 4, "num_return_sequences": 2}
    with compress(model, QUERY, query_length=questions):
        together = generate(model, batch, 10, attention_mask=mask, **beams).sequences[:, 60:]
    for row, prompt in enumerate(rows):
        with compress(model, QUERY, query_length=own(questions, row)):
            alone = generate(model, prompt, 10, **beams).sequences[:, prompt.shape[1] :]
        assert torch.equal(together[2 * row : 2 * row + 2], alone)


@torch.no_grad()
def test_samples_share_the_question_of_their_prompt(kept_sets: list[Tensor]) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 41)
    batch, mask = pad_left(rows)
    with compress(model, QUERY, query_length=[11, 3]):
        generate(model, batch, 2, attention_mask=mask, do_sample=True, num_return_sequences=3)
    in_batch = list(kept_sets)
    assert len(in_batch) == 2
    for row, (prompt, question) in enumerate(zip(rows, [11, 3], strict=True)):
        kept_sets.clear()
        with compress(model, QUERY, query_length=question):
            forward(model, prompt)
        for together, alone in zip(in_batch, kept_sets, strict=True):
            expected = (alone + 60 - prompt.shape[1]).expand(3, -1, -1)
            assert torch.equal(together[3 * row : 3 * row + 3], expected)


def test_the_question_of_a_later_turn_has_its_own_length() -> None:
    run = lockstep(tiny_llama(), 60, 41, query_length=[11, 3], later_turns="compress")
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 4))
    run.options["query_length"] = [6, 13]
    for naive, length in zip(run.rows, [6, 13], strict=True):
        naive.window = length
    with run.compressing():
        run.turn(new_tokens(2, 18, seed=2))
        assert run.rows[0].stored == QUERY.size
        run.decode(new_tokens(2, 4, seed=3))


def test_a_question_that_is_longer_than_its_turn() -> None:
    run = lockstep(tiny_llama(), 60, 41, query_length=[11, 3], later_turns="compress")
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 4))
        run.turn(new_tokens(2, 6, seed=2))
        run.decode(new_tokens(2, 4, seed=3))


def test_as_many_decoded_tokens_observe_as_the_question_has() -> None:
    run = lockstep(tiny_llama(), 60, 41, 12, query_length=[11, 3, 5], decode_budget=28)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(3, 46))
    assert run.rows[0].stored == 20 + 14 + 2


@torch.no_grad()
def test_the_question_of_a_prompt_in_chunks() -> None:
    model = tiny_llama(eos_token_id=None).double()
    (prompt,) = prompts(60)
    with compress(model, QUERY, query_length=11):
        whole = generate(model, prompt, 12, output_logits=True).logits
        chunks = generate(model, prompt, 12, output_logits=True, prefill_chunk_size=7).logits
    torch.testing.assert_close(torch.cat(chunks), torch.cat(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("query_length", "reason"),
    [
        (None, "window is the prompt's question; say how many tokens it has"),
        (0, "query_length is 0; each must be at least 1 and below the profile's size of 20"),
        (-3, "query_length is -3; each must be at least 1"),
        (20, "query_length is 20; each must be at least 1 and below the profile's size of 20"),
        ([5, 0], "query_length is 5, 0; each must be at least 1"),
        ([], "query_length is empty; each must be at least 1"),
    ],
)
def test_lengths_that_make_no_window_are_refused(query_length: Any, reason: str) -> None:
    with (
        pytest.raises(CompressionError, match=reason),
        compress(tiny_llama(), QUERY, query_length=query_length),
    ):
        pytest.fail("entered")


def test_a_question_for_a_window_of_fixed_length_is_refused() -> None:
    reason = 'window is the last 4 tokens; query_length is for a profile that was tuned with window "query"'
    with pytest.raises(CompressionError, match=reason), compress(tiny_llama(), SMALL, query_length=4):
        pytest.fail("entered")


def test_a_budget_too_small_for_the_longest_question_is_refused() -> None:
    reason = "decode_budget is 23; with an observation window of 11 it must be at least 24"
    with pytest.raises(CompressionError, match=reason):  # noqa: SIM117
        with compress(tiny_llama(), QUERY, query_length=[3, 11], decode_budget=23):
            pytest.fail("entered")


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("run", [forward, partial(generate, new_tokens=2, num_beams=2)])
def test_another_number_of_questions_than_of_prompts_is_refused(count: int, rows: int, run: Any) -> None:
    # Two for four rows would fit beams, and be the wrong ones here.
    model = tiny_llama()
    reason = f"query_length has {count} values for {rows} prompts; give one per prompt, or one for all"
    with pytest.raises(CompressionError, match=reason), compress(model, QUERY, query_length=[3] * count):
        run(model, new_tokens(rows, 30))


def test_a_refused_number_of_questions_leaves_the_context_usable() -> None:
    model = tiny_llama(eos_token_id=None)
    (prompt,) = prompts(60)
    cache = DynamicCache(config=model.config)
    with compress(model, QUERY, query_length=[3, 3]):
        with pytest.raises(CompressionError, match="2 values for 1 prompts"):
            generate(model, prompt, 2)
        forward(model, prompt.repeat(2, 1), cache=cache)
    assert stored_lengths(cache) == [QUERY.size] * 2


def test_a_query_window_needs_room_for_one_token_before_it() -> None:
    with pytest.raises(ValueError, match="with the question as the window it must be at least 2"):
        Compression(size=1, window="query", method=TopK())
