"""A layer with an override is compressed by its own method, the others by the profile's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof import Profile, compress
from clusterprof.errors import CompressionError
from clusterprof.methods import H2O, ClusterAttn, MethodConfig, Observation, SnapKV
from clusterprof.profile import Compression, LayerOverride
from clusterprof.runtime import StaticCompressedCache
from clusterprof.runtime.selection import kept_by_layer
from tests.profile.examples import document
from tests.profiling.subjects import capture
from tests.runtime.lockstep import SMALL, Lockstep, new_tokens, prompts
from tests.runtime.models import convert
from tests.runtime.subjects import TINY, forward, generate, random_stream
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT = random_stream()[None, :60]
llama = partial(tiny_llama, num_hidden_layers=3, eos_token_id=None)
# Layers of both kinds, of which 1 and 2 have full attention.
gemma = partial(
    tiny_gemma3,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    eos_token_id=None,
)
OTHER = ClusterAttn(num_block=5, theta=0.05, gap_pool=3)


def overridden(
    layers: tuple[int, ...], method: MethodConfig = OTHER, compression: Compression = TINY
) -> Compression:
    return compression.model_copy(update={"overrides": (LayerOverride(layers=layers, method=method),)})


def kept_by(model: PreTrainedModel, compression: Compression, kept_sets: list[Tensor]) -> list[Tensor]:
    """What each full-attention layer keeps of a prompt."""
    kept_sets.clear()
    with compress(model, compression):
        forward(model, PROMPT)
    return list(kept_sets)


@pytest.mark.parametrize(
    ("build", "full", "layers"),
    [(llama, (0, 1, 2), (1,)), (llama, (0, 1, 2), (0, 2)), (gemma, (1, 2), (2,))],
)
def test_each_layer_keeps_what_its_own_method_chooses(
    build: Callable[..., PreTrainedModel],
    full: tuple[int, ...],
    layers: tuple[int, ...],
    kept_sets: list[Tensor],
) -> None:
    model = build()
    # A prefill sees the whole prompt in every layer, so what one keeps does not depend on the others.
    plain = kept_by(model, TINY, kept_sets)
    other = kept_by(model, TINY.uniform(OTHER), kept_sets)
    mixed = kept_by(model, overridden(layers), kept_sets)
    for position, layer in enumerate(full):
        assert torch.equal(mixed[position], (other if layer in layers else plain)[position])
        assert not torch.equal(other[position], plain[position])
    found = capture(model, PROMPT)
    captured = kept_by_layer(overridden(layers), found.observation, found.layers)
    assert torch.equal(captured, torch.cat(mixed))


@pytest.mark.parametrize(
    ("build", "layers", "options"),
    [
        (llama, (1,), {"decode_budget": 12}),
        (llama, (1,), {"later_turns": "compress"}),
        (gemma, (2,), {}),
    ],
)
def test_a_conversation_of_a_batch_is_that_of_the_slow_reference(
    build: Callable[..., PreTrainedModel], layers: tuple[int, ...], options: dict[str, Any]
) -> None:
    model = build()
    convert(model, torch.float64)
    method = ClusterAttn(num_block=4, theta=0.001, gap_pool=3)
    run = Lockstep(model, overridden(layers, method, SMALL), prompts(36, 25), **options)
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 13))
        run.turn(new_tokens(2, 4, seed=2))


def test_every_layer_evicts_by_its_own_method_while_decoding() -> None:
    model = llama()
    convert(model, torch.float64)
    methods = [H2O(recent_share=share, evict_while_decoding=True) for share in (0.5, 0.1)]
    run = Lockstep(model, overridden((0, 2), methods[1], SMALL.uniform(methods[0])), prompts(26, 22))
    with run.compressing():
        run.prompt()
        run.decode(new_tokens(2, 6))
    assert run.rows[0].slots[0] != run.rows[0].slots[1]


def test_a_static_cache_takes_overrides() -> None:
    model, compression = llama(), overridden((1,))
    with compress(model, compression):
        expected = generate(model, PROMPT, 8)
        static = StaticCompressedCache(model.config, compression, max_new_tokens=8)
        found = generate(model, PROMPT, 8, cache=static)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    ("build", "layer", "full"), [(llama, 3, "0, 1, 2"), (gemma, 0, "1, 2"), (gemma, 9, "1, 2")]
)
def test_a_layer_that_cannot_have_an_override_is_refused(
    build: Callable[..., PreTrainedModel], layer: int, full: str
) -> None:
    model, message = (
        build(),
        f"layer {layer}, which is no full-attention layer of this model \\(they are {full}\\)",
    )
    with pytest.raises(CompressionError, match=message), compress(model, overridden((layer,))):
        pytest.fail("entered")
    found = capture(model, PROMPT)
    with pytest.raises(CompressionError, match=message):
        kept_by_layer(overridden((layer,)), found.observation, found.layers)


def test_a_profile_brings_its_overrides() -> None:
    written = document()
    written["model"]["num_hidden_layers"] = 8
    values = {"name": "clusterattn", "num_block": 1, "theta": 0.1, "gap_pool": 3, "importance": "max"}
    written["compression"]["overrides"] = [{"layers": [7], "method": values}]
    with (
        pytest.raises(CompressionError, match="layer 7"),
        compress(llama(), Profile.model_validate(written, strict=False), force=True),
    ):
        pytest.fail("entered")


def test_rows_of_an_observation_are_those_of_all_its_parts() -> None:
    whole = Observation(
        torch.rand(4, 2, 9), 3, torch.rand(4, 2, 9), torch.rand(4, 9) > 0.5, torch.rand(4, 2, 9)
    )
    part = whole.of(slice(1, 3))
    assert part.window == 3
    for name in ("importance", "accumulated", "word_starts", "peak"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[1:3])
    alone = Observation(whole.importance, 3).of(slice(0, 1))
    assert (alone.accumulated, alone.word_starts, alone.peak) == (None, None, None)


def test_another_method_is_the_same_in_all_layers() -> None:
    assert overridden((1,)).uniform(SnapKV()) == Compression(
        size=TINY.size, window=TINY.window, method=SnapKV()
    )
