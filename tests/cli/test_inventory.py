"""`datasets ls`, `models ls|pull` and `doctor`."""

from pathlib import Path

import pytest
import torch

import clusterprof
from clusterprof.data import list_datasets
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def empty_hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_datasets_ls(run: Run) -> None:
    finished = run("datasets", "ls")
    assert finished.code == 0
    names = [dataset.name for dataset in list_datasets()]
    assert {"needle", "lines", "docs", "code", "qasper"} <= set(names)
    assert all(name in finished.out for name in names)
    assert [entry["name"] for entry in run("datasets", "ls", "--json").json()] == names


def test_models_ls(run: Run, empty_hub_cache: Path) -> None:
    entries = {entry["name"]: entry for entry in run("models", "ls", "--json").json()}
    assert [entry["default"] for entry in entries.values()].count(True) == 1

    weights = empty_hub_cache / "models--org--model" / "snapshots" / ("0" * 40) / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"x" * 1500)
    entries = {entry["name"]: entry for entry in run("models", "ls", "--json").json()}
    assert entries["builtin"]["bytes"] is None
    assert entries["org/model"] == {"name": "org/model", "bytes": 1500, "default": False}
    assert "1.5 kB" in run("models", "ls").out


def test_models_ls_and_doctor_see_the_built_in_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2_000_000)
    monkeypatch.setattr("clusterprof.models.built_folder", lambda: tmp_path)
    [built] = [entry for entry in run("models", "ls", "--json").json() if entry["name"] == "builtin"]
    assert built["bytes"] == 2_000_000
    assert run("doctor", "--json").json()["builtin_model"] is True


def test_models_pull_prints_the_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterprof.models.builtin_folder", lambda: Path("/cache/model"))
    finished = run("models", "pull")
    assert (finished.code, finished.out) == (0, "/cache/model\n")


def test_doctor_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache" / "captures").mkdir(parents=True)
    (tmp_path / "cache" / "captures" / "one").write_bytes(b"x" * 1234)
    document = run("doctor", "--json").json()
    assert document["clusterprof"] == clusterprof.__version__
    assert document["packages"]["torch"] == torch.__version__
    assert document["cache"] == str(tmp_path / "cache")
    assert document["cache_bytes"] == 1234
    assert document["cache_writable"] is True
    assert document["builtin_model"] is False
    if not torch.cuda.is_available():
        assert (document["device"], document["dtype"], document["attention"]) == ("cpu", "float32", "sdpa")
        assert document["flash_attention"].startswith("no: ")


def test_doctor_for_people(run: Run) -> None:
    finished = run("doctor")
    assert finished.code == 0
    assert "clusterprof models pull" in finished.out
    assert f"torch              {torch.__version__}" in finished.out


def test_doctor_without_a_home_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERPROF_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *args, **kwargs: Path("~/.cache/clusterprof"))
    finished = run("doctor")
    assert finished.code == 0
    assert "set CLUSTERPROF_CACHE" in finished.out
