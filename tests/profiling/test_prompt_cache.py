from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.evaluation.decode import greedy
from clusterprof.methods import H2O, ClusterAttn, MethodConfig, SnapKV, TopK
from clusterprof.profile import Compression
from clusterprof.profiling.prefill import Prefill, prefill_prompt
from clusterprof.runtime import CompressedLayer
from clusterprof.runtime.cache import stored
from clusterprof.runtime.selection import kept_positions
from tests.profiling.subjects import WINDOW, capture, generated, random_prompt
from tests.runtime.subjects import forward, stored_lengths
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT, SIZE, NEW_TOKENS = random_prompt(), 24, 10
METHODS: tuple[MethodConfig, ...] = (ClusterAttn(num_block=2, theta=0.02), TopK(), SnapKV(), H2O())
BUILDS = [tiny_llama, tiny_gemma3]


def prefilled(model: PreTrainedModel) -> Prefill:
    return prefill_prompt(model, PROMPT, observed=WINDOW, accumulate=True)


def kept_by(found: Prefill) -> Tensor:
    observation = found.observation(WINDOW)
    return torch.stack([kept_positions(method, observation, SIZE) for method in METHODS])


@torch.no_grad()
def compressed_alone(model: PreTrainedModel, method: object) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    compression = Compression(size=SIZE, window=WINDOW, method=method)  # type: ignore[arg-type]
    with compress(model, compression):
        forward(model, PROMPT, cache=cache)
    return cache


@pytest.mark.parametrize("build", BUILDS)
def test_each_row_is_the_cache_after_compressing_alone(build: Callable[..., PreTrainedModel]) -> None:
    model = build()
    found = prefilled(model)
    cache = found.prompt_cache.compressed(model, kept_by(found))
    for row, method in enumerate(METHODS):
        alone = compressed_alone(model, method)
        assert [type(layer) for layer in cache.layers] == [type(layer) for layer in alone.layers]
        assert stored_lengths(cache) == stored_lengths(alone)
        for i, (ours, theirs) in enumerate(zip(cache.layers, alone.layers, strict=True)):
            assert cache.get_seq_length(i) == alone.get_seq_length(i) == PROMPT.shape[1]
            for mine, other in zip(stored(ours), stored(theirs), strict=True):  # type: ignore[arg-type]
                torch.testing.assert_close(mine[row : row + 1], other)


@pytest.mark.parametrize("build", BUILDS)
def test_decoding_from_it_is_decoding_under_compress(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    found = prefilled(model)
    first = int(found.log_probs.argmax())
    cache = found.prompt_cache.compressed(model, kept_by(found))
    answers = greedy(model, cache, first, len(METHODS), max_new_tokens=NEW_TOKENS, end_tokens=set())
    for method, answer in zip(METHODS, answers, strict=True):
        with compress(model, Compression(size=SIZE, window=WINDOW, method=method)):
            assert answer == generated(model, PROMPT, NEW_TOKENS)
    assert len(set(map(tuple, answers))) > 1


@pytest.mark.parametrize("build", BUILDS)
def test_without_a_kept_set_it_is_the_whole_prompt(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    found = prefilled(model)
    cache = found.prompt_cache.compressed(model, None)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        forward(model, PROMPT, cache=stock)
    for i, (ours, theirs) in enumerate(zip(cache.layers, stock.layers, strict=True)):
        assert cache.get_seq_length(i) == stock.get_seq_length(i)
        torch.testing.assert_close(stored(ours)[0], theirs.keys)  # type: ignore[arg-type,union-attr]
        torch.testing.assert_close(stored(ours)[1], theirs.values)  # type: ignore[arg-type,union-attr]
    first = int(found.log_probs.argmax())
    (answer,) = greedy(model, cache, first, 1, max_new_tokens=NEW_TOKENS, end_tokens=set())
    assert answer == generated(model, PROMPT, NEW_TOKENS)


@pytest.mark.parametrize("build", BUILDS)
def test_it_is_not_used_up(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    found = prefilled(model)
    prompt_cache, kept = found.prompt_cache, kept_by(found)
    before = [tensor.clone() for tensor in tensors(found)]
    first = int(found.log_probs.argmax())

    def decoded(positions: Tensor | None) -> list[list[int]]:
        cache = prompt_cache.compressed(model, positions)
        rows = 1 if positions is None else len(positions)
        return greedy(model, cache, first, rows, max_new_tokens=NEW_TOKENS, end_tokens=set())

    whole, rows = decoded(None), decoded(kept)
    assert (decoded(None), decoded(kept)) == (whole, rows)
    for tensor, copy in zip(tensors(found), before, strict=True):
        assert torch.equal(tensor, copy)


def tensors(found: Prefill) -> list[Tensor]:
    held = found.prompt_cache
    return [tensor for layers in (held.full, held.sliding) for pair in layers.values() for tensor in pair]


@pytest.mark.parametrize("build", BUILDS)
def test_a_capture_holds_the_same(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    of_prefill, of_capture = prefilled(model).prompt_cache, capture(model).prompt_cache
    assert of_prefill.prompt_length == of_capture.prompt_length == PROMPT.shape[1]
    for ours, theirs in ((of_prefill.full, of_capture.full), (of_prefill.sliding, of_capture.sliding)):
        assert list(ours) == list(theirs)
        for layer, pair in ours.items():
            torch.testing.assert_close(pair, theirs[layer])


def test_layers_are_told_apart() -> None:
    found = prefilled(tiny_gemma3()).prompt_cache
    assert (list(found.full), list(found.sliding)) == ([1], [0])
    cache = found.compressed(tiny_gemma3(), None)
    assert [isinstance(layer, CompressedLayer) for layer in cache.layers] == [False, True]
