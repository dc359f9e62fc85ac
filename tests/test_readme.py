"""What the README shows works as it stands there, and the profiles beside it are valid."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof import Profile, compress
from tests.runtime.subjects import TINY, random_stream
from tests.tiny import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parent.parent


def blocks(page: Path) -> list[str]:
    """The Python that a page shows."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.real_model
def test_the_python_of_the_readme(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(blocks(ROOT / "README.md"))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    cache = names["cache"]
    profile = names["profile"]
    assert isinstance(profile, Profile)
    prompt_tokens = 1_700
    assert cache.get_seq_length() > prompt_tokens  # type: ignore[attr-defined]
    assert cache.layers[0].keys.shape[2] < profile.compression.size + 200  # type: ignore[attr-defined]


def test_the_python_of_the_runtime_page(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default backend has a test of its own; it takes long.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = tiny_llama(eos_token_id=None)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<s>{{ messages[0].content }}</s>"
    names = {
        "model": model,
        "profile": TINY,
        "compress": compress,
        "tokenizer": tokenizer,
        "torch": torch,
        "document": "A page. " * 20,
    }
    for name, length in (("inputs", 60), ("longer_inputs", 150), ("other_inputs", 40)):
        ids = random_stream()[None, :length]
        names[name] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for code in blocks(ROOT / "docs" / "runtime.md"):
        exec(compile(code, "docs/runtime.md", "exec"), names)
        assert names["output"].shape[1] > 100  # type: ignore[attr-defined]
    # The question's 17 characters and the template's tail, one token each.
    assert names["query_length"] == 18
    # The prompt and 8 compiled steps.
    assert names["cache"].get_seq_length() == 60 + 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").rglob("*.json")), ids=lambda path: path.name)
def test_shipped_profiles_are_valid(path: Path) -> None:
    profile = Profile.load(path)
    method = "" if profile.compression.method.name == "clusterattn" else f"-{profile.compression.method.name}"
    assert path.name == f"{profile.dataset.name}-{profile.compression.size}{method}.json"
    assert profile.model.id.endswith(path.parent.name)


def test_a_profile_is_shipped() -> None:
    assert list((ROOT / "profiles").rglob("*.json"))
