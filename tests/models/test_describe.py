import hashlib
import json
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
)

from clusterprof.models import chat_template_hash, describe_model, describe_tokenizer
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen2, tiny_qwen3, tiny_tokenizer


def test_a_model_is_described_by_its_config() -> None:
    info = describe_model(tiny_llama(num_hidden_layers=3, num_key_value_heads=1))
    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_hidden_layers, info.num_attention_heads, info.num_key_value_heads) == (3, 4, 1)
    assert (info.head_dim, info.max_position_embeddings) == (16, 512)
    assert info.rope == {"rope_theta": 10000.0, "rope_type": "default"}
    assert info.revision is None


def test_head_dim_is_the_configs_own_or_follows_from_the_width() -> None:
    assert describe_model(tiny_qwen3(head_dim=32)).head_dim == 32
    assert describe_model(tiny_qwen2()).head_dim == 64 // 4


def test_rope_settings_tell_scaled_models_apart_and_are_json() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    rope = describe_model(tiny_llama(rope_parameters=scaled)).rope
    assert rope == scaled
    assert rope != describe_model(tiny_llama()).rope
    for model in (tiny_llama(), tiny_gemma3()):
        rope = describe_model(model).rope
        assert json.loads(json.dumps(rope)) == rope
        assert list(rope) == sorted(rope)


def test_every_kind_of_layer_shows_its_rope() -> None:
    assert set(describe_model(tiny_gemma3()).rope) == {"sliding_attention", "full_attention"}


def test_a_model_without_rope_or_grouped_heads() -> None:
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=10, bos_token_id=1, eos_token_id=1
    )
    info = describe_model(GPT2LMHeadModel(config))
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (2, 2, 4)
    assert info.rope == {}
    assert info.max_position_embeddings == 16


def test_a_multimodal_model_is_described_by_its_text_decoder() -> None:
    text = tiny_gemma3().config.to_dict()
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=3,
        eoi_token_index=4,
    )
    info = describe_model(Gemma3ForConditionalGeneration(config))
    assert info.architecture == "Gemma3ForConditionalGeneration"
    assert (info.num_hidden_layers, info.num_key_value_heads, info.head_dim) == (2, 2, 16)


def test_a_model_from_a_folder_is_known_by_its_name(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    info = describe_model(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert info.id == str(tmp_path)
    assert info.revision is None


def test_the_tokenizer_hash_is_that_of_vocabulary_and_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    known = {
        "vocabulary": tokenizer.get_vocab(),
        "special": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    expected = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    assert describe_tokenizer(tokenizer) == describe_tokenizer(tiny_tokenizer()) == expected


def test_the_tokenizer_hash_ignores_padding_and_nothing_else() -> None:
    plain = describe_tokenizer(tiny_tokenizer())

    padded = tiny_tokenizer()
    padded.pad_token = padded.eos_token
    assert describe_tokenizer(padded) == plain

    other_end = tiny_tokenizer()
    other_end.eos_token = "a"
    assert describe_tokenizer(other_end) != plain

    larger = tiny_tokenizer()
    larger.add_tokens(["new"])
    assert describe_tokenizer(larger) != plain


def test_the_tokenizer_hash_survives_saving(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert describe_tokenizer(type(tokenizer).from_pretrained(tmp_path)) == describe_tokenizer(tokenizer)


@pytest.mark.parametrize(
    "template", ["{{ messages }}", {"default": "{{ messages }}", "tools": "{{ tools }}"}]
)
def test_the_chat_template_hash_tells_templates_apart(template: str | dict[str, str]) -> None:
    tokenizer = tiny_tokenizer()
    assert chat_template_hash(tokenizer) is None
    tokenizer.chat_template = template
    first = chat_template_hash(tokenizer)
    assert first is not None
    assert first == chat_template_hash(tokenizer)
    tokenizer.chat_template = "{{ other }}"
    assert chat_template_hash(tokenizer) != first
