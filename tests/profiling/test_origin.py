from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.profiling.origin import Origin
from tests.tiny import tiny_gemma3, tiny_llama, tiny_tokenizer


def origin(
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    decode_tokens: int = 4,
) -> Origin:
    return Origin.of(model or tiny_llama(), tokenizer or tiny_tokenizer(), decode_tokens=decode_tokens)


def differing(found: Origin, base: Origin) -> set[str]:
    return {part for part, value in asdict(found).items() if value != getattr(base, part)}


def test_equal_models_have_one_fingerprint_under_any_name() -> None:
    first, second = tiny_llama(), tiny_llama()
    second.config.name_or_path = second.name_or_path = "/somewhere/else"
    second.config._commit_hash = "1234"
    assert differing(origin(second), origin(first)) == {"model", "revision"}
    assert (origin(second).model, origin(second).revision) == ("/somewhere/else", "1234")
    assert origin(first).fingerprint == origin(second).fingerprint
    assert len(origin(first).fingerprint) == 64


def test_short_parts_can_be_read() -> None:
    found = origin(tiny_llama(eos_token_id=[9, 7]).bfloat16(), decode_tokens=12)
    assert (found.model, found.revision, found.end_tokens, found.decode_tokens) == (
        "not named",
        "not known",
        "7, 9",
        12,
    )
    assert (found.dtype, found.device, found.attention) == ("bfloat16", "cpu", "sdpa")
    assert found.torch == torch.__version__


def test_every_part_is_in_the_fingerprint_but_what_it_is_called() -> None:
    base = origin()
    for part, value in asdict(base).items():
        change: dict[str, Any] = {part: value + 1 if isinstance(value, int) else f"{value}x"}
        other = replace(base, **change)
        assert (other.fingerprint == base.fingerprint) == (part in {"model", "revision"})


def test_all_that_a_capture_depends_on_is_in_a_part_of_its_own() -> None:
    retrained = tiny_llama()
    with torch.no_grad():
        retrained.lm_head.weight += 1e-3
    one_weight = tiny_llama()
    with torch.no_grad():
        one_weight.lm_head.weight[5, 7] += 0.1
    quantized = tiny_llama()
    quantized.register_buffer("packed", torch.ones(3, dtype=torch.int32))
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    cases = [
        (origin(retrained), {"weights"}),
        (origin(one_weight), {"weights"}),
        (origin(quantized), {"weights"}),
        (origin(decode_tokens=5), {"decode_tokens"}),
        (origin(tiny_llama().bfloat16()), {"weights", "dtype"}),
        (origin(eager), {"attention"}),
        (origin(tiny_llama(num_hidden_layers=1)), {"weights", "model_settings"}),
        # Its frequencies are a buffer.
        (origin(tiny_llama(rope_parameters=rope)), {"weights", "model_settings"}),
        # The weights are the same in these.
        (origin(tiny_llama(eos_token_id=5)), {"model_settings", "end_tokens"}),
        (origin(tiny_llama(rms_norm_eps=1e-3)), {"model_settings"}),
    ]
    base = origin()
    for found, parts in cases:
        # A dtype is a setting of some models, too.
        assert parts <= differing(found, base) <= parts | {"model_settings"}
    assert len({base.fingerprint, *(found.fingerprint for found, _ in cases)}) == 1 + len(cases)


def test_the_sliding_window_is_a_setting() -> None:
    assert differing(origin(tiny_gemma3(sliding_window=16)), origin(tiny_gemma3())) == {"model_settings"}


def test_tokenizers_that_begin_words_elsewhere_are_told_apart() -> None:
    respelled = tiny_tokenizer()
    # The letter e is a token that stands alone now, under the same number.
    respelled.add_special_tokens({"additional_special_tokens": ["e"]})
    assert len(respelled) == len(tiny_tokenizer())
    assert differing(origin(tokenizer=respelled), origin()) == {"vocabulary"}


def test_an_end_token_of_the_tokenizer_alone_counts() -> None:
    # The generation settings name none, so the tokenizer's own ends an answer.
    model = tiny_llama(eos_token_id=None)
    other = tiny_tokenizer()
    other.eos_token = ">"
    found = origin(model, other)
    assert found.end_tokens == str(other.convert_tokens_to_ids(">"))
    assert "end_tokens" in differing(found, origin(model))
