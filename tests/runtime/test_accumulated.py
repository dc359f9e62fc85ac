"""Accumulated attention: the sums of the full matrix without the matrix, and H2O's kept sets from them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.methods import H2O, Observation, StreamingLLM, TopK
from clusterprof.runtime import CompressedLayer, StaticCompressedCache, eviction, importance
from clusterprof.runtime.attention import Observer, observe_attention
from clusterprof.runtime.importance import accumulated_attention
from tests.runtime.lockstep import (
    SMALL,
    Lockstep,
    assert_holds,
    logits_along,
    naive_rows,
    new_tokens,
    prompts,
)
from tests.runtime.models import full_attention
from tests.runtime.subjects import (
    TINY,
    Subject,
    compressed_layers,
    forward,
    generate,
    pad_left,
    random_stream,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

HEAVY = TINY.model_copy(update={"method": H2O()})
SMALL_HEAVY = SMALL.model_copy(update={"method": H2O()})
PROMPT = random_stream()[None, :60]
BLOCKS = pytest.mark.parametrize("block", [1, 1000, 1 << 24])
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])

Build = Callable[..., PreTrainedModel]


@torch.no_grad()
def sums_of_the_matrix(model: PreTrainedModel, prompt: Tensor) -> list[Tensor]:
    """What each token of ``(1, length)`` receives in the eager model, ``(kv_heads, length)`` by full layer."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    weights = model(prompt, output_attentions=True).attentions
    model.set_attn_implementation(backend)
    kv_heads = model.config.num_key_value_heads
    return [
        layer[0].double().sum(dim=1).view(kv_heads, -1, prompt.shape[1]).mean(dim=1)
        for layer, full in zip(weights, full_attention(model), strict=True)
        if full
    ]


@torch.no_grad()
def observed_sums(model: PreTrainedModel, pieces: list[Tensor]) -> list[Tensor]:
    """The same by blocks, over a prompt that comes in pieces."""
    full = [layer for layer, whole in enumerate(full_attention(model)) if whole]
    length = sum(piece.shape[1] for piece in pieces)
    total = {layer: torch.zeros(model.config.num_key_value_heads, length) for layer in full}

    def observe(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
        if layer_idx in total:
            sums = accumulated_attention(query, key, scaling=scaling)
            assert sums.dtype == torch.float32
            total[layer_idx][:, : key.shape[2]] += sums[0]

    def begin(cache: Cache | None, attention_mask: Any, tokens: Tensor) -> Observer:
        return observe

    cache = DynamicCache(config=model.config)
    with observe_attention(model, begin):
        for piece in pieces:
            forward(model, piece, cache=cache)
    return list(total.values())


def assert_same_sums(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@BLOCKS
def test_equals_the_sums_of_the_full_matrix(
    tiny: Subject, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance, "_CPU_BLOCK", block)
    found = observed_sums(tiny.model, [tiny.prompt(60)])
    expected = sums_of_the_matrix(tiny.model, tiny.prompt(60))
    assert_same_sums(found, expected)
    # Every query has one unit to spend.
    assert all(sums.sum(dim=-1).tolist() == pytest.approx([60.0] * len(sums), abs=1e-3) for sums in found)


@BLOCKS
@pytest.mark.parametrize("lengths", [[20, 20, 20], [1, 58, 1], [33, 27]], ids=str)
def test_pieces_add_up(lengths: list[int], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "_CPU_BLOCK", block)
    model = tiny_qwen3()
    assert_same_sums(
        observed_sums(model, list(torch.split(PROMPT, lengths, dim=1))), sums_of_the_matrix(model, PROMPT)
    )


@BLOCKS
def test_rows_of_a_batch_by_hand(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "_CPU_BLOCK", block)
    # All scores equal: query i gives 1 / (i + 1) to each token up to its own.
    found = accumulated_attention(torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8), scaling=1.0)
    expected = torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    torch.testing.assert_close(found, expected.expand(2, 2, 3))


def kept_by_hand(model: PreTrainedModel, prompt: Tensor) -> list[Tensor]:
    """H2O's kept sets from the full matrix, ``(kv_heads, size)`` by layer."""
    window, size = TINY.window, TINY.size
    assert window != "query"
    kept = []
    for sums in sums_of_the_matrix(model, prompt):
        prefix = sums[None, :, : prompt.shape[1] - window].float()
        # The method itself has tests of its own.
        chosen = H2O().select(Observation(torch.zeros_like(prefix), window, prefix), size - window)[0]
        tail = torch.arange(prompt.shape[1] - window, prompt.shape[1])
        kept.append(torch.cat([chosen, tail.expand(len(chosen), -1)], dim=-1))
    return kept


def assert_kept(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def test_keeps_what_the_full_matrix_says(tiny: Subject, kept_sets: list[Tensor]) -> None:
    with compress(tiny.model, HEAVY):
        cache = forward(tiny.model, tiny.prompt(60)).cache
    assert_kept([kept[0] for kept in kept_sets], kept_by_hand(tiny.model, tiny.prompt(60)))
    # Nothing will ask for the sums again.
    assert all(layer.accumulated is None for layer in compressed_layers(cache))
    # And they are not what the window looks at.
    kept_sets.clear()
    with compress(tiny.model, TINY.model_copy(update={"method": TopK()})):
        forward(tiny.model, tiny.prompt(60))
    assert kept_sets[0][0].tolist() != kept_by_hand(tiny.model, tiny.prompt(60))[0].tolist()


@MODELS
@torch.no_grad()
def test_padded_rows_keep_what_they_keep_alone(build: Build, kept_sets: list[Tensor]) -> None:
    model = build()
    rows = [PROMPT, PROMPT[:, 10:40], random_stream(seed=3)[None, :60], PROMPT[:, :6]]
    batch, mask = pad_left(rows)
    with compress(model, HEAVY):
        forward(model, batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for index, row in enumerate(rows[:3]):
        own = [kept[index] - (60 - row.shape[1]) for kept in kept_sets]
        assert_kept(own, kept_by_hand(model, row))


@pytest.mark.parametrize("chunk", [1, 7, 50])
@MODELS
@torch.no_grad()
def test_chunks_of_a_padded_batch_change_nothing(build: Build, chunk: int, kept_sets: list[Tensor]) -> None:
    # In the first chunks there is nothing but padding in the short rows.
    model = build(eos_token_id=None)
    batch, mask = pad_left([PROMPT, PROMPT[:, 10:40], PROMPT[:, :6]])
    with compress(model, HEAVY):
        whole = generate(model, batch, 4, attention_mask=mask).sequences
        expected = list(kept_sets)
        kept_sets.clear()
        chunked = generate(model, batch, 4, attention_mask=mask, prefill_chunk_size=chunk).sequences
    assert_kept(kept_sets, expected)
    assert torch.equal(chunked, whole)


@torch.no_grad()
def test_padding_on_the_right_is_refused_in_chunks_too() -> None:
    model = tiny_llama()
    mask = torch.ones_like(PROMPT)
    mask[:, 20:] = 0
    with compress(model, HEAVY), pytest.raises(CompressionError, match="needs padding on the left"):
        generate(model, PROMPT, 4, attention_mask=mask, prefill_chunk_size=30)


@torch.no_grad()
def test_drafts_that_come_with_the_prompt_pay_nothing(kept_sets: list[Tensor]) -> None:
    model, repeated = tiny_llama(eos_token_id=None), PROMPT[:, :20].repeat(1, 3)
    with compress(model, HEAVY):
        expected = generate(model, repeated, 20).sequences
        found = generate(model, repeated, 20, prompt_lookup_num_tokens=4).sequences
    assert_kept(kept_sets[2:], kept_sets[:2])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", [TINY.method, StreamingLLM(evict_while_decoding=True)])
@torch.no_grad()
def test_methods_that_do_not_ask_for_sums_do_not_pay(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "accumulated_attention", lambda *args, **options: pytest.fail("summed"))
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY.model_copy(update={"method": method}), later_turns="compress"):
        cache = generate(model, PROMPT, 4, prefill_chunk_size=7).cache
    assert all(layer.accumulated is None for layer in compressed_layers(cache))


def test_sums_carry_no_gradients() -> None:
    model = tiny_llama()
    with compress(model, HEAVY, later_turns="compress"):
        cache = forward(model, PROMPT).cache
        forward(model, PROMPT[:, :1], cache=cache)
    for layer in compressed_layers(cache):
        assert layer.accumulated is not None
        assert layer.accumulated.shape == (1, 2, TINY.size + 1)
        assert not layer.accumulated.requires_grad


def test_inference_mode_may_come_and_go() -> None:
    run = lockstep(tiny_llama(), 60, later_turns="compress")
    with run.compressing():
        with torch.inference_mode():
            run.prompt()
        run.decode(new_tokens(1, 3))
        with torch.inference_mode():
            run.turn(new_tokens(1, 5, seed=2))


def lockstep(model: PreTrainedModel, *lengths: int, **options: Any) -> Lockstep:
    return Lockstep(model.double(), SMALL_HEAVY, prompts(*lengths), **options)


@MODELS
def test_sums_go_on_from_turn_to_turn(build: Build) -> None:
    run = lockstep(build(), 60, 41, 12, 3, later_turns="compress")
    with run.compressing():
        run.prompt()
        for turn, length in enumerate([15, 2, 30]):
            run.decode(new_tokens(4, 4, seed=turn))
            run.turn(new_tokens(4, length, seed=10 + turn))
            assert run.rows[0].stored == SMALL.size
        run.decode(new_tokens(4, 2))


def test_a_prompt_within_the_size_is_summed_until_it_outgrows_it() -> None:
    run = lockstep(tiny_llama(), 12, 5)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 4))
        run.turn(new_tokens(2, 9, seed=2))
        assert run.rows[0].stored == SMALL.size
        assert all(layer.accumulated is None for layer in compressed_layers(run.cache))
        run.decode(new_tokens(2, 2, seed=3))


@MODELS
def test_a_decode_budget_is_held_by_the_sums(build: Build) -> None:
    run = lockstep(build(), 60, 12, 3, decode_budget=24)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(3, 26))
        assert run.rows[0].stored == SMALL.size + 13
        run.turn(new_tokens(3, 20, seed=2))
        run.decode(new_tokens(3, 15, seed=3))


@torch.no_grad()
def test_beams_take_their_sums_along() -> None:
    model = tiny_llama(eos_token_id=None).double()
    (prompt,) = prompts(60)
    references = naive_rows(model, SMALL_HEAVY, [60, 60], decode_budget=24)
    with compress(model, SMALL_HEAVY, decode_budget=24):
        result = generate(
            model,
            prompt,
            30,
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
            length_penalty=0.0,
        )
    for naive, sequence, score in zip(references, result.sequences, result.sequences_scores, strict=True):
        logits = logits_along(naive, prompt, sequence[60:])
        found = logits.log_softmax(-1).gather(1, sequence[60:, None]).sum()
        torch.testing.assert_close(found.float(), score.float(), atol=1e-4, rtol=1e-5)


def test_rows_that_are_moved_take_their_sums_along() -> None:
    layer = CompressedLayer.holding(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), of=3)
    layer.accumulated = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.accumulated[:, 0].tolist() == [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 2]))
    layer.keep(torch.tensor([[[0, 2]], [[1, 2]]]))
    assert layer.accumulated[:, 0].tolist() == [[4.0, 6.0], [2.0, 3.0]]
    layer.reset()
    assert layer.accumulated is None


def in_another_context(run: Lockstep) -> None:
    run.options["later_turns"] = "append"
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 2))
    run.options["later_turns"] = "compress"


def decoded_outside(run: Lockstep) -> None:
    with run.compressing():
        run.prompt()
    run.feed_outside(new_tokens(1, 2, seed=2))


def taken_back(run: Lockstep) -> None:
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(1, 4))
    run.take_back(2)


@pytest.mark.parametrize("spoil", [in_another_context, decoded_outside, taken_back])
def test_attention_that_is_not_known_is_not_guessed(spoil: Callable[[Lockstep], None]) -> None:
    run = lockstep(tiny_llama(), 60, later_turns="compress")
    spoil(run)
    with (
        run.compressing(),
        pytest.raises(CompressionError, match="h2o needs the attention of every token of the conversation"),
    ):
        run.turn(new_tokens(1, 9))


@torch.no_grad()
def test_another_methods_context_in_between_does_no_harm() -> None:
    model = tiny_llama().double()
    (prompt,) = prompts(60)
    (naive,) = naive_rows(model, SMALL_HEAVY, [60])
    cache = DynamicCache(config=model.config)
    with compress(model, SMALL_HEAVY, later_turns="compress"):
        forward(model, prompt, cache=cache)
        naive.turn(prompt[0])
        assert_holds(cache, 0, naive)
        forward(model, prompt[:, :1], cache=cache)
    with compress(model, SMALL, later_turns="compress"):
        forward(model, prompt[:, :1], cache=cache)
        forward(model, prompt[:, :30], cache=cache)
    assert [layer.stored for layer in compressed_layers(cache)] == [SMALL.size] * 2
    with compress(model, SMALL_HEAVY, later_turns="compress"), pytest.raises(CompressionError, match="h2o"):
        forward(model, prompt[:, :9], cache=cache)


@torch.no_grad()
def test_a_static_cache_keeps_no_sums() -> None:
    model = tiny_llama(eos_token_id=None)
    cache: Any = StaticCompressedCache(model.config, HEAVY, max_new_tokens=12)
    with compress(model, HEAVY):
        for prompt in (PROMPT, PROMPT[:, :10]):
            expected = generate(model, prompt, 12).sequences
            assert torch.equal(generate(model, prompt, 12, cache=cache).sequences, expected)
            assert all(layer.accumulated is None for layer in compressed_layers(cache))
            cache.reset()


def test_attention_that_is_not_finite_names_its_layer() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with (
        pytest.raises(CompressionError, match="attention of layer 1 is not finite"),
        compress(model, HEAVY),
    ):
        forward(model, PROMPT)
