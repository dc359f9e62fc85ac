"""What the README shows works as it stands there, and the profiles beside it are valid."""

import re
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof import Profile

ROOT = Path(__file__).parent.parent


@pytest.mark.real_model
def test_the_python_of_the_readme(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), flags=re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    cache = names["cache"]
    profile = names["profile"]
    assert isinstance(profile, Profile)
    prompt_tokens = 1_700
    assert cache.get_seq_length() > prompt_tokens  # type: ignore[attr-defined]
    assert cache.layers[0].keys.shape[2] < profile.compression.size + 200  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").rglob("*.json")), ids=lambda path: path.name)
def test_shipped_profiles_are_valid(path: Path) -> None:
    profile = Profile.load(path)
    assert path.name == f"{profile.dataset.name}-{profile.compression.size}.json"
    assert profile.model.id.endswith(path.parent.name)


def test_a_profile_is_shipped() -> None:
    assert list((ROOT / "profiles").rglob("*.json"))
