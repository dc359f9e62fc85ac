"""The context: what it leaves behind, and several of them at once."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.runtime.attention import decoder_of
from tests.runtime.models import convert, expected_lengths, full_attention
from tests.runtime.subjects import (
    TINY,
    Subject,
    continuation,
    forward,
    generate,
    model_state,
    pad_left,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen3

PROMPT = random_stream()[None, :60]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_leaves_the_model_as_it_was(tiny: Subject, attention: str) -> None:
    model = tiny.model
    model.set_attn_implementation(attention)
    before = model_state(model)
    with compress(model, TINY):
        assert model_state(model) != before
        generate(model, PROMPT, 3)
    assert model_state(model) == before


def broken(model: PreTrainedModel) -> None:
    raise RuntimeError("mine")


def out_of_vocabulary(model: PreTrainedModel) -> None:
    forward(model, torch.tensor([[10_000]]))


def not_finite(model: PreTrainedModel) -> None:
    # Of the last layer with full attention.
    layer = max(index for index, full in enumerate(full_attention(model)) if full)
    attention = model.get_submodule(f"model.layers.{layer}.self_attn")
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.fill_(torch.nan)
    forward(model, PROMPT)


# Row: an exception inside the context manager.
@pytest.mark.parametrize("fail", [broken, out_of_vocabulary, not_finite])
def test_leaves_the_model_as_it_was_after_an_exception(
    tiny: Subject, fail: Callable[[PreTrainedModel], None]
) -> None:
    before = model_state(tiny.model)
    with pytest.raises((RuntimeError, IndexError, CompressionError)), compress(tiny.model, TINY):
        fail(tiny.model)
    assert model_state(tiny.model) == before


def test_runs_after_one_that_failed_are_compressed_as_ever(tiny: Subject) -> None:
    with compress(tiny.model, TINY):
        expected = continuation(tiny.model, PROMPT, 5)
        with pytest.raises(IndexError):
            out_of_vocabulary(tiny.model)
        assert continuation(tiny.model, PROMPT, 5) == expected


# Row: bf16/fp16 scores full of ties; fp16 overflow.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_attention_that_is_not_finite_names_its_layer(dtype: torch.dtype) -> None:
    model = tiny_llama(num_hidden_layers=3)
    convert(model, dtype)
    with torch.no_grad():
        # Keys beyond what the dtype can hold, out of weights that it can.
        model.model.layers[1].self_attn.k_proj.weight.fill_(torch.finfo(dtype).max)
    with pytest.raises(CompressionError, match="attention of layer 1 is not finite"), compress(model, TINY):
        forward(model, PROMPT)


# Row: two contexts nested, or two threads, or two models.
def test_a_nested_context_is_refused_and_the_outer_one_goes_on(tiny: Subject) -> None:
    model = tiny.model
    before = model_state(model)
    with compress(model, TINY):
        with pytest.raises(CompressionError, match="already inside compress"), compress(model, TINY):
            pytest.fail("entered")
        lengths = stored_lengths(generate(model, PROMPT, 1).cache)
        assert lengths == expected_lengths(model, full=24, seen=60)
    assert model_state(model) == before


def test_models_that_share_a_config_object_do_not_undo_each_other() -> None:
    first = tiny_llama()
    second = LlamaForCausalLM(first.config)
    assert first.config is second.config
    before = model_state(first)
    with compress(first, TINY):
        with pytest.raises(CompressionError, match="same config object"), compress(second, TINY):
            pytest.fail("entered")
        # What is not in a context is not compressed, whatever its config says.
        assert stored_lengths(forward(second, PROMPT).cache) == [60, 60]
    assert model_state(first) == model_state(second) == before


def test_two_models_in_two_contexts() -> None:
    first, second = tiny_llama(eos_token_id=None), tiny_mistral(eos_token_id=None)
    smaller = TINY.model_copy(update={"size": 16})
    with compress(first, TINY):
        expected_first = continuation(first, PROMPT, 10)
    with compress(second, smaller):
        expected_second = continuation(second, PROMPT, 10)

    # Left in the order they were entered, which a stack of contexts would not do.
    one, two = compress(first, TINY), compress(second, smaller)
    one.__enter__()
    two.__enter__()
    assert continuation(first, PROMPT, 10) == expected_first
    assert stored_lengths(generate(first, PROMPT, 1).cache) == [24, 24]
    one.__exit__(None, None, None)
    assert continuation(second, PROMPT, 10) == expected_second
    assert stored_lengths(generate(second, PROMPT, 1).cache) == [16, 16]
    assert stored_lengths(generate(first, PROMPT, 1).cache) == [60, 60]
    two.__exit__(None, None, None)


def test_two_threads_on_two_models() -> None:
    models = [tiny_llama(eos_token_id=None), tiny_mistral(eos_token_id=None)]
    sizes = [24, 32]
    before = [model_state(model) for model in models]
    alone = []
    for model, size in zip(models, sizes, strict=True):
        with compress(model, TINY.model_copy(update={"size": size})):
            alone.append(continuation(model, PROMPT, 10))
    together = threading.Barrier(2)
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        together.wait()
        for _ in range(5):
            with compress(models[i], TINY.model_copy(update={"size": sizes[i]})):
                found.setdefault(i, []).append(continuation(models[i], PROMPT, 10))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [alone[i]] * 5 for i in range(2)}
    assert [model_state(model) for model in models] == before


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3, tiny_phi3, tiny_qwen3])
def test_the_decoder_may_be_called_without_its_head(
    build: Callable[..., PreTrainedModel], kept_sets: list[Tensor]
) -> None:
    model = build()
    decoder: Any = decoder_of(model)
    batch, mask = pad_left([PROMPT, random_stream(seed=9)[None, :33]])
    embeddings = decoder.get_input_embeddings()(batch)
    with compress(model, TINY):
        forward(model, batch, attention_mask=mask)
        expected = list(kept_sets)
        calls: list[Callable[[], Any]] = [
            lambda: forward(decoder, input_ids=batch, attention_mask=mask),
            # Positional arguments are arguments, too.
            lambda: forward(decoder, batch, mask),
            lambda: forward(decoder, batch, mask, None, DynamicCache(config=model.config)),
            lambda: forward(decoder, inputs_embeds=embeddings, attention_mask=mask),
        ]
        for call in calls:
            kept_sets.clear()
            cache = call().cache
            assert 24 in stored_lengths(cache)
            assert all(torch.equal(a, b) for a, b in zip(kept_sets, expected, strict=True))


def test_a_prompt_may_come_as_embeddings(tiny: Subject) -> None:
    embeddings = tiny.model.get_input_embeddings()(PROMPT)
    with compress(tiny.model, TINY):
        expected = continuation(tiny.model, PROMPT, 5)
        run: Any = tiny.model.generate
        found = run(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False)
    assert found.tolist() == expected


def test_attention_weights_can_still_be_asked_for() -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    plain = forward(model, PROMPT, output_attentions=True)
    with compress(model, TINY):
        found = forward(model, PROMPT, output_attentions=True)
    assert all(torch.equal(a, b) for a, b in zip(found.attentions, plain.attentions, strict=True))


def test_a_model_with_learned_positions_works() -> None:
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=128, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    model.train(False)
    with compress(model, TINY):
        assert stored_lengths(generate(model, PROMPT, 5, pad_token_id=0).cache) == [28, 28]


def test_copies_of_a_model_are_independent() -> None:
    model = tiny_llama()
    other = copy.deepcopy(model)
    with compress(model, TINY), compress(other, TINY.model_copy(update={"size": 16})):
        assert stored_lengths(forward(model, PROMPT).cache) == [24, 24]
        assert stored_lengths(forward(other, PROMPT).cache) == [16, 16]


def test_threads_may_generate_inside_one_context() -> None:
    model = tiny_llama(eos_token_id=None)
    prompts = [random_stream(seed=seed)[None, : 40 + seed] for seed in range(4)]
    with compress(model, TINY):
        alone = [continuation(model, prompt, 10) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda prompt: continuation(model, prompt, 10), prompts))
    assert together == alone
