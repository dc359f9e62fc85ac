"""Models whose cache cannot be compressed: refused in a sentence, before they run wherever that can be known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from clusterprof import compress
from clusterprof.errors import UnsupportedModelError
from tests.runtime.subjects import TINY, forward, generate, model_state, random_stream
from tests.tiny import tiny_llama, tiny_mistral, tiny_phi3

PROMPT = random_stream()[None, :60]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MAMBA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
}
BART_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
HYBRID = ["linear_attention", "full_attention"]


def build(model: str, config: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    """A builder of a tiny model, by the names of its classes."""

    def builder() -> PreTrainedModel:
        built: PreTrainedModel = getattr(transformers, model)(getattr(transformers, config)(**settings))
        built.train(False)
        return built

    return builder


LINEAR = "in which some layers have linear attention cannot be compressed"
LATENT_ATTENTION = "has multi-head latent attention"
ENCODER_DECODER = "is an encoder-decoder"
INTERFACE = "does not run every layer's attention through transformers' attention interface"
SLIDING = "Every layer of this model has sliding-window attention"

KNOWN_AT_ONCE = {
    "mamba2": (
        build("Mamba2ForCausalLM", "Mamba2Config", **MAMBA, num_heads=8, head_dim=8, n_groups=1),
        LINEAR,
    ),
    "falcon-mamba": (build("FalconMambaForCausalLM", "FalconMambaConfig", **MAMBA), LINEAR),
    "jamba": (
        build("JambaForCausalLM", "JambaConfig", **SIZES, attn_layer_period=2, attn_layer_offset=1),
        LINEAR,
    ),
    "lfm2": (build("Lfm2ForCausalLM", "Lfm2Config", **SIZES, layer_types=["conv", "full_attention"]), LINEAR),
    "qwen3-next": (
        build("Qwen3NextForCausalLM", "Qwen3NextConfig", **SIZES, layer_types=HYBRID, num_experts=2),
        LINEAR,
    ),
    "deepseek-v2": (build("DeepseekV2ForCausalLM", "DeepseekV2Config", **SIZES | LATENT), LATENT_ATTENTION),
    "deepseek-v3": (build("DeepseekV3ForCausalLM", "DeepseekV3Config", **SIZES | LATENT), LATENT_ATTENTION),
    # Its latent is as wide as its heads here: without a check this one ran, and was wrong.
    "glm4-moe-lite": (
        build("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", **SIZES | LATENT),
        LATENT_ATTENTION,
    ),
    "t5": (build("T5ForConditionalGeneration", "T5Config", **T5_SIZES), ENCODER_DECODER),
    "bart": (build("BartForConditionalGeneration", "BartConfig", **BART_SIZES), ENCODER_DECODER),
    # Its decoder uses the attention interface.
    "t5gemma": (
        build(
            "T5GemmaForConditionalGeneration", "T5GemmaConfig", encoder=SIZES, decoder=SIZES, vocab_size=128
        ),
        ENCODER_DECODER,
    ),
    "bart-decoder": (build("BartForCausalLM", "BartConfig", **BART_SIZES), INTERFACE),
    "bloom": (
        build("BloomForCausalLM", "BloomConfig", vocab_size=128, hidden_size=32, n_layer=1, n_head=4),
        INTERFACE,
    ),
    # Its later layers use the keys and values of earlier ones.
    "gemma3n": (
        build(
            "Gemma3nForCausalLM",
            "Gemma3nTextConfig",
            **SIZES | {"num_hidden_layers": 4},
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            activation_sparsity_pattern=[0.0] * 4,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
        ),
        "some layers share another layer's cache cannot be compressed",
    ),
    "mistral-v0.1": (lambda: tiny_mistral(sliding_window=16), SLIDING),
    "phi3-mini-4k": (lambda: tiny_phi3(sliding_window=16), SLIDING),
}


@pytest.mark.parametrize(("builder", "reason"), KNOWN_AT_ONCE.values(), ids=KNOWN_AT_ONCE)
def test_is_refused_before_it_runs(builder: Callable[[], PreTrainedModel], reason: str) -> None:
    model = builder()
    with pytest.raises(UnsupportedModelError, match=reason) as caught, compress(model, TINY):
        pytest.fail("entered")
    assert "\n" not in str(caught.value)
    assert not model._forward_pre_hooks
    assert not model.config._attn_implementation.startswith("clusterprof")


KNOWN_IN_THE_FORWARD = {
    "gemma2": (
        build("Gemma2ForCausalLM", "Gemma2Config", **SIZES),
        r"Gemma2Attention changes its attention scores \(softcap\)",
    ),
    "gpt-oss": (
        build(
            "GptOssForCausalLM",
            "GptOssConfig",
            **SIZES,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_scaling=None,
        ),
        r"GptOssAttention changes its attention scores \(s_aux\)",
    ),
    "doge": (
        build("DogeForCausalLM", "DogeConfig", **SIZES),
        r"DogeAttention changes its attention scores \(a mask for each head\)",
    ),
    # It claims the interface; compressing nothing without a word would be the worst answer.
    "nemotron": (build("NemotronForCausalLM", "NemotronConfig", **SIZES), f"NemotronModel {INTERFACE}"),
    # It attends twice in a layer.
    "diffllama": (build("DiffLlamaForCausalLM", "DiffLlamaConfig", **SIZES), f"DiffLlamaModel {INTERFACE}"),
}


@pytest.mark.parametrize(("builder", "reason"), KNOWN_IN_THE_FORWARD.values(), ids=KNOWN_IN_THE_FORWARD)
def test_is_refused_in_the_first_forward(builder: Callable[[], PreTrainedModel], reason: str) -> None:
    model = builder()
    model.set_attn_implementation("eager")
    before = model_state(model)
    with pytest.raises(UnsupportedModelError, match=reason) as caught, compress(model, TINY):
        generate(model, PROMPT, 1)
    assert "\n" not in str(caught.value)
    assert model_state(model) == before
    # Not in the context, it runs.
    assert forward(model, PROMPT).logits.isfinite().all()


def test_a_mask_for_each_head_is_refused() -> None:
    model = tiny_llama()
    mask = torch.zeros(1, 4, 60, 60)
    with pytest.raises(UnsupportedModelError, match="a mask for each head"), compress(model, TINY):
        forward(model, PROMPT, attention_mask=mask)
