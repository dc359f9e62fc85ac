import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.benchmarking import measure as measure_module
from clusterprof.benchmarking.forwards import prefill
from clusterprof.report.bench_progress import BenchProgress
from tests.cli.conftest import Finished, Run

# Everything but --model and a size; of 60 tokens, 20 are kept below.
QUICK = ["--tokens", 60, "--new-tokens", 2, "--repeats", 1]
SIZE = ["--size", 20, "--window", 8]
NAMES = ["full", "full_preallocated", "ours", "snapkv", "streaming_llm", "topk"]
# Two layers, 2 KV heads of 16 numbers, keys and values, float32.
BYTES_PER_TOKEN = 2 * 2 * 16 * 2 * 4


def edited(profile: Path, folder: Path, **compression: object) -> Path:
    document = json.loads(profile.read_text(encoding="utf-8"))
    document["compression"].update(compression)
    copy = folder / "edited.json"
    copy.write_text(json.dumps(document), encoding="utf-8")
    return copy


def interrupt_after(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Press Ctrl-C when so many parts are done."""
    told: list[str] = []

    def measuring(progress: BenchProgress, what: str) -> None:
        if len(told) == parts:
            raise KeyboardInterrupt
        told.append(what)

    monkeypatch.setattr(BenchProgress, "measuring", measuring)


@pytest.fixture(scope="module")
def finished(model_folder: Path) -> Any:
    from tests.cli.conftest import _finish

    return _finish(
        "bench", *SIZE, "--model", model_folder, "--tokens", 80, "--tokens", 60, "--tokens", 80,
        "--batch-size", 3, "--batch-size", 1, "--new-tokens", 2, "--repeats", 1, "--memory", "1GB", "--json",
    )  # fmt: skip


def test_json_has_every_cache_at_every_length_and_batch_size(finished: Finished) -> None:
    assert finished.code == 0
    document = finished.json()
    assert [subject["name"] for subject in document["subjects"]] == NAMES
    assert document["settings"]["tokens"] == [60, 80]
    assert document["settings"]["batch_sizes"] == [1, 3]
    assert [(it["tokens"], it["rows"], it["subject"]) for it in document["prefill"]] == [
        (tokens, 1, name) for tokens in (60, 80) for name in NAMES if name != "full_preallocated"
    ]
    assert [(it["tokens"], it["batch"], it["subject"]) for it in document["decode"]] == [
        (tokens, batch, name) for tokens in (60, 80) for batch in (1, 3) for name in NAMES
    ]
    assert document["interrupted"] is False


def test_json_numbers_hang_together(finished: Finished) -> None:
    document = finished.json()
    for prefill_ in document["prefill"]:
        kept = 20 if prefill_["compressed"] else prefill_["tokens"]
        assert prefill_["compressed"] == (prefill_["subject"] != "full")
        assert prefill_["kv_bytes"] == kept * BYTES_PER_TOKEN
        assert prefill_["peak_bytes"] > prefill_["kv_bytes"]
        assert prefill_["seconds"] > 0
    speeds = {(it["tokens"], it["batch"], it["subject"]): it["tokens_per_s"] for it in document["decode"]}
    for it in document["decode"]:
        key = it["tokens"], it["batch"]
        assert it["ratio_to_full"] == pytest.approx(it["tokens_per_s"] / speeds[*key, "full"])
        assert it["ratio_to_preallocated"] == pytest.approx(
            it["tokens_per_s"] / speeds[*key, "full_preallocated"]
        )
        kept = 20 if it["compressed"] else it["tokens"] + 3 * (it["subject"] == "full_preallocated")
        assert it["kv_bytes_start"] == it["batch"] * kept * BYTES_PER_TOKEN
    assert document["memory_bytes"] == 10**9
    assert len(document["capacity"]) == 20
    for it in document["capacity"]:
        assert it["longest_prompt"] == it["longest_prompt_one_by_one"] == 512
        assert it["context_limits"] is it["context_limits_one_by_one"] is True


def test_people_get_tables_and_notes_on_stdout_and_the_rest_on_stderr(run: Run, model_folder: Path) -> None:
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK, "--batch-size", 2)
    assert finished.code == 0
    assert "Prefill, compression included" in finished.out
    assert "Decoding 2 tokens" in finished.out
    assert "What fits" not in finished.out
    assert "one row was read, and repeated" in finished.out
    assert "one row was read" not in finished.err
    assert "Measuring" in finished.err


def test_the_memory_is_shown_as_it_was_written(run: Run, model_folder: Path) -> None:
    options = ["bench", *SIZE, "--model", model_folder, *QUICK, "--memory"]
    shown = run(*options, "1.50 GiB").out
    assert "What fits into 1.50 GiB" in shown
    assert "512 (context)" in shown
    shown = run(*options, "1KB").out
    assert "What fits" not in shown
    assert "Nothing fits into 1KB: the weights alone need" in shown


@pytest.mark.parametrize("name", ["speed.svg", "new/speed.PNG"])
def test_a_plot(run: Run, model_folder: Path, name: str) -> None:
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK, "--plot", name, "--json")
    assert finished.code == 0
    assert f"Plot written to {name}" in finished.err
    assert Path(name).stat().st_size > 5000
    assert len(finished.json()["decode"]) == 6


def test_a_profile_brings_method_size_and_window(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    profile = edited(profile_file, tmp_path, method={"name": "snapkv", "kernel_size": 15, "pooling": "avg"})
    finished = run("bench", "--profile", profile, "--model", model_folder, *QUICK, "--json")
    ours = finished.json()["subjects"][2]
    assert ours["label"] == "profile (snapkv)"
    assert ours["compression"] == {
        "size": 48, "window": 8,
        "method": {"name": "snapkv", "kernel_size": 15, "pooling": "avg", "importance": "mean"},
    }  # fmt: skip


def test_a_profile_brings_its_overrides(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    method = {"name": "snapkv", "kernel_size": 15, "pooling": "avg", "importance": "mean"}
    overrides = [{"layers": [1], "method": {**method, "kernel_size": 3}}]
    profile = edited(profile_file, tmp_path, method=method, overrides=overrides)
    finished = run("bench", "--profile", profile, "--model", model_folder, *QUICK, "--json")
    _, _, ours, *baselines = finished.json()["subjects"]
    assert ours["compression"]["overrides"] == overrides
    assert not any("overrides" in it["compression"] for it in baselines)


def test_the_model_is_the_profiles(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run("bench", "--profile", profile_file, *QUICK, "--json")
    assert finished.json()["model"]["id"] == str(model_folder)


def test_with_the_question_as_window_its_length_can_be_given(
    run: Run, tmp_path: Path, profile_file: Path
) -> None:
    profile = edited(profile_file, tmp_path, window="query")
    finished = run("bench", "--profile", profile, "--window", 5, *QUICK, "--json")
    assert finished.json()["subjects"][2]["compression"]["window"] == 5
    assert "length is given: 5 tokens" in run("bench", "--profile", profile, "--window", 5, *QUICK).out
    assert "length is assumed: 32 tokens" in run("bench", "--profile", profile, *QUICK).out


def test_another_models_profile_is_refused(run: Run, tmp_path: Path, profile_file: Path) -> None:
    document = json.loads(profile_file.read_text(encoding="utf-8"))
    document["model"]["num_hidden_layers"] = 3
    profile = tmp_path / "other.json"
    profile.write_text(json.dumps(document), encoding="utf-8")
    finished = run("bench", "--profile", profile, *QUICK)
    assert finished.code == 1
    assert "3" in finished.err.splitlines()[-1]


def test_prompts_that_fit_are_named(run: Run, model_folder: Path) -> None:
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK, "--tokens", 20, "--json")
    assert "not compressed: prompts of 20 tokens fit in size 20" in finished.err
    compressed = {it["tokens"]: it["compressed"] for it in finished.json()["prefill"]}
    assert compressed == {20: False, 60: True}


def test_without_tokens_the_prompt_is_four_times_the_size(run: Run, model_folder: Path) -> None:
    finished = run(
        "bench",
        *SIZE,
        "--model",
        model_folder,
        "--new-tokens",
        1,
        "--repeats",
        1,
        "--prefill-batch",
        "--json",
    )
    assert finished.json()["settings"]["tokens"] == [80]
    assert finished.json()["settings"]["prefill_batch"] is True


def test_a_prompt_beyond_the_context_is_an_error(run: Run, model_folder: Path) -> None:
    options = ["bench", *SIZE, "--model", model_folder, "--repeats", 1, "--new-tokens", 2, "--json"]
    assert run(*options, "--tokens", 509).code == 0
    finished = run(*options, "--tokens", 60, "--tokens", 510)
    assert finished.code == 1
    assert finished.out == ""
    assert "510 tokens and 3 decoded" in finished.err
    assert "context of 512" in finished.err


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ([], "--size"),
        (["--size", 32], "--size"),
        (["--size", 8, "--window", 8], "--size"),
        (["--size", 60, *QUICK], "--tokens"),
        (["--size", 1], "--size"),
        ([*SIZE, "--tokens", 1], "--tokens"),
        ([*SIZE, "--batch-size", 0], "--batch-size"),
        ([*SIZE, "--new-tokens", 0], "--new-tokens"),
        ([*SIZE, "--repeats", 0], "--repeats"),
        ([*SIZE, "--memory", "24"], "--memory"),
        ([*SIZE, "--memory", "-1GB"], "--memory"),
        ([*SIZE, "--memory", "0GB"], "--memory"),
        ([*SIZE, "--memory", "0.0001KB"], "--memory"),
        ([*SIZE, "--memory", "24 parsecs"], "--memory"),
        ([*SIZE, "--plot", "speed.txt"], "--plot"),
        ([*SIZE, "--plot", "speed"], "--plot"),
    ],
)
def test_wrong_usage(run: Run, options: list[object], option: str) -> None:
    finished = run("bench", "--model", "nowhere", *options)
    assert finished.code == 2
    assert option in finished.err
    assert "Loading" not in finished.err


def test_a_profile_has_its_own_size_and_window(run: Run, profile_file: Path) -> None:
    for option, value in (("--size", 20), ("--window", 9)):
        finished = run("bench", "--profile", profile_file, option, value)
        assert finished.code == 2
        assert option in finished.err
    assert run("bench", "--profile", profile_file, "--size", 48, "--window", 8, *QUICK).code == 0


def test_a_plot_that_cannot_be_written_is_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind whoever runs tests as root.
    monkeypatch.setattr("clusterprof.cli._files.os.access", lambda path, mode: False)
    finished = run("bench", *SIZE, "--plot", "speed.svg")
    assert finished.code == 2
    assert "cannot be written" in finished.err


def test_ctrl_c_shows_what_was_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    interrupt_after(monkeypatch, 7)
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK)
    assert finished.code == 1
    assert "full cache" in finished.out
    assert finished.err.splitlines()[-1] == "Interrupted: this is what was measured until then."
    interrupt_after(monkeypatch, 7)
    document = run("bench", *SIZE, "--model", model_folder, *QUICK, "--json").json()
    assert document["interrupted"] is True
    assert [it["subject"] for it in document["decode"]] == ["full"]


def test_ctrl_c_before_the_first_number_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    interrupt_after(monkeypatch, 0)
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK)
    assert (finished.code, finished.out) == (1, "")
    assert finished.err.splitlines()[-1] == "error: Interrupted before anything was measured."


def test_too_little_memory_is_shown_in_its_place(
    run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    def failing(model: Any, prompt: Any) -> Any:
        if prompt.shape[0] == 2:
            raise MemoryError
        return prefill(model, prompt)

    monkeypatch.setattr(measure_module, "prefill", failing)
    batches = ["--prefill-batch", "--batch-size", 1, "--batch-size", 2, "--plot", "speed.svg"]
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK, *batches)
    assert finished.code == 0
    assert finished.out.count("out of memory") == 11
    assert "Plot written to speed.svg" in finished.err


def test_nothing_to_plot_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    interrupt_after(monkeypatch, 3)
    finished = run("bench", *SIZE, "--model", model_folder, *QUICK, "--plot", "speed.svg")
    assert "Nothing was decoded, so there is no plot." in finished.err
    assert not Path("speed.svg").exists()
