"""Models that accelerate places, on a device or on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.runtime import cache_bytes
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.transformers_names import CACHE
from tests.runtime.subjects import (
    TINY,
    forward,
    generate,
    model_state,
    pad_left,
    random_stream,
    stored_lengths,
)
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT = random_stream()[None, :60]
BUILDS = {"llama": tiny_llama, "gemma3": tiny_gemma3}


def placed(name: str, folder: Path, device_map: Any) -> PreTrainedModel:
    BUILDS[name](eos_token_id=None).save_pretrained(folder / "model")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=device_map, offload_folder=folder / "offload", dtype=torch.float32
    )
    return model


# Every module of its own, one layer and the head on disk.
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize("device_map", ["auto", ON_DISK], ids=["auto", "disk"])
@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_a_placed_model_says_what_a_plain_one_says(
    name: str, device_map: Any, tmp_path: Path, kept_sets: list[Tensor]
) -> None:
    model = placed(name, tmp_path, device_map)
    plain: Any = BUILDS[name](eos_token_id=None).to(model.device)  # type: ignore[arg-type]
    assert any(parameter.is_meta for parameter in model.parameters()) == (device_map == ON_DISK)
    batch, mask = (tensor.to(model.device) for tensor in pad_left([PROMPT, PROMPT[:, 10:40]]))
    longer = torch.nn.functional.pad(mask, (0, 10), value=1)
    results, before = [], model_state(model)
    for each in (plain, model):
        cache: Any = DynamicCache(config=each.config)
        with compress(each, TINY):
            text = generate(each, batch, 10, cache=cache, attention_mask=mask).sequences
        text = generate(each, text, 5, cache=cache, attention_mask=longer).sequences
        results.append((text, cache.get_seq_length(), cache_bytes(cache)))
    half = len(kept_sets) // 2
    assert half > 0
    assert all(torch.equal(a, b) for a, b in zip(kept_sets[:half], kept_sets[half:], strict=True))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert model_state(model) == before


@torch.no_grad()
def test_hooks_of_accelerate_stay_in_place(tmp_path: Path) -> None:
    model = placed("llama", tmp_path, ON_DISK)
    hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert hooks
    with compress(model, TINY):
        # The decoder by itself, its input by position.
        output = decoder_of(model)(PROMPT, torch.ones_like(PROMPT))
        assert stored_lengths(output[CACHE]) == [24, 24]
        forward(model, PROMPT)
    assert hooks == {
        name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")
    }
