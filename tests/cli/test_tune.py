import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from clusterprof import Profile
from clusterprof.cli import _options
from clusterprof.methods import method_names
from tests.cli.conftest import QUICK, Finished, Run

LABELS = ["tuned", "paper default", "SnapKV", "SnapKV tuned", "top-k", "StreamingLLM", "full"]
SCORES = {"cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"}


def only(finished: Finished) -> Any:
    """What --json says of the one profile."""
    [document] = finished.json()["profiles"]
    return document


def test_json_is_one_document_that_agrees_with_the_profile(tuned: Finished) -> None:
    assert tuned.code == 0
    assert tuned.json().keys() == {"profiles", "target"}
    assert tuned.json()["target"] is None
    document = only(tuned)
    assert document.keys() == {
        "profile", "best", "judged_on", "methods", "set_aside", "per_layer", "samples", "timings", "interrupted",
    }  # fmt: skip
    profile = Profile.load(document["profile"])
    assert document["best"] == {
        "method": profile.compression.method.model_dump(),
        "overrides": [],
        "objective": "log_kl",
        "tuning": profile.results.tuning.value,
        "held_out": None,
    }
    assert document["judged_on"] == "tuning"
    assert document["methods"][0]["log_kl"] == pytest.approx(document["best"]["tuning"])
    assert document["samples"]["held_out"] == 0
    assert document["samples"]["used"] == 3
    assert document["samples"]["fitting"] == 1
    assert document["timings"].keys() == {"capture_s", "search_s", "trials", "replays"}
    assert document["timings"]["trials"] == 3
    assert document["interrupted"] is False
    assert document["per_layer"] is None


def test_json_lists_every_method_with_its_parameters_and_scores(tuned: Finished) -> None:
    methods = only(tuned)["methods"]
    assert [method["label"] for method in methods] == LABELS
    assert all(method.keys() == {"label", "method", "overrides", "difference"} | SCORES for method in methods)
    for method in methods:
        if method["label"] in ("tuned", "full"):
            assert method["difference"] is None
        else:
            assert method["difference"].keys() == {"mean", "low", "high", "samples"}
            assert method["difference"]["mean"] == pytest.approx(methods[0]["log_kl"] - method["log_kl"])
    assert methods[2]["method"] == {
        "name": "snapkv",
        "kernel_size": 5,
        "pooling": "avg",
        "importance": "mean",
    }
    assert methods[-1]["method"] is None
    assert methods[-1]["cosine"] == 1


def test_a_log_tells_what_happens_without_control_characters(tuned: Finished, model_folder: Path) -> None:
    assert tuned.err.replace("\n", "").isprintable()
    for expected in (
        f"{model_folder} (LlamaForCausalLM, 2 layers, 4 query and 2 KV heads), float32 on cpu, sdpa attention",
        "prompts  3 to tune on, 12",
        " tokens; 1 more set aside, not longer than size 48\nheld out 0 to judge by\n",
        "Capturing 3/3",
        "optuna-dashboard sqlite:///",
        "Searching clusterattn at 48 3/3",
        "Searching snapkv at 48 3/3",
        "3 prompts it was tuned on",
        "No prompt was held out",
        "best log_kl",
        "paper's default",
        "clusterprof apply --profile",
    ):
        assert expected in tuned.err
    rows = [line.split("│")[1].strip() for line in tuned.err.splitlines() if line.startswith("│")]
    # All methods with their scores, and then what the tuned one is ahead of each other one.
    assert rows == LABELS + LABELS[1:-1]


def test_what_the_search_found_and_the_profile_has_not_is_told(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    finished = run(
        "tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--trials", 16, "--json",
        "--objective", "kl",
    )  # fmt: skip
    document = only(finished)
    aside = document["set_aside"]
    assert aside.keys() == {"method", "tuning", "difference"}
    assert aside["tuning"] < document["best"]["tuning"]
    assert aside["difference"]["mean"] == pytest.approx(
        aside["tuning"] - document["best"]["tuning"], abs=1e-6
    )
    assert aside["difference"]["samples"] == 3
    assert aside["method"] != document["best"]["method"]
    [sentence] = [line for line in finished.err.splitlines() if "the search did better with" in line]
    assert f"num_block {aside['method']['num_block']}, theta" in sentence
    kept = f"against {document['best']['tuning']:.4f}, difference {aside['difference']['mean']:+.4f}"
    assert f"kl {aside['tuning']:.4f} {kept}" in sentence
    assert "fewer than 6 prompts cannot show that it is better, so the profile has what" in sentence


def test_stdout_is_the_path_alone(run: Run, model_folder: Path, dataset_file: Path) -> None:
    finished = run(
        "tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--trials", 1, "--seed", 2**32 - 1
    )
    assert finished.code == 0
    path = Path(finished.out.removesuffix("\n"))
    assert path.parts[0] == "profiles"
    # The paper's values and those of tuned SnapKV are tried in any case.
    assert Profile.load(path).search.trials == 2


def test_another_method_has_a_profile_of_its_own(run: Run, model_folder: Path, dataset_file: Path) -> None:
    command = ["tune", "--dataset", dataset_file, "--model", model_folder, *QUICK]
    finished = run(*command, "--method", "snapkv", "--objective", "kl", "--json")
    assert finished.code == 0, finished.err
    document = only(finished)
    path = Path(document["profile"])
    assert path == Path("profiles") / model_folder.name / f"{dataset_file.stem}-48-snapkv.json"
    assert document["best"]["method"].keys() == {"name", "kernel_size", "pooling", "importance"}
    assert document["best"]["objective"] == "kl"
    assert document["best"]["tuning"] == pytest.approx(document["methods"][0]["kl"])
    labels = ["tuned", "SnapKV default", "ClusterAttn", "top-k", "StreamingLLM", "full"]
    assert [method["label"] for method in document["methods"]] == labels
    for expected in (
        "method   snapkv",
        "-48-snapkv-",
        "SnapKV's default (kernel_size 5, pooling avg, importance mean)",
    ):
        assert expected in finished.err

    assert run(*command).out.strip() == str(path.with_name(f"{dataset_file.stem}-48.json"))
    listed = run("profiles", "ls", "--json").json()
    assert {entry["method"]["name"] for entry in listed} == {"snapkv", "clusterattn"}
    shown = " ".join(run("profiles", "show", path).out.split())
    assert "kernel_size 1 to 63, pooling avg or max, importance mean or max" in shown


def test_a_method_without_parameters_is_evaluated_once(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--method", "topk")
    assert finished.code == 0, finished.err
    assert "Searching topk at 48 1/1" in finished.err
    assert "top-k has nothing to tune" in finished.err
    assert "48 tokens kept per head, 3 prompts\n" in re.sub(" *\n", "\n", finished.err)
    profile = Profile.load(finished.out.strip())
    assert profile.search.trials == 1
    applied = Path("prompt.txt")
    applied.write_text("a lake by a reed bay " * 6)
    again = run(
        "apply", "--profile", finished.out.strip(), "--prompt-file", applied, "--model", model_folder,
        "--max-new-tokens", 3,
    )  # fmt: skip
    assert again.code == 0, again.err


def test_a_library_that_a_method_lacks_is_told_before_the_capture(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path, dataset_file: Path
) -> None:
    for module in [*sys.modules, "sklearn"]:
        if module.partition(".")[0] == "sklearn":
            monkeypatch.setitem(sys.modules, module, None)
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--method", "kmeans")
    assert finished.code == 1
    assert "scikit-learn" in finished.err.splitlines()[-1]
    assert "Capturing" not in finished.err


def test_every_method_can_be_named() -> None:
    assert get_args(get_args(_options.Method)[0]) == method_names()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (["--size", "32"], "not above --window 32"),
        (["--size", "0"], "2"),
        (["--size", "x"], "int"),
        (["--window", "0"], "1<=x<=10000000"),
        (["--window", "question"], "the word query"),
        (["--window", "8.5"], "the word query"),
        (["--window", "9" * 5000], "the word query"),
        (["--fraction", "0"], "0<x<=1"),
        (["--fraction", "nan"], "0<x<=1"),
        (["--fraction", "1.5"], "0<x<=1"),
        (["--samples", "3", "--fraction", "0.5"], "not both"),
        (["--samples", "0"], "1"),
        (["--holdout", "-1"], "0"),
        (["--size", "64", "--size", "8"], "8 is not above --window 32"),
        (["--trials", "0"], "1"),
        (["--decode-tokens", "0"], "1"),
        (["--tokens", "0"], "256"),
        (["--seed", "-1"], "0"),
        (["--seed", "4294967296"], "4294967295"),
        (["--timeout", "nan"], "above 0"),
        (["--timeout", "inf"], "above 0"),
        (["--objective", "speed"], "agreement"),
        (["--method", "magic"], "streaming_llm"),
        (["--method", "full"], "streaming_llm"),
        (["--dtype", "int4"], "bfloat16"),
        (["--model", " "], "empty"),
    ],
)
def test_values_out_of_range_are_wrong_usage(run: Run, options: Sequence[str], allowed: str) -> None:
    size = [] if options[0] == "--size" else ["--size", "64"]
    finished = run("tune", "--dataset", "needle", *size, *options)
    assert finished.code == 2
    # typer draws a box around the sentence.
    said = re.sub(r"[│\s]+", " ", finished.err)
    assert options[0] in said
    assert allowed in said.partition(options[0])[2]


def test_bad_rows_are_found_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n{"question": "no context"}\n')
    finished = run("tune", "--dataset", path, "--size", 64, "--model", "no/such/model/at/all")
    assert finished.code == 1
    assert f"{path}, line 2" in finished.err
    assert "no/such/model" not in finished.err


def test_options_of_another_kind_of_data_are_found_before_the_model_is_loaded(run: Run) -> None:
    finished = run("tune", "--dataset", "needle", "--data-dir", ".", "--size", 64, "--model", "no/such/model")
    assert finished.code == 1
    assert "--data-dir is for LongBench" in finished.err


@pytest.mark.parametrize(
    ("output", "reason"),
    [(".", "folder"), ("file/profile.json", "not a folder"), ("/dev/null", "not a regular file")],
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    run: Run, output: str, reason: str
) -> None:
    Path("file").touch()
    finished = run("tune", "--dataset", "nowhere.jsonl", "--size", 64, "-o", output)
    assert finished.code == 1
    assert reason in finished.err
    assert "nowhere" not in finished.err


def test_a_read_only_output_folder_is_found_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the answer of the system is put in its mouth.
    monkeypatch.setattr("clusterprof.cli._files.os.access", lambda path, mode: False)
    finished = run("tune", "--dataset", "nowhere.jsonl", "--size", 64, "-o", "new/profile.json")
    assert finished.code == 1
    assert "no permission" in finished.err


def test_the_password_of_a_storage_that_fails_is_not_shown(run: Run, dataset_file: Path) -> None:
    url = "nodriver://me:secret@host/db"
    finished = run("tune", "--dataset", dataset_file, "--size", 64, "--model", "x", "--storage", url)
    assert finished.code == 1
    assert finished.err.splitlines()[-1] == (
        "error: The study storage nodriver://host/db cannot be opened (Can't load plugin: "
        "sqlalchemy.dialects:nodriver); give --storage a URL such as sqlite:///study.db, with the database's driver "
        "installed."
    )


def test_the_question_as_the_window(run: Run, tmp_path: Path, model_folder: Path) -> None:
    rows = [
        {"id": f"q{n}", "context": "a lake by a reed bay " * 6, "question": "where is it?" * n}
        for n in (1, 2, 9)
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = run(
        "tune", "--dataset", path, "--model", model_folder, *QUICK, "--window", "query", "-o", "query.json"
    )
    assert finished.code == 0, finished.err
    assert "48 tokens kept per head, the prompt's question included as the window" in finished.err
    assert "q9 is left out: Its question has 108 tokens" in finished.err
    assert "apply --profile query.json --prompt-file PROMPT.txt --question TEXT --compare" in finished.err
    profile = Profile.load("query.json")
    assert profile.compression.window == "query"
    assert [sample.id for sample in profile.search.dropped_samples] == ["q9"]

    assert [entry["window"] for entry in run("profiles", "ls", ".", "--json").json()] == ["query"]
    assert "question" in run("profiles", "ls", ".").out
    shown = " ".join(run("profiles", "show", "query.json").out.split())
    assert "48 tokens per head, the prompt's question included" in shown


def test_prompts_without_a_question_cannot_be_tuned_for_one(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--window", "query")
    assert finished.code == 1
    assert "Capturing" not in finished.err
    assert re.search(r"row '\w+' does not tell it from the rest; .* or use --window N\.\n$", finished.err)


def test_prompts_that_all_fit_are_said_to(run: Run, model_folder: Path, dataset_file: Path) -> None:
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, "--size", 400)
    assert finished.code == 1
    assert "fit in --size 400" in finished.err


def start(work: Path, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from clusterprof.cli import main; main()", *map(str, args)],
        cwd=work,
        env={**os.environ, "CLUSTERPROF_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}")


def test_ctrl_c_during_the_search_keeps_the_trials_and_the_rerun_goes_on(
    run: Run, tmp_path: Path, model_folder: Path, dataset_file: Path
) -> None:
    command = ["tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--json"]
    process = start(tmp_path, *command, "--trials", 100_000)
    wait_for(process, "Searching clusterattn at 48 4/")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "run the same command again" in err
    assert "Traceback" not in err
    [document] = json.loads(out)["profiles"]
    assert document["interrupted"] is True
    done = document["timings"]["trials"]
    assert 1 <= done < 100_000
    assert Profile.load(tmp_path / document["profile"]).search.trials == done

    again = run(*command, "--trials", done + 2)
    assert again.code == 0
    assert f"{done} trials from before" in again.err
    assert again.err.count("found on disk") >= 2
    assert only(again)["timings"]["trials"] == done + 2


def test_ctrl_c_during_the_capture_says_what_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path, dataset_file: Path
) -> None:
    from clusterprof.profiling.capture import capture_prompt

    calls = iter([False, True])

    def interrupted(*args: object, **kwargs: object) -> object:
        if next(calls):
            raise KeyboardInterrupt
        return capture_prompt(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("clusterprof.profiling.collect.capture_prompt", interrupted)
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--json")
    assert finished.code == 1
    assert finished.out == ""
    assert "1 of 3 captures are finished and kept" in finished.err
    assert "same command again" in finished.err


def test_a_timeout_ends_the_search(run: Run, model_folder: Path, dataset_file: Path) -> None:
    finished = run(
        "tune", "--dataset", dataset_file, "--model", model_folder, *QUICK,
        "--trials", 100_000, "--timeout", 0.5, "--json",
    )  # fmt: skip
    assert finished.code == 0
    # Two searches of half a second.
    assert math.isclose(only(finished)["timings"]["search_s"], 1, abs_tol=5)


def test_a_profile_that_cannot_be_written_in_the_end_does_not_take_the_table_along(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path, dataset_file: Path
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    finished = run("tune", "--dataset", dataset_file, "--model", model_folder, *QUICK, "--json")
    assert finished.code == 1
    assert finished.out == ""
    assert "paper default" in finished.err
    assert "No space left on device" in finished.err.splitlines()[-1]
    assert not list(Path().rglob("*.json"))


def test_only_profiles_are_replaced_and_of_another_search_it_is_said(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    command = ["tune", "--dataset", dataset_file, "--model", model_folder, *QUICK]
    rows = dataset_file.read_bytes()
    refused = run(*command, "-o", dataset_file)
    assert (refused.code, refused.out) == (1, "")
    assert "is no profile that this release can read, so it is not replaced" in refused.err
    assert "Capturing" not in refused.err
    assert dataset_file.read_bytes() == rows
    first, again = run(*command, "-o", "p.json"), run(*command, "-o", "p.json")
    assert "another search" not in first.err + again.err
    other = run(*command, "-o", "p.json", "--objective", "cosine")
    assert "p.json held the result of another search (clusterattn: num_block" in other.err
    assert Profile.load("p.json").search.objective == "cosine"


def test_a_name_that_no_profile_can_hold_is_refused_before_the_work(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    path = dataset_file.rename(dataset_file.with_name("bell\x07.jsonl"))
    finished = run("tune", "--dataset", path, "--model", model_folder, *QUICK)
    path.rename(dataset_file)
    assert (finished.code, finished.out) == (1, "")
    assert "must have no control characters" in finished.err
    assert "Capturing" not in finished.err
    assert "--debug" not in finished.err
