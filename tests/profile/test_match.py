import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from clusterprof import Profile
from clusterprof.errors import ProfileError
from clusterprof.profile import ModelIdentity
from tests.profile.examples import profile

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def llama(name: str = "tiny/Llama-v1", **changes: Any) -> LlamaForCausalLM:
    config = LlamaConfig(**SHAPE | changes)
    config.name_or_path = name
    return LlamaForCausalLM(config)


def words(*vocabulary: str, template: str | None = None) -> PreTrainedTokenizerFast:
    ids = {word: index for index, word in enumerate(["<unk>", *vocabulary])}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(ids, unk_token="<unk>")), unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tuned_on(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Profile:
    return profile().model_copy(update={"model": ModelIdentity.of(model, tokenizer)})


def test_fits_its_own_model_also_after_a_round_trip(tmp_path: Path) -> None:
    tuned = tuned_on(llama(), words("a", template="{{ messages }}"))
    tuned.save(tmp_path / "p.json")
    read = Profile.load(tmp_path / "p.json")
    assert read == tuned
    assert read.mismatches(llama(), words("a", template="{{ messages }}")) == []
    read.check(llama())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 3}, ["num_hidden_layers: profile 2, model 3"]),
        ({"num_attention_heads": 8}, ["num_attention_heads: profile 4, model 8"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads: profile 2, model 4"]),
        ({"head_dim": 16}, ["head_dim: profile 8, model 16"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            ["rope.rope_theta: profile 10000.0, model 500000.0"],
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            ["rope.factor: profile null, model 4.0", "rope.rope_type: profile default, model linear"],
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            ["num_attention_heads: profile 4, model 8", "num_key_value_heads: profile 2, model 8"],
        ),
    ],
)
def test_other_shape_is_refused_field_by_field(changes: dict[str, Any], expected: list[str]) -> None:
    tuned, other = tuned_on(llama(), words("a")), llama(**changes)
    assert tuned.mismatches(other) == expected
    with pytest.raises(ProfileError) as caught:
        tuned.check(other)
    message = str(caught.value)
    assert all(difference in message for difference in expected)
    # Not everything that checks a profile can be forced.
    assert message.endswith("); tune one for this model.")
    assert "\n" not in message
    with pytest.raises(ProfileError, match=r"tune one for this model, or do as you like\.$"):
        tuned.check(other, otherwise=", or do as you like")


def test_other_architecture_is_refused() -> None:
    config = MistralConfig(**SHAPE)
    config.name_or_path = "tiny/Llama-v1"
    found = tuned_on(llama(), words("a")).mismatches(MistralForCausalLM(config))
    assert found == ["architecture: profile LlamaForCausalLM, model MistralForCausalLM"]


def test_other_tokenizer_and_template_are_refused_when_given() -> None:
    model = llama()
    tuned = tuned_on(model, words("a", "b", template="{{ messages }}"))
    tuned.check(model)
    [vocabulary] = tuned.mismatches(model, words("b", "a", template="{{ messages }}"))
    assert vocabulary.startswith(f"tokenizer_hash: profile {tuned.model.tokenizer_hash[:12]}, model ")
    [template] = tuned.mismatches(model, words("a", "b"))
    assert template.startswith("chat_template_hash: profile ")
    assert template.endswith(", model null")
    with pytest.raises(ProfileError, match="tokenizer_hash"):
        tuned.check(model, words("c", template="{{ messages }}"))


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("tiny/Llama-v1", True),
        ("TINY/llama-V1", True),
        ("/data/models/Llama-v1/", True),
        ("C:\\models\\Llama-v1", True),
        ("/home/me/hub/models--tiny--Llama-v1/snapshots/0123abcd", True),
        ("tiny/Llama-v2", False),
        ("/home/me/hub/models--tiny--Llama-v2/snapshots/0123abcd", False),
        ("tiny/Llama-v1-chat", False),
        ("", False),
    ],
)
def test_a_copy_in_a_folder_fits_and_another_model_of_the_same_shape_does_not(name: str, fits: bool) -> None:
    found = tuned_on(llama(), words("a")).mismatches(llama(name))
    assert found == ([] if fits else [f"id: profile tiny/Llama-v1, model {name}"])


def test_revision_is_recorded_and_not_compared() -> None:
    model = llama()
    model.config._commit_hash = "0123abcd"
    tuned = tuned_on(model, words("a"))
    assert tuned.model.revision == "0123abcd"
    assert tuned.mismatches(llama()) == []


def test_long_values_are_shortened() -> None:
    def scaled(factor: float) -> LlamaForCausalLM:
        return llama(
            hidden_size=512,
            head_dim=128,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 64,
                "long_factor": [factor * math.pi] * 64,
                "factor": 2.0,
                "original_max_position_embeddings": 1024,
            },
        )

    [difference] = tuned_on(scaled(1), words("a")).mismatches(scaled(2))
    assert difference.startswith("rope.long_factor: profile [3.14159")
    assert len(difference) < 450


def test_a_hostile_profile_cannot_write_to_the_terminal() -> None:
    tuned = tuned_on(llama(), words("a"))
    hostile = tuned.model.model_copy(update={"rope": {"\x1b[31m\n": "\x1b]0;x\n", **tuned.model.rope}})
    found = tuned.model_copy(update={"model": hostile}).mismatches(llama())
    assert found == ["rope.\\x1b[31m\\n: profile \\x1b]0;x\\n, model null"]
