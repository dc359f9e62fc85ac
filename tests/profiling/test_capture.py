from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError
from clusterprof.profiling.capture import Capture
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.transformers_names import CACHE
from tests.profiling.subjects import SMALL, WINDOW, capture, generated, random_prompt
from tests.runtime.subjects import model_state
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen3

PROMPT = random_prompt()
LENGTH, STEPS = 60, 12


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_qwen3, tiny_gemma3])
def test_follows_the_models_own_greedy_answer(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    before = model_state(model)
    found = capture(model)
    assert model_state(model) == before
    assert found.tokens.tolist() == generated(model, PROMPT, STEPS + 1)
    assert found.log_probs.shape == (STEPS, 128)
    assert (found.prompt_length, found.window) == (LENGTH, WINDOW)


@pytest.mark.parametrize("at", [1, 4])
def test_stops_at_an_end_token_which_is_not_fed(at: int) -> None:
    model = tiny_llama(eos_token_id=None)
    answer = generated(model, PROMPT, STEPS + 1)
    end = answer[at]
    assert answer.index(end) == at
    found = capture(model, end_tokens={end, 127})
    assert found.tokens.tolist() == generated(model, PROMPT, STEPS + 1, eos_token_id=[end, 127])
    assert found.tokens.tolist() == answer[: at + 1]
    assert len(found.log_probs) == at
    for layer in found.layers.values():
        assert layer.queries.shape[1] == layer.decoded_keys.shape[1] == layer.norm.shape[1] == at


def test_an_answer_that_ends_at_once_leaves_nothing_to_compare() -> None:
    model = tiny_llama(eos_token_id=None)
    with pytest.raises(CompressionError, match="ended its answer with the first token"):
        capture(model, end_tokens={generated(model, PROMPT, 1)[0]})


def check_layers(model: PreTrainedModel, found: Capture) -> None:
    """Against a run of the stock model, step by step, with the weights of its eager attention."""
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    prefill = model(PROMPT, output_attentions=True, **{CACHE: cache})
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for i, layer in found.layers.items():
        stock_keys, stock_values = cache.layers[i].keys, cache.layers[i].values  # type: ignore[union-attr]
        torch.testing.assert_close(layer.keys, stock_keys[0], atol=1e-5, rtol=1e-5)  # type: ignore[index]
        torch.testing.assert_close(layer.values, stock_values[0], atol=1e-5, rtol=1e-5)  # type: ignore[index]
        window = prefill.attentions[i][0, :, -WINDOW:, :-WINDOW].mean(dim=1)
        importance = window.view(kv_heads, -1, LENGTH - WINDOW).mean(dim=1)
        torch.testing.assert_close(layer.importance, importance, atol=1e-6, rtol=1e-4)
        assert layer.importance.dtype == torch.float32

    for step, token in enumerate(found.tokens[:-1]):
        output = model(token.view(1, 1), output_attentions=True, **{CACHE: cache})
        log_probs = output.logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(found.log_probs[step], log_probs, atol=1e-5, rtol=1e-4)
        for i, layer in found.layers.items():
            stock = output.attentions[i][0, :, 0]
            keys = torch.cat([layer.keys, layer.decoded_keys[:, : step + 1]], dim=1)
            keys = keys.repeat_interleave(heads // kv_heads, dim=0)
            scores = (keys @ layer.queries[:, step, :, None])[..., 0] * found.scaling
            attention = (scores - layer.logsumexp[:, step, None]).exp()
            torch.testing.assert_close(attention, stock, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.norm[:, step], stock.norm(dim=-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
@torch.no_grad()
def test_holds_what_the_stock_model_computes(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    found = capture(model)
    assert list(found.layers) == [0, 1]
    assert found.sliding == {}
    check_layers(model, found)
    loss = torch.nn.functional.cross_entropy(found.log_probs, found.tokens[1:])
    assert found.full_loss == pytest.approx(float(loss), abs=1e-5)
    assert found.observation.importance.shape == (2, 2, LENGTH - WINDOW)


@torch.no_grad()
def test_holds_full_and_sliding_layers_of_a_hybrid_model() -> None:
    model = tiny_gemma3(eos_token_id=None)
    found = capture(model)
    assert list(found.layers) == [1]
    assert list(found.sliding) == [0]
    cache = DynamicCache(config=model.config)
    model(PROMPT, **{CACHE: cache})
    for stored, stock in zip(found.sliding[0], (cache.layers[0].keys, cache.layers[0].values), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(stored, stock[0])  # type: ignore[index]
    check_layers(model, found)


@torch.no_grad()
def test_holds_the_sums_of_all_queries_and_the_words() -> None:
    model = tiny_qwen3(eos_token_id=None)
    words = torch.arange(LENGTH) % 4 == 0
    found = capture(model, accumulate=True, word_starts=words)
    model.set_attn_implementation("eager")
    for i, weights in enumerate(model(PROMPT, output_attentions=True).attentions):
        sums = weights[0].sum(dim=1).view(2, -1, LENGTH).mean(dim=1)[:, :-WINDOW]
        accumulated = found.layers[i].accumulated
        assert accumulated is not None
        torch.testing.assert_close(accumulated, sums, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.observation.accumulated[i], accumulated)  # type: ignore[index]
    assert torch.equal(found.word_starts, words)  # type: ignore[arg-type]
    assert torch.equal(found.observation.word_starts, words[:-WINDOW].expand(2, -1))  # type: ignore[arg-type]
    # All else is as without.
    plain = capture(tiny_qwen3(eos_token_id=None))
    assert plain.layers[0].accumulated is plain.word_starts is None
    assert torch.equal(plain.tokens, found.tokens)
    assert torch.equal(plain.observation.importance, found.observation.importance)


def test_attention_that_is_not_finite_names_its_layer() -> None:
    model = tiny_llama(num_hidden_layers=3)
    with torch.no_grad():
        decoder_of(model).layers[1].self_attn.q_proj.weight[0, 0] = torch.nan  # type: ignore[index,union-attr]
    before = model_state(model)
    with pytest.raises(CompressionError, match="attention of layer 1 is not finite"):
        capture(model)
    assert model_state(model) == before


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(CompressionError, match="logits are not finite"):
        capture(model)


def test_a_model_of_sliding_windows_alone_is_refused() -> None:
    with pytest.raises(CompressionError, match="Every layer of this model has sliding-window"):
        capture(tiny_mistral(sliding_window=16))


def test_is_refused_inside_compress() -> None:
    model = tiny_llama()
    with compress(model, SMALL), pytest.raises(CompressionError, match="already inside compress"):
        capture(model)
