"""`later_turns`: what a conversation keeps as it goes on, turn by turn, against a slow reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from tests.runtime.lockstep import SMALL, Lockstep, assert_holds, naive_rows, new_tokens, prompts
from tests.runtime.subjects import generate, pad_left, stored_lengths
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

SIZE = SMALL.size
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
BOTH = pytest.mark.parametrize("later_turns", ["append", "compress"])
# Longer than the window, shorter, and longer than the size.
TURNS = [15, 2, 40, 4]


def lockstep(model: PreTrainedModel, *lengths: int, **options: Any) -> Lockstep:
    return Lockstep(model.double(), SMALL, prompts(*lengths), **options)


def stored_after_turns(run: Lockstep) -> list[int]:
    """Slots in use after the prompt and after each later turn, with a few tokens decoded in between."""
    rows = len(run.rows)
    with run.compressing():
        run.prompt()
        stored = [run.rows[0].stored]
        for turn, length in enumerate(TURNS, start=1):
            run.decode(new_tokens(rows, 5, seed=turn))
            run.turn(new_tokens(rows, length, seed=10 + turn))
            stored.append(run.rows[0].stored)
        run.decode(new_tokens(rows, 3))
    return stored


@MODELS
def test_every_turn_compresses_all_to_the_size(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60, later_turns="compress")
    assert stored_after_turns(run) == [SIZE] * 5
    # The last turn's window is there, and something of the prompt still is in some head.
    end = run.rows[0].length - 3
    slots = [heads for layer in run.rows[0].compressible for heads in run.rows[0].slots[layer]]
    assert all(set(range(end - 4, end + 3)) <= set(head) for head in slots)
    assert any(head[0] < 60 for head in slots)


@MODELS
def test_every_turn_is_appended_by_default(build: Callable[..., PreTrainedModel]) -> None:
    run = lockstep(build(), 60)
    assert stored_after_turns(run) == [20, 40, 47, 92, 101]


@BOTH
def test_a_padded_batch_goes_on(later_turns: str) -> None:
    stored_after_turns(lockstep(tiny_llama(), 60, 41, 12, 3, later_turns=later_turns))


@BOTH
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_a_first_turn_within_the_size_stays_whole(
    build: Callable[..., PreTrainedModel], later_turns: str
) -> None:
    run = lockstep(build(), 12, 5, later_turns=later_turns)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 3))
        run.turn(new_tokens(2, 5, seed=2))
        # Exactly the size: nothing is evicted yet.
        assert run.rows[0].stored == SIZE
        assert run.rows[0].slots[1][0] == list(range(SIZE))
        run.decode(new_tokens(2, 4, seed=3))
        assert run.rows[0].stored == SIZE + 4
        # Shorter than the window.
        run.turn(new_tokens(2, 2, seed=4))
        assert run.rows[0].stored == SIZE
        run.decode(new_tokens(2, 2, seed=5))
        run.turn(new_tokens(2, 9, seed=6))
        assert run.rows[0].stored == (SIZE if later_turns == "compress" else SIZE + 11)


def chat(
    model: PreTrainedModel, prompt: Tensor, mask: Tensor, turns: list[Tensor], **options: Any
) -> tuple[Tensor, list[list[int]], DynamicCache]:
    """A conversation by ``generate``, three tokens an answer: all of it, and what is stored after each."""
    cache, text = DynamicCache(config=model.config), prompt
    stored = []
    with torch.no_grad(), compress(model, SMALL, **options):
        for turn in [None, *turns]:
            if turn is not None:
                text = torch.cat([text, turn], dim=1)
            grown = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
            text = generate(model, text, 3, cache=cache, attention_mask=grown).sequences
            stored.append(stored_lengths(cache))
    return text, stored, cache


@MODELS
def test_a_chat_of_five_turns_stays_bounded(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None).double()
    (prompt,) = prompts(60)
    turns = [new_tokens(1, length, seed=length) for length in TURNS]
    (naive,) = naive_rows(model, SMALL, [60], later_turns="compress")
    text, stored, cache = chat(model, prompt, torch.ones_like(prompt), turns, later_turns="compress")
    # The last token of each answer is fed with the next turn.
    assert [{lengths[layer] for layer in naive.compressible} for lengths in stored] == [{SIZE + 2}] * 5

    start, answers = 0, []
    for length in [60, *(1 + turn.shape[1] for turn in turns)]:
        end = start + length
        logits = [naive.turn(text[0, start:end])[-1], *(naive.decode(int(t)) for t in text[0, end : end + 2])]
        answers.append(torch.stack(logits).argmax(dim=-1).tolist())
        assert answers[-1] == text[0, end : end + 3].tolist()
        start = end + 2
    assert start == text.shape[1] - 1
    assert_holds(cache, 0, naive)


@pytest.mark.parametrize(
    ("later_turns", "lengths"),
    # A short row that is appended to beside a longer one stays whole: see below.
    [
        ("compress", (60, 41, 12, 3)),
        ("compress", (19, 12, 1)),
        ("append", (60, 41, 21)),
        ("append", (12, 12)),
    ],
)
def test_rows_of_a_batch_equal_their_single_chats(later_turns: Any, lengths: tuple[int, ...]) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(*lengths)
    batch, mask = pad_left(rows)
    turns = [new_tokens(len(rows), length, seed=length) for length in TURNS]
    together, _, _ = chat(model, batch, mask, turns, later_turns=later_turns)
    for row, prompt in enumerate(rows):
        own = [turn[row : row + 1] for turn in turns]
        alone, _, _ = chat(model, prompt, torch.ones_like(prompt), own, later_turns=later_turns)
        assert torch.equal(together[row, -alone.shape[1] :], alone[0])


def test_a_short_row_beside_a_compressed_one_is_appended_to_as_the_batch_is() -> None:
    # Alone, its second turn would outgrow the size. Here its slots are allocated in any case.
    run = lockstep(tiny_llama(), 60, 12)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 2))
        run.turn(new_tokens(2, 10, seed=2))
        run.decode(new_tokens(2, 2, seed=3))
    short = run.rows[1].slots[0][0]
    assert short == list(range(-8, 26))


@pytest.mark.parametrize("chunk", [3, 7])
@torch.no_grad()
def test_a_later_turn_in_chunks_is_observed_by_all_of_its_window(chunk: int) -> None:
    model = tiny_llama(eos_token_id=None).double()
    (prompt,) = prompts(30)
    (naive,) = naive_rows(model, SMALL, [30], later_turns="compress")
    cache = DynamicCache(config=model.config)
    with compress(model, SMALL, later_turns="compress"):
        first = generate(model, prompt, 6, cache=cache).sequences
        text = torch.cat([first, new_tokens(1, 21)], dim=1)
        generate(model, text, 1, cache=cache, prefill_chunk_size=chunk)
    naive.turn(first[0, :30])
    for token in first[0, 30:35].tolist():
        naive.decode(token)
    naive.turn(text[0, 35:])
    assert_holds(cache, 0, naive)


def test_each_turn_may_have_a_context_of_its_own() -> None:
    run = lockstep(tiny_llama(), 60)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 3))
    run.options["later_turns"] = run.rows[0].later_turns = "compress"
    with run.compressing():
        run.turn(new_tokens(1, 9, seed=2))
        assert run.rows[0].stored == SIZE
        run.decode(new_tokens(1, 3, seed=3))


@pytest.mark.parametrize("later_turns", ["compressed", "", None, True])
def test_other_words_for_later_turns_are_refused(later_turns: Any) -> None:
    reason = f'later_turns is {later_turns!r}; it must be "append" or "compress"'
    with (
        pytest.raises(CompressionError, match=reason),
        compress(tiny_llama(), SMALL, later_turns=later_turns),
    ):
        pytest.fail("entered")
