import copy
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.methods import ClusterAttn, SnapKV, StreamingLLM
from clusterprof.profiling.capture import Capture, LayerCapture
from clusterprof.profiling.replay import Replay, replay, replay_all
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.selection import kept_positions
from clusterprof.runtime.transformers_names import CACHE
from tests.profiling.subjects import SMALL, capture, random_prompt
from tests.reference.naive_trial import NaiveTrial, naive_trial
from tests.runtime.subjects import model_state
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_phi3, tiny_qwen2, tiny_qwen3

PROMPT = random_prompt()
LENGTH, SIZE = 60, SMALL.size


def random_kept(layers: int, size: int = SIZE, seed: int = 0) -> Tensor:
    """Other positions in every layer and head, the window not among them."""
    order = torch.rand(layers, 2, LENGTH, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :size].sort(-1).values


def assert_equal_trials(found: Replay, expected: NaiveTrial, tolerance: float = 1e-4) -> None:
    for field in fields(Replay):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert ours.shape == theirs.shape
        if field.name == "log_kl":
            # Where the runs hardly differ, a logarithm tells one rounding from another.
            ours, theirs = ours.exp(), theirs.exp()
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=0, msg=field.name)


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_qwen3, tiny_qwen2, tiny_phi3])
def test_equals_a_naive_trial(build: Callable[..., PreTrainedModel]) -> None:
    model = build()
    found = capture(model)
    for method in (SMALL.method, ClusterAttn(num_block=8, theta=0.0, gap_pool=1), SnapKV(), StreamingLLM()):
        compression = SMALL.model_copy(update={"method": method})
        kept = kept_positions(compression.method, found.observation, compression.size)
        trial = naive_trial(model, PROMPT, found.tokens[:-1].tolist(), kept)
        # Otherwise there would be nothing to tell apart.
        assert trial.kl.max() > 1e-3
        assert_equal_trials(replay(model, found, kept), trial)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2, 24, 59])
def test_equals_a_naive_trial_on_any_kept_set(size: int, attention: str) -> None:
    model = tiny_llama()
    model.set_attn_implementation(attention)
    found = capture(model)
    kept = random_kept(2, size)
    trial = naive_trial(model, PROMPT, found.tokens[:-1].tolist(), kept)
    assert_equal_trials(replay(model, found, kept), trial)


def test_equals_a_naive_trial_after_a_single_token() -> None:
    model = tiny_llama()
    found = capture(model, decode_tokens=1)
    kept = random_kept(2)
    trial = naive_trial(model, PROMPT, found.tokens[:-1].tolist(), kept)
    assert_equal_trials(replay(model, found, kept), trial)


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_qwen3, tiny_gemma3])
def test_keeping_everything_changes_nothing(build: Callable[..., PreTrainedModel]) -> None:
    model = build()
    found = capture(model)
    result = replay(model, found, torch.arange(LENGTH).expand(len(found.layers), 2, -1))
    ones = torch.ones_like(result.cosine)
    torch.testing.assert_close(result.cosine, ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.cosine_padded, ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.attention_output, ones, atol=1e-5, rtol=0)
    assert float(result.kl.abs().max()) < 1e-5
    assert bool((result.agreement == 1).all())
    assert float(result.loss.mean()) == pytest.approx(found.full_loss, abs=1e-5)


def test_bfloat16_keeping_everything_changes_next_to_nothing() -> None:
    model = tiny_llama().bfloat16()
    found = capture(model)
    result = replay(model, found, torch.arange(LENGTH).expand(2, 2, -1))
    assert float(result.cosine.min()) > 0.99
    assert float(result.kl.max()) < 0.05


def masked_run(
    model: PreTrainedModel, found: Capture, kept: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The stock hybrid model, token by token, its full layer's mask hiding what is not kept.

    Returns the full run's and the hidden run's log-probabilities, and the cosines of the full layer.
    """
    model.set_attn_implementation("eager")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(PROMPT, **{CACHE: cache})
    hidden = torch.full((1, 4, 1, LENGTH), -torch.inf)
    for head in range(4):
        hidden[0, head, 0, kept[0, head // 2]] = 0
    sliding_window = model.config.sliding_window
    full, compressed, cosines = [], [], []
    for step, token in enumerate(found.tokens[:-1]):
        mask = torch.nn.functional.pad(hidden, (0, step + 1))
        seen = min(LENGTH + step + 1, sliding_window)
        masks = {"full_attention": mask, "sliding_attention": torch.zeros(1, 1, 1, seen)}
        runs = [
            model(token.view(1, 1), attention_mask=given, output_attentions=True, **{CACHE: cache})
            for cache, given in zip(caches, (None, masks), strict=True)
        ]
        full.append(runs[0].logits[0, -1].log_softmax(-1))
        compressed.append(runs[1].logits[0, -1].log_softmax(-1))
        layer = next(iter(found.layers))
        weights = [run.attentions[layer][0, :, 0] for run in runs]
        cosines.append(torch.cosine_similarity(weights[0] * (mask[0, :, 0] == 0), weights[1], dim=-1))
    return full, compressed, cosines


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention"]},
        # The prompt fits in the window, and does so no longer while decoding.
        {"sliding_window": 66},
        {"sliding_window": 128},
        {"sliding_window": 8},
    ],
    ids=["sliding-first", "full-first", "crossed", "wide", "narrow"],
)
@torch.no_grad()
def test_equals_a_naive_run_of_a_hybrid_model(options: dict[str, object]) -> None:
    model = tiny_gemma3(**options)
    found = capture(model)
    kept = random_kept(1)
    result = replay(model, found, kept)
    full, compressed, cosines = masked_run(model, found, kept)
    for step, (ours, theirs) in enumerate(zip(compressed, full, strict=True)):
        kl = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum")
        torch.testing.assert_close(result.kl[step], kl, atol=1e-4, rtol=0)
        torch.testing.assert_close(result.loss[step], -ours[found.tokens[step + 1]], atol=1e-4, rtol=0)
        assert bool(result.agreement[step]) == bool(ours.argmax() == theirs.argmax())
        torch.testing.assert_close(result.cosine[0, :, step], cosines[step], atol=1e-4, rtol=0)


def test_leaves_model_and_capture_alone() -> None:
    model = tiny_gemma3()
    found = capture(model, accumulate=True)
    state, untouched = model_state(model), copy.deepcopy(found)
    first, second = (replay(model, found, random_kept(1)) for _ in range(2))
    assert model_state(model) == state
    for name in LayerCapture.__dataclass_fields__:
        assert torch.equal(getattr(found.layers[1], name), getattr(untouched.layers[1], name))
    assert all(torch.equal(a, b) for a, b in zip(found.sliding[0], untouched.sliding[0], strict=True))
    assert all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(Replay))


def test_attention_that_is_not_finite_names_its_layer() -> None:
    model = tiny_llama(num_hidden_layers=3)
    found = capture(model)
    with torch.no_grad():
        decoder_of(model).layers[1].self_attn.k_proj.weight[0, 0] = torch.nan  # type: ignore[index,union-attr]
    with pytest.raises(CompressionError, match="compressed attention of layer 1 is not finite"):
        replay(model, found, random_kept(3))


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_llama()
    found = capture(model)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(CompressionError, match="logits over the compressed cache are not finite"):
        replay(model, found, random_kept(2))


def test_full_attention_that_lies_wholly_on_evicted_tokens_is_no_division_by_zero() -> None:
    model = tiny_llama()
    found = capture(model)
    # As if the whole distribution had been on one far position: nothing of it underflows past zero.
    layers = {
        i: replace(layer, logsumexp=torch.full_like(layer.logsumexp, 1e4))
        for i, layer in found.layers.items()
    }
    result = replay(model, replace(found, layers=layers), random_kept(2))
    assert bool((result.cosine == 0).all())
    assert bool((result.cosine_padded == 0).all())


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_qwen2, tiny_gemma3])
def test_rows_are_replayed_together_as_one_by_one(build: Callable[..., PreTrainedModel]) -> None:
    model = build()
    found = capture(model)
    kept = torch.stack([random_kept(len(found.layers), seed=seed) for seed in range(4)])
    for row, result in zip(kept, replay_all(model, found, kept), strict=True):
        assert isinstance(result, Replay)
        alone = replay(model, found, row)
        for field in fields(Replay):
            ours, theirs = getattr(result, field.name), getattr(alone, field.name)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    model = tiny_llama()
    found = capture(model)
    keys = found.layers[1].keys.clone()
    keys[0, 7] = torch.nan
    broken = replace(found, layers={**found.layers, 1: replace(found.layers[1], keys=keys)})
    others = torch.tensor([i for i in range(LENGTH) if i != 7])
    kept = torch.stack([others[:SIZE].expand(2, 2, -1), others[-SIZE:].expand(2, 2, -1)])
    bad = torch.arange(SIZE).expand(1, 2, 2, -1)
    first, error, last = replay_all(model, broken, torch.cat([kept[:1], bad, kept[1:]]))
    assert str(error) == "The compressed attention of layer 1 is not finite."
    for result, row in ((first, kept[0]), (last, kept[1])):
        assert isinstance(result, Replay)
        torch.testing.assert_close(result.kl, replay(model, found, row).kl, rtol=1e-4, atol=1e-6)
