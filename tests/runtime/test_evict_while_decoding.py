"""Methods that evict while decoding: the cache stays at its size in every step, against a slow reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import H2O, StreamingLLM
from clusterprof.profile import Compression
from clusterprof.runtime import StaticCompressedCache
from clusterprof.runtime.cache import stored
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
    fed_lengths,
    forward,
    generate,
    pad_left,
    random_stream,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

SIZE, SINKS = SMALL.size, 3
STREAMING = StreamingLLM(initial_tokens=SINKS, evict_while_decoding=True)
HEAVY = H2O(evict_while_decoding=True)
METHODS = pytest.mark.parametrize("method", [HEAVY, STREAMING], ids=lambda method: method.name)
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
PROMPT = random_stream()[None, :60]

Build = Callable[..., PreTrainedModel]
Evicting = H2O | StreamingLLM


def by(method: Evicting) -> Compression:
    return SMALL.model_copy(update={"method": method})


def lockstep(model: PreTrainedModel, method: Evicting, *lengths: int, **options: Any) -> Lockstep:
    return Lockstep(model.double(), by(method), prompts(*lengths), **options)


def decode_at_size(run: Lockstep, tokens: Tensor) -> None:
    """Feed ``(rows, steps)`` one by one: after each there are the tokens of the reference, as many as the size."""
    for token in torch.split(tokens, 1, dim=1):
        # Compares logits and what is stored.
        run.decode(token)
        assert {layer.stored for layer in compressed_layers(run.cache)} == {SIZE}
        assert {layer.keys.shape[2] for layer in compressed_layers(run.cache)} == {SIZE}  # type: ignore[union-attr]


@METHODS
@MODELS
def test_stays_at_the_size_in_every_step(build: Build, method: Evicting) -> None:
    run = lockstep(build(), method, 60)
    with run.compressing():
        run.prompt()
        decode_at_size(run, new_tokens(1, 30))
    # The text is as long as it is, and so are its positions.
    assert run.cache.get_seq_length() == 90
    # Half of the size is recent, or all that are no sinks.
    recent = SIZE // 2 if method.name == "h2o" else SIZE - SINKS
    slots = [heads for layer in run.rows[0].compressible for heads in run.rows[0].slots[layer]]
    assert all(head[-recent:] == list(range(90 - recent, 90)) for head in slots)
    assert all(head[0] < 60 for head in slots)


@torch.no_grad()
def test_sinks_and_the_latest_tokens_by_hand() -> None:
    model = tiny_llama()
    text = random_stream(seed=4)[None, :100]
    whole = forward(model, text).cache.layers[0].keys
    cache = DynamicCache(config=model.config)
    with compress(model, by(STREAMING)):
        for end in range(60, 101):
            forward(model, text[:, :60] if end == 60 else text[:, end - 1 : end], cache=cache)
            kept = [0, 1, 2, *range(end - SIZE + SINKS, end)]
            # The keys of the first layer depend on token and position alone.
            torch.testing.assert_close(stored(compressed_layers(cache)[0])[0], whole[:, :, kept])
            assert [layer.stored for layer in compressed_layers(cache)] == [SIZE, SIZE]


@METHODS
def test_padding_goes_first_one_slot_a_step(method: Evicting) -> None:
    run = lockstep(tiny_llama(), method, 60, 41, 12, 3)
    with run.compressing():
        run.prompt()
        for step in range(1, 25):
            decode_at_size(run, new_tokens(4, 1, seed=step))
            left = [len([slot for slot in row.slots[1][0] if slot >= 0]) for row in run.rows]
            assert left == [SIZE, SIZE, min(SIZE, 12 + step), min(SIZE, 3 + step)]


@METHODS
def test_a_prompt_within_the_size_is_evicted_once_the_answer_fills_it(method: Evicting) -> None:
    run = lockstep(tiny_llama(), method, 12, 5)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, SIZE - 12))
        assert run.rows[0].slots[1][0] == list(range(SIZE))
        decode_at_size(run, new_tokens(2, 14, seed=2))
    assert run.rows[1].slots[1][0][0] >= 0


@METHODS
@pytest.mark.parametrize("later_turns", ["append", "compress"])
@pytest.mark.parametrize("lengths", [(60,), (60, 12, 3), (12, 5)], ids=str)
def test_later_turns_come_down_to_the_size(
    lengths: tuple[int, ...], later_turns: str, method: Evicting
) -> None:
    run, rows = lockstep(tiny_llama(), method, *lengths, later_turns=later_turns), len(lengths)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(rows, 9))
        # Longer than the size, shorter than the window, and something in between.
        for turn, length in enumerate([30, 2, 9]):
            run.turn(new_tokens(rows, length, seed=10 + turn))
            assert run.rows[0].stored == SIZE
            decode_at_size(run, new_tokens(rows, 3, seed=turn))


@torch.no_grad()
def test_tokens_from_outside_the_context_go_at_the_next_step() -> None:
    run = lockstep(tiny_llama(), STREAMING, 60)
    with run.compressing():
        run.prompt()
    run.feed_outside(new_tokens(1, 7))
    assert compressed_layers(run.cache)[0].stored == SIZE + 7
    with run.compressing():
        decode_at_size(run, new_tokens(1, 3, seed=2))


@torch.no_grad()
def test_h2o_does_not_guess_what_it_did_not_see() -> None:
    run = lockstep(tiny_llama(), HEAVY, 60)
    with run.compressing():
        run.prompt()
    run.feed_outside(new_tokens(1, 1))
    with run.compressing(), pytest.raises(CompressionError, match="h2o needs the attention of every token"):
        run.decode(new_tokens(1, 1, seed=2))


@METHODS
@MODELS
@torch.no_grad()
def test_generate(build: Build, method: Evicting) -> None:
    model = build(eos_token_id=None).double()
    (prompt,) = prompts(60)
    for options in ({}, {"prefill_chunk_size": 7}):
        (naive,) = naive_rows(model, by(method), [60])
        with compress(model, by(method)), fed_lengths(model) as fed:
            result = generate(model, prompt, 40, output_logits=True, **options)
        assert fed[-39:] == [1] * 39
        expected = logits_along(naive, prompt, result.sequences[0, 60:])
        torch.testing.assert_close(torch.cat(result.logits).double(), expected, atol=1e-5, rtol=1e-5)
        assert_holds(result.cache, 0, naive)


@METHODS
@torch.no_grad()
def test_rows_above_the_size_equal_their_single_runs(method: Evicting) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 41, 20)
    batch, mask = pad_left(rows)
    with compress(model, by(method)):
        together = continuation(model, batch, 40, attention_mask=mask)
        assert together == [continuation(model, row, 40)[0] for row in rows]


@METHODS
@torch.no_grad()
def test_beams(method: Evicting) -> None:
    model = tiny_llama(eos_token_id=None).double()
    rows = prompts(60, 12)
    batch, mask = pad_left(rows)
    references = naive_rows(model, by(method), [60, 60, 12, 12])
    with compress(model, by(method)):
        result = generate(
            model,
            batch,
            24,
            attention_mask=mask,
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
            length_penalty=0.0,
        )
    assert {layer.stored for layer in compressed_layers(result.cache)} == {SIZE}
    assert len({tuple(sequence) for sequence in result.sequences.tolist()}) == 4
    for index, naive in enumerate(references):
        answer, score = result.sequences[index, 60:], result.sequences_scores[index]
        logits = logits_along(naive, rows[index // 2], answer)
        found = logits.log_softmax(-1).gather(1, answer[:, None]).sum()
        torch.testing.assert_close(found.float(), score.float(), atol=1e-4, rtol=1e-5)


@METHODS
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_recent(share: float, method: Evicting) -> None:
    # The token just decoded may be the one that goes; the next step finds the rest in order.
    settings = {"recent_share": share} if method.name == "h2o" else {"initial_tokens": round(share * SIZE)}
    run = lockstep(tiny_llama(), method.model_copy(update=settings), 60)
    with run.compressing():
        run.prompt()
        decode_at_size(run, new_tokens(1, 10))


@METHODS
@torch.no_grad()
def test_what_was_evicted_for_cannot_be_taken_back(method: Evicting) -> None:
    model = tiny_llama(eos_token_id=None)
    with compress(model, by(method)):
        cache = generate(model, PROMPT, 5).cache
        with pytest.raises(CompressionError, match="Only the last 0 tokens of the cache can be taken back"):
            cache.crop(-1)


@METHODS
def test_a_decode_budget_is_refused(method: Evicting) -> None:
    reason = f"{method.name} evicts while decoding and so bounds the cache already; leave decode_budget out"
    with (
        pytest.raises(CompressionError, match=reason),
        compress(tiny_llama(), by(method), decode_budget=24),
    ):
        pytest.fail("entered")


@METHODS
@torch.no_grad()
def test_drafts_are_refused(method: Evicting) -> None:
    model = tiny_llama(eos_token_id=None)
    repeated = PROMPT[:, :20].repeat(1, 3)
    with (
        compress(model, by(method)),
        pytest.raises(CompressionError, match="evict_while_decoding does not work with assisted generation"),
    ):
        generate(model, repeated, 12, prompt_lookup_num_tokens=4)


@METHODS
@torch.no_grad()
def test_a_static_cache_is_refused(method: Evicting) -> None:
    model = tiny_llama(eos_token_id=None)
    reason = "evict_while_decoding does not work with a StaticCompressedCache"
    cache = StaticCompressedCache(model.config, SMALL, max_new_tokens=12)
    with compress(model, by(method)), pytest.raises(CompressionError, match=reason):
        forward(model, PROMPT, cache=cache)
    # One whose prompt came in another context, too.
    with compress(model, SMALL):
        forward(model, PROMPT, cache=cache)
    with compress(model, by(method)), pytest.raises(CompressionError, match=reason):
        forward(model, PROMPT[:, :1], cache=cache)


@METHODS
@torch.no_grad()
def test_a_compiled_decode_step_is_refused(method: Evicting) -> None:
    model = tiny_llama()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    # Dynamo raises an error of its own, which quotes ours.
    unsupported: type[Exception] = torch._dynamo.exc.Unsupported
    with compress(model, by(method)):
        cache = forward(model, PROMPT).cache
        with pytest.raises(unsupported, match="without decode_budget or evict_while_decoding"):
            forward(compiled, PROMPT[:, :1], cache=cache)
