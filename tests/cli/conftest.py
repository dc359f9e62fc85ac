"""A tiny model on disk, a dataset for it, and the command line in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from clusterprof.cli import main
from tests.tiny import tiny_llama, tiny_tokenizer

WORDS = ("ash", "bay", "cape", "dale", "east", "ford", "glen", "hill", "isle", "lake", "moor", "oak", "reed")
# What a tune needs besides --dataset and --model; the prompts below have 120 to 240 tokens.
QUICK = ["--size", "48", "--window", "8", "--decode-tokens", "4", "--trials", "3", "--fraction", "1"]


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts of one token per character, and one that fits in the size of `QUICK`."""
    rng = Random(0)
    prompts = [" ".join(rng.choices(WORDS, k=count)) for count in (25, 35, 45, 5)]
    path = tmp_path_factory.mktemp("data") / "places.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset_file: Path) -> Finished:
    """One tune with --json, and in the folder of its profile everything it left."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERPROF_CACHE", str(folder / "cache"))
        return _finish(
            "tune",
            "--dataset", dataset_file,
            "--model", model_folder,
            *QUICK,
            "--output", folder / "profile.json",
            "--json",
        )  # fmt: skip


@pytest.fixture(scope="session")
def profile_file(tuned: Finished) -> Path:
    [document] = tuned.json()["profiles"]
    return Path(document["profile"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder with an empty cache."""
    monkeypatch.setenv("CLUSTERPROF_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return _finish


def _finish(*args: object) -> Finished:
    import contextlib
    import io

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    code = ended.value.code
    assert isinstance(code, int)
    return Finished(code, out.getvalue(), err.getvalue())
