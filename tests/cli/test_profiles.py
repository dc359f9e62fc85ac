import json
import shutil
from pathlib import Path

import pytest

from clusterprof import Profile
from tests.cli.conftest import Run


@pytest.fixture
def folder(run: Run, profile_file: Path) -> Path:
    """./profiles with a profile and something else."""
    folder = Path("profiles")
    (folder / "tiny").mkdir(parents=True)
    shutil.copy(profile_file, folder / "tiny" / "places-48.json")
    (folder / "broken.json").write_text('{"schema_version": 1')
    return folder


def test_ls_lists_what_is_valid_and_names_what_is_not(run: Run, folder: Path) -> None:
    finished = run("profiles", "ls")
    assert finished.code == 0
    assert "places-48.json" in finished.out
    assert "clusterattn: num_block" in finished.out
    assert "broken.json" not in finished.out
    assert "broken.json" in finished.err
    assert "invalid JSON" in finished.err


def test_ls_json(run: Run, folder: Path, model_folder: Path, dataset_file: Path) -> None:
    [entry] = run("profiles", "ls", folder, "--json").json()
    assert entry["profile"] == str(folder / "tiny" / "places-48.json")
    assert entry["model"] == str(model_folder)
    assert entry["dataset"] == str(dataset_file)
    assert (entry["size"], entry["window"]) == (48, 8)
    assert entry["method"]["name"] == "clusterattn"
    assert entry["objective"] == "log_kl"
    assert entry["value"] == Profile.load(Path(entry["profile"])).results.judged.value


def test_ls_of_nothing_says_so(run: Run) -> None:
    finished = run("profiles", "ls")
    assert (finished.code, finished.out) == (0, "")
    assert "clusterprof tune" in finished.err
    assert run("profiles", "ls", "--json").json() == []


def test_ls_of_a_folder_that_is_none_is_an_error(run: Run, profile_file: Path) -> None:
    for flag in ([], ["--json"]):
        missing = run("profiles", "ls", "no\x1b[2Jpe", *flag)
        assert (missing.code, missing.out) == (1, "")
        assert missing.err == "error: There is no folder no\\x1b[2Jpe; check the path.\n"
    file = run("profiles", "ls", profile_file)
    assert (file.code, file.out) == (1, "")
    assert "is not a folder" in file.err
    assert "profiles show" in file.err


def test_a_files_name_is_escaped(run: Run, profile_file: Path) -> None:
    shutil.copy(profile_file, "pro\x1b[2J.json")
    for command in (["ls", "."], ["validate", "pro\x1b[2J.json"]):
        finished = run("profiles", *command)
        assert finished.code == 0
        assert "pro\\x1b[2J.json" in finished.out
        assert "\x1b" not in finished.out


def test_show_is_for_people(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run("profiles", "show", profile_file)
    assert finished.code == 0
    said = " ".join(finished.out.split())
    for expected in (
        "LlamaForCausalLM, 2 layers",
        "48 tokens per head, the prompt's last 8 tokens included",
        "num_block",
        "3 samples",
        "snapkv",
    ):
        assert expected in said


def test_show_json_is_the_document(run: Run, profile_file: Path) -> None:
    shown = run("profiles", "show", profile_file, "--json").json()
    assert shown == json.loads(profile_file.read_text(encoding="utf-8"))


def test_validate_shows_nothing_of_a_file_that_a_terminal_would_obey(
    run: Run, profile_file: Path, tmp_path: Path
) -> None:
    document = json.loads(profile_file.read_text(encoding="utf-8"))
    document["compression"]["method"]["name"] = "\x1b[31mred\nline two\u202e" + "x" * 1000
    path = tmp_path / "nasty.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    finished = run("profiles", "validate", path)
    assert finished.code == 1
    (line,) = finished.out.splitlines()
    assert line.isprintable()
    assert len(line) < 1000


def test_validate_has_a_line_for_each_and_fails_for_one(run: Run, folder: Path, profile_file: Path) -> None:
    assert run("profiles", "validate", profile_file).code == 0
    finished = run("profiles", "validate", profile_file, folder / "broken.json", "nowhere.json")
    assert finished.code == 1
    lines = finished.out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["valid", "invalid", "invalid"]
    assert "broken.json" in lines[1]
    assert "nowhere.json" in lines[2]
