"""What `generate` says about its prompt: where it ends whatever is passed along, and in whose context it runs."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    JetMoeConfig,
    JetMoeForCausalLM,
    PreTrainedModel,
)

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.profiling.capture import capture_prompt
from clusterprof.runtime.transformers_names import CACHE
from tests.runtime.subjects import TINY, WINDOW, forward, generate, random_stream, stored_lengths
from tests.tiny import tiny_llama

PROMPT = random_stream()[None, :60]


def test_a_call_that_begins_after_the_context_is_refused() -> None:
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        late: Any = model.generate
    with pytest.raises(CompressionError, match="a compress\\(\\) context that has ended"):
        late(PROMPT, max_new_tokens=5)


@torch.no_grad()
def test_leaving_the_context_waits_for_the_calls_of_other_threads() -> None:
    model = tiny_llama(eos_token_id=None)
    begun = threading.Event()
    steps: list[int] = []
    results: list[Any] = []

    def say_begun(ids: Tensor, scores: Tensor) -> Tensor:
        begun.set()
        steps.append(ids.shape[1])
        return scores

    def work() -> None:
        with torch.no_grad():
            results.append(generate(model, PROMPT, 40, logits_processor=[say_begun]))

    thread = threading.Thread(target=work)
    with compress(model, TINY):
        thread.start()
        assert begun.wait(30)
    assert len(steps) == 40
    thread.join()
    assert stored_lengths(results[0].cache) == [24 + 39] * 2
    with compress(model, TINY):
        assert torch.equal(generate(model, PROMPT, 40).sequences, results[0].sequences)


def test_a_context_may_be_left_from_inside_its_own_call() -> None:
    model = tiny_llama(eos_token_id=None)
    context = compress(model, TINY)

    def leave(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 62:
            context.__exit__(None, None, None)
        return scores

    context.__enter__()
    cache = generate(model, PROMPT, 5, logits_processor=[leave]).cache
    assert stored_lengths(cache) == [24 + 4] * 2


@pytest.mark.parametrize("positions", [61, 80])
@torch.no_grad()
def test_a_mask_of_another_length_does_not_move_the_end_of_the_prompt(
    positions: int, kept_sets: list[Tensor]
) -> None:
    model = tiny_llama(eos_token_id=None)
    embeddings = model.get_input_embeddings()(PROMPT)
    ids = torch.zeros(1, 0, dtype=torch.long)
    with compress(model, TINY):
        generate(model, PROMPT, 1)
        expected = list(kept_sets)
        kept_sets.clear()
        # The embeddings are the prompt, whatever else comes with them.
        cache = generate(model, ids, 3, inputs_embeds=embeddings, attention_mask=None).cache
        assert stored_lengths(cache) == [26, 26]
        assert all(torch.equal(a, b) for a, b in zip(kept_sets, expected, strict=True))
        kept_sets.clear()
        mask = torch.ones(1, positions, dtype=torch.long)
        assert stored_lengths(generate(model, PROMPT, 3, attention_mask=mask).cache) == [26, 26]
        assert all(torch.equal(a, b) for a, b in zip(kept_sets, expected, strict=True))


def with_soft_prompt(model: PreTrainedModel, soft: Tensor) -> None:
    """Put embeddings before every prompt, as prompt tuning does."""
    plain: Any = model.prepare_inputs_for_generation

    def prepare(input_ids: Tensor, attention_mask: Any = None, **options: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = plain(input_ids, attention_mask=attention_mask, **options)
        if inputs[CACHE].get_seq_length() == 0:
            text = model.get_input_embeddings()(inputs["input_ids"])
            inputs |= {"inputs_embeds": torch.cat([soft, text], dim=1), "input_ids": None}
        return inputs | {"attention_mask": None, "position_ids": None}

    model.prepare_inputs_for_generation = prepare  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 60}], ids=str)
@torch.no_grad()
def test_tokens_that_the_model_puts_before_the_text_belong_to_the_prompt(
    options: dict[str, Any], kept_sets: list[Tensor]
) -> None:
    model = tiny_llama(eos_token_id=None)
    soft = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3)) * 0.2
    whole = torch.cat([soft, model.get_input_embeddings()(PROMPT)], dim=1)
    with compress(model, TINY):
        model(inputs_embeds=whole)
    expected = list(kept_sets)
    kept_sets.clear()
    with_soft_prompt(model, soft)
    with compress(model, TINY):
        cache = generate(model, PROMPT, 5, **options).cache
    assert stored_lengths(cache) == [24 + 4] * 2
    assert all(torch.equal(a, b) for a, b in zip(kept_sets, expected, strict=True))


def test_settings_count_wherever_they_are_given() -> None:
    model = tiny_llama(eos_token_id=None)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, assistant_early_exit=1)  # type: ignore[no-untyped-call]
    with compress(model, TINY):
        run: Any = model.generate
        with pytest.raises(CompressionError, match="An assistant model cannot draft"):
            run(PROMPT, settings)
    assert model.config.num_hidden_layers == 2

    model.generation_config.prefill_chunk_size = 7
    with compress(model, TINY):
        assert stored_lengths(generate(model, PROMPT, 5).cache) == [24 + 4] * 2


@pytest.mark.parametrize(
    ("rows", "heads", "reason"),
    [(1, 1, "given 1 of 1 with 16"), (2, 2, "given 2 of 2 with 16")],
    ids=["other heads", "other rows"],
)
@torch.no_grad()
def test_a_cache_of_other_heads_or_rows_is_refused_unharmed(rows: int, heads: int, reason: str) -> None:
    model = tiny_llama(eos_token_id=None)
    other = tiny_llama(eos_token_id=None, num_key_value_heads=heads)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        forward(model, PROMPT, cache=cache)
    token = PROMPT[:, :1].repeat(rows, 1)
    before = cache.layers[0].keys.clone()  # type: ignore[union-attr]
    with pytest.raises(CompressionError, match=f"1 rows of 2 KV heads with 16 dimensions, and is {reason}"):
        forward(other, token, cache=cache)
    assert torch.equal(cache.layers[0].keys, before)  # type: ignore[union-attr, arg-type]


def test_a_model_that_repeats_its_keys_itself_is_refused() -> None:
    # It repeats them in another order than the attention interface does: the group mean would be of strangers.
    model = JetMoeForCausalLM(
        JetMoeConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=16,
            intermediate_size=32,
            num_local_experts=2,
            num_experts_per_tok=2,
        )
    )
    model.train(False)
    with (
        pytest.raises(CompressionError, match="attends to 4 heads of keys and caches 2"),
        compress(model, TINY),
    ):
        forward(model, PROMPT)
    with pytest.raises(CompressionError, match="attends to 4 heads of keys and caches 2"):
        capture_prompt(model, PROMPT, window=WINDOW, decode_tokens=2, end_tokens=set())


def test_an_attention_backend_changed_inside_is_refused_and_stays() -> None:
    model = tiny_llama()
    with compress(model, TINY):
        model.set_attn_implementation("eager")
        with pytest.raises(CompressionError, match="backend was changed inside compress"):
            forward(model, PROMPT)
    assert model.config._attn_implementation == "eager"


def do_batch(model: Any) -> None:
    model.generate_batch([[5, 6, 7]])


def do_copy(model: Any) -> None:
    copy.deepcopy(model)


def do_train(model: Any) -> None:
    model.train()
    forward(model, PROMPT, use_cache=False)


def do_pair(model: Any) -> None:
    forward(model, PROMPT, cache=EncoderDecoderCache(DynamicCache(), DynamicCache()))


def do_tuple(model: Any) -> None:
    model(PROMPT, **{CACHE: ()})


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (do_batch, "generate_batch\\(\\) keeps its own paged cache"),
        (do_copy, "cannot be copied or saved inside"),
        (do_train, "use_cache=False"),
        (do_pair, "cannot shrink a EncoderDecoderCache"),
        (do_tuple, "cannot shrink a tuple"),
    ],
)
def test_what_cannot_work_says_so(do: Callable[[Any], None], reason: str) -> None:
    model = tiny_llama()
    with pytest.raises(CompressionError, match=reason), compress(model, TINY):
        do(model)
    assert not {"generate", "generate_batch"} & vars(model).keys()


def test_a_cache_that_the_model_leaves_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As with gradient checkpointing, where transformers drops the cache on its way to the layers.
    model = tiny_llama()
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *args, **kwargs: (keys, values))
    with pytest.raises(CompressionError, match="Layer 0 left its cache empty"), compress(model, TINY):
        forward(model, PROMPT)


@pytest.mark.parametrize("model", ["gpt2", None, object()])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with (
        pytest.raises(CompressionError, match=f"A {type(model).__name__} is not a model of transformers"),
        compress(model, TINY),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode_budget": 20.5}, "decode_budget is 20.5"),
        ({"decode_budget": "40"}, "decode_budget is '40'"),
        ({"decode_budget": True}, "decode_budget is True"),
        ({"query_length": 3.5}, "query_length is 3.5"),
        ({"query_length": "12"}, "query_length is '12'"),
        ({"query_length": [4, None]}, "query_length is 4, None"),
    ],
    ids=str,
)
def test_what_is_no_number_of_tokens_is_refused(options: dict[str, Any], reason: str) -> None:
    with (
        pytest.raises(CompressionError, match=f"{reason}; it must be a whole number"),
        compress(tiny_llama(), TINY, **options),
    ):
        pytest.fail("entered")
