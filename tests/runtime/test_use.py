"""What people do with a model, inside the context: sample, search, chat, in any gradient mode."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
)

from clusterprof import compress
from clusterprof.errors import CompressionError
from tests.runtime.subjects import (
    TINY,
    compressed_layers,
    fed_lengths,
    forward,
    generate,
    greedy_answer,
    greedy_singly,
    pad_left,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

PROMPT = random_stream()[None, :60]
Build = Callable[..., PreTrainedModel]

models = pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])


@models
@torch.no_grad()
def test_greedy(build: Build) -> None:
    model = build(eos_token_id=None)
    with compress(model, TINY):
        found = generate(model, PROMPT, 20).sequences[:, 60:]
    assert torch.equal(found, greedy_answer(model, PROMPT, 20))


@models
@torch.no_grad()
def test_sampling_with_a_seed(build: Build) -> None:
    model = build(eos_token_id=None)
    torch.manual_seed(3)
    with compress(model, TINY):
        found = generate(model, PROMPT, 20, do_sample=True, top_k=0, temperature=1.5).sequences[0, 60:]
    torch.manual_seed(3)
    with compress(model, TINY):
        output = forward(model, PROMPT)
    tokens = []
    for _ in range(20):
        tokens.append(torch.multinomial((output.logits[:, -1] / 1.5).softmax(-1), 1))
        output = forward(model, tokens[-1], cache=output.cache)
    assert found.tolist() == torch.cat(tokens).flatten().tolist()


@models
@torch.no_grad()
def test_samples_of_one_prompt_are_those_of_its_copies(build: Build) -> None:
    model = build(eos_token_id=None)
    found = []
    for prompts, each in ((PROMPT, 3), (PROMPT.repeat(3, 1), 1)):
        torch.manual_seed(3)
        with compress(model, TINY):
            found.append(generate(model, prompts, 12, do_sample=True, num_return_sequences=each).sequences)
    assert len({tuple(row) for row in found[0].tolist()}) == 3
    assert torch.equal(*found)


def beam_search(model: PreTrainedModel, prompt: Tensor, steps: int, beams: int) -> Tensor:
    """Beams ``(beams, steps)``, best first; every hypothesis is fed anew, over a cache of its own."""

    def log_probabilities(tokens: list[int]) -> Tensor:
        with compress(model, TINY):
            output = forward(model, prompt)
        for token in tokens:
            output = forward(model, torch.tensor([[token]]), cache=output.cache)
        return output.logits[0, -1].log_softmax(-1)  # type: ignore[no-any-return]

    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        longer = [
            (score + value, [*tokens, token])
            for score, tokens in hypotheses
            for token, value in enumerate(log_probabilities(tokens).tolist())
        ]
        hypotheses = sorted(longer, reverse=True)[:beams]
    return torch.tensor([tokens for _, tokens in hypotheses])


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gemma3])
@torch.no_grad()
def test_beams(build: Build) -> None:
    model = build(eos_token_id=None)
    with compress(model, TINY):
        found = generate(model, PROMPT, 6, num_beams=3, num_return_sequences=3).sequences[:, 60:]
    assert torch.equal(found, beam_search(model, PROMPT, 6, 3))


@torch.no_grad()
def test_guidance_has_a_prompt_of_its_own(kept_sets: list[Tensor]) -> None:
    # It is prefilled in the middle of a generation, over another cache, and is compressed as a whole.
    model, against = tiny_llama(eos_token_id=None), random_stream(seed=6)[None, :90]
    with compress(model, TINY):
        found = generate(model, PROMPT, 70, guidance_scale=1.5, negative_prompt_ids=against)
        kept = list(kept_sets)
        kept_sets.clear()
        outputs = [forward(model, prompt) for prompt in (PROMPT, against)]
    assert len(kept) == 4
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_sets, strict=True))
    tokens = []
    for _ in range(70):
        wanted, unwanted = (output.logits[:, -1].log_softmax(-1) for output in outputs)
        tokens.append((unwanted + 1.5 * (wanted - unwanted)).argmax(-1, keepdim=True))
        outputs = [forward(model, tokens[-1], cache=output.cache) for output in outputs]
    assert found.sequences[0, 60:].tolist() == torch.cat(tokens).flatten().tolist()


@pytest.mark.parametrize("answer_length", [1, 5])
@pytest.mark.parametrize("ids", ["all", "new"])
@models
@torch.no_grad()
def test_chat_of_several_turns(build: Build, ids: str, answer_length: int) -> None:
    model = build(eos_token_id=None)
    questions = [PROMPT, *(random_stream(seed=seed)[None, :11] for seed in (5, 6, 7))]
    cache, singly = (DynamicCache(config=model.config) for _ in range(2))
    text = torch.empty(1, 0, dtype=torch.long)
    with compress(model, TINY), fed_lengths(model) as fed:
        for question in questions:
            text = torch.cat([text, question], dim=1)
            unfed = text[:, cache.get_seq_length() :]
            fed.clear()
            new = unfed if ids == "new" else text
            mask = torch.ones_like(text)
            answer = generate(model, new, answer_length, cache=cache, attention_mask=mask).sequences
            text = torch.cat([text, answer[:, new.shape[1] :]], dim=1)
            assert fed == [unfed.shape[1]] + [1] * (answer_length - 1)

            if singly.get_seq_length() == 0:
                first = forward(model, question, cache=singly).logits[:, -1:].argmax(-1)
                expected = [int(first), *greedy_singly(model, singly, first, answer_length - 1)]
            else:
                expected = greedy_singly(model, singly, unfed, answer_length)
            assert text[0, -answer_length:].tolist() == expected
    assert {layer.evicted for layer in compressed_layers(cache)} == {60 - TINY.size}
    assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("held", [60, 64])
@torch.no_grad()
def test_a_cache_that_holds_the_input_already_is_refused(held: int) -> None:
    model = tiny_llama(eos_token_id=None)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        generate(model, PROMPT, held - 59, cache=cache)
        with pytest.raises(
            CompressionError, match=f"already holds {held} tokens, and the input has 60; pass"
        ):
            generate(model, PROMPT, 5, cache=cache)
        # New tokens alone, and nothing that says what came before.
        with pytest.raises(
            CompressionError, match=r"the input has 9; pass .* or the new ones with the attention mask"
        ):
            generate(model, PROMPT[:, :9], 5, cache=cache)
    assert cache.get_seq_length() == held


def test_an_empty_prompt_and_what_is_no_cache_are_refused_as_that() -> None:
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        with pytest.raises(CompressionError, match="The prompt passed to generate\\(\\) is empty"):
            generate(model, PROMPT[:, :0], 5)
        # transformers' own words.
        with pytest.raises(ValueError, match="tuple"):
            generate(model, PROMPT, 5, cache=())


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("decode", MODES)
@pytest.mark.parametrize("prefill", MODES)
@models
def test_gradient_modes_of_prefill_and_decoding(build: Build, prefill: str, decode: str) -> None:
    model = build(eos_token_id=None)
    with torch.no_grad():
        expected = greedy_answer(model, PROMPT, 9)[0].tolist()
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        with MODES[prefill]():
            tokens = [forward(model, PROMPT, cache=cache).logits[0, -1].argmax().item()]
        # Back and forth, so that both modes write into the same buffers.
        for step in range(8):
            with MODES[decode if step % 4 else prefill]():
                output = forward(model, torch.tensor([tokens[-1:]]), cache=cache)
                tokens.append(output.logits[0, -1].argmax().item())
    assert tokens == expected
    # The same slots are used again.
    assert compressed_layers(cache)[0].stored == TINY.size + 8


@models
def test_a_prompt_from_inference_mode_is_cropped_outside_of_it(build: Build) -> None:
    # Its keys are the model's own, not a copy, and may not be written to.
    model = build(eos_token_id=None)
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = forward(model, PROMPT[:, :16]).logits[:, -1:]
    with compress(model, TINY):
        with torch.inference_mode():
            forward(model, PROMPT[:, :20], cache=cache)
        cache.crop(-5)
        found = forward(model, PROMPT[:, 15:16], cache=cache).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@models
@torch.no_grad()
def test_decoding_outside_after_generating_inside(build: Build) -> None:
    model = build(eos_token_id=None)
    expected = greedy_answer(model, PROMPT, 15)
    cache = DynamicCache(config=model.config)
    with compress(model, TINY):
        text = generate(model, PROMPT, 5, cache=cache).sequences
    text = generate(model, text, 10, cache=cache).sequences
    assert torch.equal(text[:, 60:], expected)


def test_generate_is_as_before_after_the_context() -> None:
    model, calls = tiny_llama(eos_token_id=None), 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return LlamaForCausalLM.generate(model, *args, **kwargs)

    with compress(model, TINY):
        pass
    assert "generate" not in vars(model)
    vars(model)["generate"] = patched
    for error in (nullcontext(), pytest.raises(CompressionError)):
        with error, compress(model, TINY):
            assert stored_lengths(generate(model, PROMPT, 1).cache) == [24, 24]
            generate(model, PROMPT, 1, use_cache=isinstance(error, nullcontext))
        assert vars(model)["generate"] is patched
    assert calls == 4
    assert stored_lengths(generate(model, PROMPT, 1).cache) == [60, 60]


def test_a_model_that_cannot_generate_is_refused() -> None:
    with pytest.raises(CompressionError, match=r"LlamaModel does not generate text.*AutoModelForCausalLM"):  # noqa: SIM117
        with compress(tiny_llama().model, TINY):
            pytest.fail("entered")


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 4}])
@torch.no_grad()
def test_a_call_of_generate_inside_another_has_a_turn_of_its_own(options: dict[str, Any]) -> None:
    model, short, repeated = tiny_llama(eos_token_id=None), PROMPT[:, :30], PROMPT[:, :20].repeat(1, 3)
    inner = []

    def ask_again(tokens: Tensor, scores: Tensor) -> Tensor:
        inner.append(generate(model, short, 4).sequences)
        return scores

    with compress(model, TINY):
        expected = [generate(model, repeated, 20, **options), generate(model, short, 4)]
        outer = generate(model, repeated, 20, logits_processor=[ask_again], **options)
    assert torch.equal(outer.sequences, expected[0].sequences)
    assert all(torch.equal(text, expected[1].sequences) for text in inner)


@torch.no_grad()
def test_rows_that_end_early_are_fed_padding() -> None:
    model = tiny_llama(eos_token_id=None)
    batch, mask = pad_left([PROMPT, PROMPT[:, 10:40]])
    answers = [greedy_answer(model, PROMPT, 10)[0], greedy_answer(model, PROMPT[:, 10:40], 10)[0]]
    end = int(answers[0][3])
    with compress(model, TINY):
        text = generate(model, batch, 10, attention_mask=mask, eos_token_id=end, pad_token_id=0).sequences
    assert text[0, 60:].tolist() == [*answers[0][:4].tolist(), *[0] * 6]
    assert text[1, 60:].tolist() == answers[1].tolist()
