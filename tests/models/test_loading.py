import json
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from clusterprof.errors import ModelError
from clusterprof.models import describe_model, load_model
from tests.tiny import (
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3,
    tiny_tokenizer,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in bfloat16 and a tokenizer without a padding token."""
    path = tmp_path / "tiny"
    tiny_llama(pad_token_id=None).bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody listens there, so it refuses at once; the client on its own would try again for 23 s.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_folder_loads_ready_to_generate(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    assert not model.training
    assert model.dtype == torch.float32
    assert model.device == torch.device("cuda" if torch.cuda.is_available() else "cpu", model.device.index)
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "</s>"
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2
    assert describe_model(model).id == str(folder)
    expected = tiny_llama(pad_token_id=None).bfloat16().state_dict()
    assert all(torch.equal(value, expected[name].float()) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", [tiny_mistral, tiny_qwen2, tiny_qwen3, tiny_gemma3, tiny_phi3])
def test_every_architecture_loads(tmp_path: Path, build: Callable[[], torch.nn.Module]) -> None:
    original = build()
    original.save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(str(tmp_path), device="cpu")
    assert type(model) is type(original)
    prompt = torch.arange(3, 50)[None]
    assert torch.allclose(model(prompt).logits, original(prompt).logits, atol=1e-5)


def test_dtype_and_attention_are_what_was_asked_for(folder: Path) -> None:
    model, _ = load_model(str(folder), dtype="bfloat16", attn="eager", device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_loading_shows_nothing_and_changes_nothing_outside(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = list(warnings.filters), logging.get_verbosity(), torch.get_default_dtype()
    load_model(str(folder))
    assert capfd.readouterr() == ("", "")
    assert before == (list(warnings.filters), logging.get_verbosity(), torch.get_default_dtype())
    assert logging.set_tqdm_hook(None) is None


@pytest.mark.parametrize("option", ["dtype", "device", "attn"])
def test_options_are_checked_before_anything_is_fetched(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterprof.models.loading.find_model", lambda *args: pytest.fail("fetched"))
    with pytest.raises(ModelError, match=f"{option} is 'nonsense'; it must be"):
        load_model("builtin", **{option: "nonsense"})  # type: ignore[arg-type]


def test_flash_attention_on_a_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="flash_attention_2 needs a CUDA device"):
        load_model(str(folder), device="cpu", attn="flash_attention_2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "is an encoder-decoder model",
        ),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
        ({"model_type": "vit", "architectures": None}, r"is not a causal language model \(vit\)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not a causal language model"),
        ({"model_type": "of-tomorrow"}, "cannot be loaded: .*of-tomorrow"),
    ],
)
def test_other_kinds_of_models_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_code_of_the_model_is_not_run_unasked(folder: Path) -> None:
    mark = folder / "it_ran"
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map)
    with pytest.raises(
        ModelError, match=r"Python code of its own, which is not run unasked; .* --trust-remote-code"
    ):
        load_model(str(folder))
    assert not mark.exists()
    model, _ = load_model(str(folder), trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert mark.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{not json"),
        ("config.json", b"[]"),
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", None),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 64),
    ],
)
def test_a_broken_folder_is_one_sentence(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(
        ModelError, match=r"cannot be loaded: .*; check the files, or use --model builtin"
    ) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_weights_that_lack_a_tensor_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lack 1 tensors of LlamaForCausalLM, model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_model(str(folder))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_out_of_memory_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(ModelError, match="does not fit into memory; use a smaller model"):
        load_model(str(folder))


@pytest.mark.usefixtures("no_hub")
def test_no_hub_is_one_sentence_in_little_time() -> None:
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model("mistralai/Mistral-7B-Instruct-v0.2")
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert "The hub cannot be reached" in message
    assert "name a folder that holds the model, or use --model builtin" in message
    assert "\n" not in message


@pytest.mark.usefixtures("no_hub")
def test_what_is_in_the_hubs_cache_loads_without_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache = tmp_path / "hub"
    repo = hub_cache / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repo / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub_cache))
    model, _ = load_model("org/tiny")
    info = describe_model(model)
    assert (info.id, info.revision) == ("org/tiny", COMMIT)


def test_a_gated_model_names_the_way_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(
        ModelError, match=r"is gated: accept its terms at .* `hf auth login`, or use --model builtin"
    ):
        load_model(str(folder))
