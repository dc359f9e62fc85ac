import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.profiling import tune as tune_module
from clusterprof.profiling.per_layer import PerLayer
from tests.cli.conftest import QUICK, WORDS, Run

HALF = [*QUICK[:-2], "--samples", 2, "--holdout", 6, "--per-layer"]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts, each longer than the size."""
    rng = Random(1)
    rows = [{"prompt": " ".join(rng.choices(WORDS, k=count))} for count in range(25, 41, 2)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_values_per_layer_are_told_and_written(run: Run, model_folder: Path, rows_file: Path) -> None:
    command = ["tune", "--dataset", rows_file, "--model", model_folder, *HALF]
    finished = run(*command, "--json")
    assert finished.code == 0, finished.err
    [document] = finished.json()["profiles"]
    assert document["per_layer"].keys() == {"tried", "replays"}
    assert "Searching per layer" in finished.err
    assert "Values per layer" in finished.err
    profile = Profile.load(document["profile"])
    overrides = [override.model_dump(mode="json") for override in profile.compression.overrides]
    assert document["best"]["overrides"] == document["methods"][0]["overrides"] == overrides
    [entry] = run("profiles", "ls", "--json").json()
    assert entry["overrides"] == overrides


def test_a_profile_with_overrides_is_applied(
    run: Run, tmp_path: Path, model_folder: Path, profile_file: Path
) -> None:
    profile = Profile.load(profile_file)
    method = profile.compression.method.model_copy(update={"theta": 0.5})
    written = profile.model_dump(mode="json")
    written["compression"]["overrides"] = [{"layers": [1], "method": method.model_dump(mode="json")}]
    Profile.model_validate(written, strict=False).save(tmp_path / "mixed.json")
    (tmp_path / "prompt.txt").write_text("ash bay cape dale " * 20)
    command = ["apply", "--profile", tmp_path / "mixed.json", "--prompt-file", tmp_path / "prompt.txt"]
    finished = run(*command, "--model", model_folder, "--max-new-tokens", 4)
    assert finished.code == 0, finished.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--holdout", 5],
            2,
            "6 held-out prompts or more decide whether its values stay; raise --holdout from 5.",
        ),
        ([], 1, "--per-layer needs at least 6 held-out prompts"),
    ],
)
def test_with_too_few_held_out_prompts_it_is_refused(
    run: Run, model_folder: Path, dataset_file: Path, options: list[Any], code: int, message: str
) -> None:
    finished = run(
        "tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--per-layer", *options
    )
    assert finished.code == code
    assert message in " ".join(finished.err.replace("│", " ").split())
    assert "Capturing" not in finished.err


def test_ctrl_c_in_it_leaves_a_profile_of_the_search(
    run: Run, model_folder: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> PerLayer:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_module, "search_per_layer", interrupted)
    finished = run("tune", "--dataset", rows_file, "--model", model_folder, *HALF)
    assert finished.code == 1
    assert "Interrupted: the result rests on the 3 trials" in finished.err
    assert Profile.load(finished.out.strip()).compression.overrides == ()
