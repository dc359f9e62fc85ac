import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from clusterprof.errors import CompressionError
from clusterprof.evaluation.generation import GenerationBenchmark
from clusterprof.evaluation.records import Record, open_run, read_records
from clusterprof.methods import method_names
from tests.cli.conftest import WORDS, Finished, Run

COMMANDS = (
    "needle", "lines", "longbench", "perplexity", "samples", "fit", "hit-rate", "ablation", "clusters",
)  # fmt: skip
# Without these, a command is complete.
NEEDS_DATA = ("perplexity", "samples", "fit", "hit-rate", "ablation", "clusters")
SMALL = ["--sizes", "48", "--window", "8", "--methods", "snapkv,topk"]


def places(words: int, seed: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def asked_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about places, one token per character; the last one fits in the size of `SMALL`."""
    rows = [
        {
            "id": name,
            "context": places(words, n),
            "question": "Where is it?",
            "answers": ["by the moor", "at the bay"],
            "max_new_tokens": 6,
        }
        for n, (name, words) in enumerate({"q0": 25, "q1": 30, "q2": 35, "small": 4}.items())
    ]
    path = tmp_path_factory.mktemp("data") / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tale.txt"
    path.write_text(" ".join(f"On day {n} it rained." for n in range(30)))
    return path


@pytest.fixture
def needle(run: Run, model_folder: Path, tale: Path) -> Callable[..., Finished]:
    def evaluate(*options: object) -> Finished:
        return run(
            "eval", "needle", "--model", model_folder, "--haystack", tale, "--tokens", "300", "--depths", 2,
            *SMALL, *options,
        )  # fmt: skip

    return evaluate


def results(path: str | Path) -> list[Record]:
    return read_records(Path(path))


def said(finished: Finished) -> str:
    """What typer draws a box around, on one line."""
    return re.sub(r"[│\s]+", " ", finished.err)


# Help and wrong usage.


def test_the_group_names_its_benchmarks(run: Run) -> None:
    finished = run("eval", "--help")
    assert finished.code == 0
    assert all(command in finished.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    finished = run("eval", command, "--help")
    assert finished.code == 0
    assert finished.err == ""
    shared = ["--model", "--seed", "--output", "--dtype"]
    if command != "clusters":
        shared += ["--window", "--json"]
    if command not in ("clusters", "hit-rate"):
        shared += ["--sizes"]
    if command not in ("clusters", "hit-rate", "ablation"):
        shared += ["--methods"]
    for option in shared:
        assert option in finished.out
    assert (command in NEEDS_DATA) == ("--dataset" in finished.out)


def test_the_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom contextlib import suppress\nfrom clusterprof.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    with suppress(SystemExit): main(['eval', command, '--help'])\n"
        "with suppress(SystemExit): main(['compare', '--help'])\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "clusterprof" in loaded
    assert not loaded & {"torch", "transformers", "datasets", "optuna", "numpy", "matplotlib", "sklearn"}


@pytest.mark.parametrize(
    ("args", "option", "allowed"),
    [
        (["needle", "--tokens", "100"], "--tokens", "'100' is not a whole number from 256"),
        (["needle", "--tokens", "1000,2k"], "--tokens", "'2k' is not a whole number"),
        (["needle", "--tokens", "1000,,2000"], "--tokens", "nothing empty in it"),
        (["needle", "--tokens", "9" * 5000], "--tokens", "is not a whole number from 256 to 10000000"),
        (["needle", "--tokens", "\uff11\uff10\uff10\uff10"], "--tokens", "is not a whole number"),
        (["needle", "--depths", "0"], "--depths", "1"),
        (["needle", "--samples", "0"], "--samples", "1"),
        (["needle", "--sizes", "1"], "--sizes", "'1' is not a whole number from 2"),
        (["needle", "--sizes", "256,-1"], "--sizes", "'-1' is not a whole number"),
        (["needle", "--sizes", ""], "--sizes", "nothing empty in it"),
        (["needle", "--methods", "topk,"], "--methods", "nothing empty in it"),
        (["needle", "--window", "0"], "--window", "1<=x"),
        (["needle", "--window", "question"], "--window", "the word query"),
        (["needle", "--seed", "-1"], "--seed", "0"),
        (["needle", "--dtype", "int4"], "--dtype", "bfloat16"),
        (["needle", "--dataset", "x"], "--dataset", "No such option"),
        (["lines", "--tokens", "x"], "--tokens", "'x' is not a whole number"),
        (["lines", "--samples", "nan"], "--samples", "int"),
        (["lines", "--max-tokens", "5"], "--max-tokens", "16"),
        (["longbench", "--tasks", "qasper,nope"], "--tasks", "'nope' is none of narrativeqa"),
        *(([command], "--dataset", "Missing option") for command in NEEDS_DATA),
        (["perplexity", "--dataset", " "], "--dataset", "empty"),
        (["fit", "--dataset", "x", "--decode-tokens", "0"], "--decode-tokens", "1"),
        (["fit", "--dataset", "x", "--tokens", "5"], "--tokens", "256"),
        (["fit", "--dataset", "x", "--methods", "h2o+decode"], "--methods", "h2o+decode evicts while decoding"),
        (["hit-rate", "--dataset", "x", "--window", "query"], "--window", "needs a number of tokens"),
        (["clusters", "--dataset", "x", "--format", "gif"], "--format", "'gif' is neither svg nor png"),
        (["clusters", "--dataset", "x", "--layers", "one"], "--layers", "'one' is not a whole number"),
        (["clusters", "--dataset", "x", "--size", "1"], "--size", "2"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_wrong_usage(
    run: Run, args: Sequence[str], option: str, allowed: str
) -> None:
    finished = run("eval", *args, "--model", "no/such/model")
    assert finished.code == 2
    assert finished.out == ""
    text = said(finished)
    assert option in text
    assert allowed in text


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--methods", "magic"], "There is no method 'magic'; the methods are clusterattn"),
        (["--methods", "snapkvv"], "There is no method 'snapkvv'; did you mean snapkv?"),
        (["--methods", "snapkv+decode"], "snapkv compresses prompts only"),
        (["--methods", "topk,topk,full+decode"], "There is no method 'full+decode'"),
        (["--sizes", "64,32"], "Size 32 is not above the observation window of 32 tokens"),
    ],
)
def test_who_enters_is_a_matter_of_usage(run: Run, args: Sequence[str], problem: str) -> None:
    finished = run("eval", "needle", *args, "--model", "no/such/model")
    assert finished.code == 2
    assert problem in said(finished)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["needle", "--methods", "nowhere.json"], "There is no profile nowhere.json"),
        (["needle", "--haystack", "nowhere.txt"], "The haystack cannot be read from nowhere.txt"),
        (["lines", "--file", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["longbench", "--data-dir", "."], "There is no LongBench task in ."),
        (["perplexity", "--dataset", "nope"], "There is no dataset 'nope'"),
        (["samples", "--dataset", "needle", "--data-dir", "."], "--data-dir is for LongBench"),
        (["fit", "--dataset", "bad.jsonl"], "bad.jsonl, line 2: needs 'prompt'"),
        (["ablation", "--dataset", "bad.jsonl", "--sizes", "32"], "Size 32 is not above"),
        (["perplexity", "--dataset", "unanswered.jsonl"], "Row 'r2' has no answer"),
        (["clusters", "--dataset", "bad.jsonl"], "bad.jsonl, line 2"),
        (["clusters", "--dataset", "bad.jsonl", "--profile", "nowhere.json"], "no profile nowhere.json"),
        (["needle", "-o", "."], "it is a folder; name a file in it"),
        (["needle", "-o", "/dev/null"], "it is not a regular file"),
        (["needle", "-o", "bad.jsonl"], "bad.jsonl, line 1: is not a record"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_before_the_model_is_loaded(
    run: Run, args: Sequence[str], problem: str
) -> None:
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{"answer": "no prompt"}\n')
    rows = [{"id": f"r{n}", "prompt": f"where is {n}?", "answers": ["here"] * (n < 2)} for n in range(3)]
    Path("unanswered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = run("eval", *args, "--model", "no/such/model")
    assert finished.code == 1
    assert finished.out == ""
    last = finished.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert problem in last
    assert not Path("runs").exists() or not list(Path("runs").glob("*.jsonl"))


def test_a_library_that_is_no_text_file(run: Run) -> None:
    Path("tale.txt").write_bytes(b"\xff\xfe")
    finished = run("eval", "needle", "--haystack", "tale.txt", "--model", "no/such/model")
    assert finished.code == 1
    assert "is not UTF-8 text (byte 0)" in finished.err


# Whole runs.


def test_needle_as_one_document(needle: Callable[..., Finished], model_folder: Path) -> None:
    # Twice the same size, written otherwise, is measured once.
    finished = needle("--methods", "h2o+decode,topk", "--sizes", "48,64,048", "--json")
    assert finished.code == 0, finished.err
    document = finished.json()
    assert document["results"] == f"runs/needle-{model_folder.name}.jsonl"
    (group,) = document["groups"]
    assert group["bench"] == "needle"
    means = {
        (it["method"], it["size"]): it
        for it in group["means"]
        if it["metric"] == "accuracy" and not it["labels"]
    }
    assert set(means) == {
        ("full", None), *((name, size) for name in ("h2o+decode", "topk") for size in (48, 64)),
    }  # fmt: skip
    measured = results(document["results"])
    assert len(measured) == 2 * 5
    assert {it.labels["depth"] for it in measured} == {0, 1}
    assert {(it.method, it.parameters.get("evict_while_decoding")) for it in measured} == {
        ("full", None), ("topk", None), ("h2o+decode", True),
    }  # fmt: skip
    assert all(270 < it.prompt_tokens <= 300 and it.text is not None for it in measured)
    assert finished.err.replace("\n", "").isprintable()
    for expected in (
        f"{model_folder} (LlamaForCausalLM, 2 layers, 4 query and 2 KV heads), float32 on cpu",
        "run      2 prompts, 10 results",
        "Measuring 10/10",
        f"clusterprof report {document['results']} -o report.html",
    ):
        assert expected in finished.err


def test_people_get_tables_on_stdout(needle: Callable[..., Finished]) -> None:
    finished = needle()
    assert finished.code == 0, finished.err
    for expected in ("accuracy", "rouge1", "snapkv", "topk", "full", "95 % intervals"):
        assert expected in finished.out.lower() or expected in finished.out
    assert "Measuring" not in finished.out


def test_a_rerun_goes_on_where_it_was(needle: Callable[..., Finished]) -> None:
    first = needle("-o", "mine.jsonl", "--json")
    again = needle("-o", "mine.jsonl", "--json")
    assert again.code == first.code == 0
    assert again.out == first.out
    assert "run      2 prompts, 6 results, 6 of them found in the file" in again.err
    more = needle("-o", "mine.jsonl", "--methods", "snapkv,topk,streaming_llm", "--samples", 2)
    assert more.code == 0
    assert "run      4 prompts, 16 results, 6 of them found in the file" in more.err
    assert len(results("mine.jsonl")) == 16
    # Another seed has other prompts.
    other = needle("-o", "mine.jsonl", "--seed", 1)
    assert "6 results\n" in other.err
    assert len(results("mine.jsonl")) == 22


def test_lengths_beyond_the_context_are_left_out(needle: Callable[..., Finished]) -> None:
    finished = needle("--tokens", "300,500")
    assert finished.code == 0
    assert "2 left out, because they would have to be cut" in finished.err
    finished = needle("--tokens", "500")
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("error: No prompt is left to measure anything on")


def test_sizes_with_nothing_to_compress_are_refused(needle: Callable[..., Finished]) -> None:
    finished = needle("--sizes", "300,400")
    assert finished.code == 1
    assert re.search(
        r"Every prompt fits in the smallest size of 300 \(the longest has \d+ tokens\)",
        finished.err.splitlines()[-1],
    )
    assert needle("--sizes", "300,48").code == 0


def test_the_full_cache_alone_is_a_run_too(needle: Callable[..., Finished]) -> None:
    finished = needle("--methods", "full", "--json")
    assert finished.code == 0
    assert {it.method for it in results(finished.json()["results"])} == {"full"}


def test_generated_lines(run: Run, model_folder: Path) -> None:
    finished = run(
        "eval", "lines", "--model", model_folder, "--tokens", 420, "--samples", 2, *SMALL, "--json"
    )
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert {it.labels["tokens"] for it in measured} == {420}
    assert len(measured) == 2 * 3
    assert all(it.scores.keys() == {"accuracy"} for it in measured)


def test_lines_of_longevals_files(run: Run, model_folder: Path) -> None:
    paths = []
    for count in (3, 5):
        lines = "\n".join(f"line a-{n}: REGISTER_CONTENT is <{count}{n}>" for n in range(count))
        rows = [
            {
                "expected_number": 10 * count + n,
                "num_lines": count,
                "prompt": f"{lines}\nWhat is in line a-{n}?",
            }
            for n in range(3)
        ]
        paths.append(Path(f"{count}_lines.jsonl"))
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = run(
        "eval", "lines", "--model", model_folder, "--file", paths[0], "--file", paths[1], "--samples", 2,
        *SMALL, "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert [it.labels["lines"] for it in measured] == [3] * 6 + [5] * 6
    assert {len(it.references) for it in measured} == {1}


def test_perplexity(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run(
        "eval", "perplexity", "--dataset", asked_file, "--model", model_folder, *SMALL,
        "--methods", "topk,streaming_llm+decode", "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert len(measured) == 4 * 3
    assert all(it.scores.keys() == {"loss"} and it.text is None for it in measured)
    assert {it["metric"] for it in finished.json()["groups"][0]["means"]} == {"loss", "perplexity"}
    assert {it.dataset for it in measured} == {str(asked_file)}
    losses = {name: {it.scores["loss"] for it in measured if it.prompt == name} for name in ("q0", "small")}
    assert {name: len(different) for name, different in losses.items()} == {"q0": 3, "small": 1}
    shown = run("eval", "perplexity", "--dataset", asked_file, "--model", model_folder, *SMALL)
    assert "perplexity" in shown.out.lower()


def test_answers_of_a_single_token_have_no_perplexity(run: Run, model_folder: Path) -> None:
    rows = [{"prompt": places(25, n), "answers": [answer]} for n, answer in enumerate(("b", "by", "c"))]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", "perplexity", "--dataset", "rows.jsonl", "--model", model_folder, *SMALL]
    finished = run(*command, "--json")
    assert finished.code == 0, finished.err
    assert "prompts  2 left out, because their answers end with the first token" in finished.err
    assert len(results(finished.json()["results"])) == 3
    Path("rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "No prompt is left to measure anything on" in run(*command).err


def test_samples_side_by_side(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run(
        "eval", "samples", "--dataset", asked_file, "--model", model_folder, *SMALL, "--samples", 2, "--json"
    )
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert len({it.prompt for it in measured}) == 2
    assert all(it.references == ("by the moor", "at the bay") for it in measured)
    assert all(it.text is not None and "rouge_l" in it.scores for it in measured)


def test_samples_are_as_long_as_was_asked_for(run: Run, model_folder: Path, asked_file: Path) -> None:
    command = ["eval", "samples", "--dataset", asked_file, "--model", model_folder, *SMALL, "--samples", 1]
    for options, most in (([], 6), (["--decode-tokens", 3], 3)):
        finished = run(*command, *options, "-o", f"{most}.jsonl")
        assert finished.code == 0, finished.err
        # One token per character, and an end is possible at any of them.
        assert 0 < max(len(it.text or "") for it in results(f"{most}.jsonl")) <= most
    groups = run(*command, "--decode-tokens", 3, "-o", "6.jsonl", "--json").json()["groups"]
    assert [(it["settings"], it["prompts"]) for it in groups] == [({"decode_tokens": 3}, 1)]
    assert len(results("6.jsonl")) == 6
    shown = run("report", "6.jsonl", "--json").json()["groups"]
    assert [(it["settings"], it["prompts"]) for it in shown] == [({}, 1), ({"decode_tokens": 3}, 1)]


def test_samples_without_references(run: Run, model_folder: Path, dataset_file: Path) -> None:
    finished = run("eval", "samples", "--dataset", dataset_file, "--model", model_folder, *SMALL)
    assert finished.code == 0, finished.err
    measured = results(f"runs/samples-{model_folder.name}.jsonl")
    assert all(it.scores == {} and it.references == () for it in measured)


def test_long_prompts_are_cut_or_left_out(run: Run, model_folder: Path, asked_file: Path) -> None:
    command = ["eval", "samples", "--dataset", asked_file, "--model", model_folder, *SMALL, "--samples", 4]
    cut = run(*command, "--max-tokens", 100, "--json")
    assert "prompts  3 cut in the middle to fit" in cut.err
    assert max(it.prompt_tokens for it in results(cut.json()["results"])) == 100
    assert all(("cut" in it.labels) == (it.prompt_tokens == 100) for it in results(cut.json()["results"]))
    assert cut.json()["groups"][0]["prompts_cut"] == 3
    whole = run(*command, "--max-tokens", 150, "--whole", "-o", "whole.jsonl")
    assert whole.code == 0, whole.err
    assert re.search(r"prompts  [12] left out, because they would have to be cut", whole.err)
    assert max(it.prompt_tokens for it in results("whole.jsonl")) < 150
    fitting = {it.prompt for it in results("whole.jsonl")}
    # As many as are asked for, whichever rows are drawn first.
    for seed in range(3):
        file = f"{seed}.jsonl"
        fewer = [*command[:-1], len(fitting), "--max-tokens", 150, "--whole", "--seed", seed, "-o", file]
        assert run(*fewer).code == 0
        assert {it.prompt for it in results(file)} == fitting


@pytest.mark.parametrize("bench", ["fit", "hit-rate", "ablation"])
def test_generated_prompts_beyond_the_context_are_cut_and_counted(
    run: Run, model_folder: Path, bench: str
) -> None:
    options = ["--window", 8] if bench == "hit-rate" else ["--window", 8, "--sizes", 48]
    finished = run(
        "eval", bench, "--dataset", "lines", "--tokens", 600, "--model", model_folder, *options,
        "--samples", 2, "--decode-tokens", 4,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "prompts  2 cut in the middle to fit" in finished.err
    assert "2 prompts were longer than the model or --max-tokens allows and lost the middle." in finished.out
    assert {it.prompt_tokens for it in results(f"runs/{bench}-{model_folder.name}.jsonl")} == {508}


def test_fit_of_every_method(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run(
        "eval", "fit", "--dataset", asked_file, "--model", model_folder, *SMALL,
        "--methods", ",".join(method_names()), "--decode-tokens", 4, "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    # The prompt that fits, and the full cache, have nothing to be compared.
    assert len(measured) == 3 * len(method_names())
    assert {it.method for it in measured} == set(method_names())
    assert "results, 0" not in finished.err
    assert f"Measuring {len(measured)}/{len(measured)}" in finished.err
    for it in measured:
        assert 0 < it.scores["cosine"] <= 1.001
        heads = it.curves["cosine_by_head"]
        assert isinstance(heads, list)
        assert [len(layer) for layer in heads if isinstance(layer, list)] == [4, 4]
    again = run("eval", "fit", "--dataset", asked_file, "--model", model_folder, *SMALL, "--decode-tokens", 4)
    assert "6 of them found in the file" in again.err
    assert "cosine" in again.out.lower()


@pytest.mark.parametrize("bench", ["fit", "hit-rate", "ablation"])
def test_captures_are_bounded_and_can_be_cleaned(
    run: Run, model_folder: Path, asked_file: Path, bench: str
) -> None:
    sizes = [] if bench == "hit-rate" else ["--sizes", 48]
    command = [
        "eval", bench, "--dataset", asked_file, "--model", model_folder, "--window", 8, *sizes,
        "--decode-tokens", 4, "--samples", 4,
    ]  # fmt: skip
    assert run(*command, "--capture-memory", "1KB").code == 0
    # That of the prompt which was measured last.
    assert len(run("captures", "ls", "--json").json()["captures"]) == 1
    assert run("captures", "clean", "--json").json()["deleted"] == 1
    assert run(*command, "-o", "again.jsonl").code == 0
    assert len(run("captures", "ls", "--json").json()["captures"]) >= 3


def test_hit_rate_over_lengths(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run(
        "eval", "hit-rate", "--dataset", asked_file, "--model", model_folder, "--window", 8,
        "--decode-tokens", 70, "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert [it.method for it in measured] == ["full"] * 4
    assert all(0 <= it.scores["hit_rate"] <= 1 for it in measured)


def test_an_answer_longer_than_the_context_is_refused(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run("eval", "hit-rate", "--dataset", asked_file, "--model", model_folder)
    assert finished.code == 1
    assert "An answer of 512 tokens leaves no room" in finished.err
    assert "lower --decode-tokens" in finished.err


def test_ablation(run: Run, model_folder: Path, asked_file: Path) -> None:
    finished = run(
        "eval", "ablation", "--dataset", asked_file, "--model", model_folder, "--sizes", "40,48",
        "--window", 8, "--samples", 1, "--decode-tokens", 4, "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert {it.size for it in measured} == {40, 48}
    ngrams = {it.labels["n"] for it in measured if it.method == "ngram"}
    assert ngrams == {1, 2, 3, 4}
    assert len({it.labels["theta"] for it in measured if it.method == "clusterattn"}) > 10
    assert len({it.labels["num_block"] for it in measured if it.method == "clusterattn"}) == 10


@pytest.fixture
def longbench_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "longbench"
    folder.mkdir()
    for task in ("qasper", "trec"):
        rows = [
            {
                "input": "Where is it?" if task == "qasper" else "Question: Where is it?\nType:",
                "context": places(20, n),
                "answers": ["Location"],
                "length": 20,
                "dataset": task,
                "language": "en",
                "all_classes": ["Location", "Date"] if task == "trec" else None,
                "_id": f"{task}{n}" * 4,
            }
            for n in range(3)
        ]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_longbench_of_what_is_there(run: Run, model_folder: Path, longbench_folder: Path) -> None:
    command = ["eval", "longbench", "--data-dir", longbench_folder, "--model", model_folder, *SMALL]
    finished = run(*command, "--samples", 2, "--max-tokens", 300, "--json")
    assert finished.code == 0, finished.err
    measured = results(finished.json()["results"])
    assert len(measured) == 2 * 2 * 3
    assert {(it.labels["task"], it.labels["group"]) for it in measured} == {
        ("qasper", "Single-Document QA"), ("trec", "Few-shot Learning"),
    }  # fmt: skip
    assert all(0 <= it.scores["score"] <= 100 for it in measured)
    missing = run(*command, "--tasks", "qasper,lcc")
    assert missing.code == 1
    assert "lcc" in missing.err


def test_a_task_without_a_whole_prompt_is_named(run: Run, model_folder: Path, longbench_folder: Path) -> None:
    rows = [json.loads(line) for line in (longbench_folder / "trec.jsonl").read_text().splitlines()]
    (longbench_folder / "qasper.jsonl").unlink()
    for task, words in (("hotpotqa", 10), ("trec", 200)):
        changed = [{**row, "dataset": task, "context": places(words, 0)} for row in rows]
        (longbench_folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    command = ["eval", "longbench", "--data-dir", longbench_folder, "--model", model_folder, *SMALL]
    finished = run(*command, "--samples", 1, "--whole")
    assert finished.code == 0, finished.err
    assert "prompts  none left of trec, so no result is about that" in finished.err
    assert "run      1 prompt, " in finished.err
    assert "The mean of the means of 1 task;" in " ".join(finished.out.split())


@pytest.mark.parametrize(
    ("task", "changes", "problem"),
    [
        ("qasper", {"answers": []}, "has no answers to score against; leave it out"),
        ("qasper", {"answers": [""]}, "has no answers to score against; leave it out"),
        ("trec", {"all_classes": None}, "has no 'all_classes'"),
        ("passage_retrieval_en", {"answers": ["7"]}, "has the answer '7'; it has to be like 'Paragraph 7'"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_rows_of_longbench_that_cannot_be_scored_are_found_before_the_model_is_loaded(
    run: Run, longbench_folder: Path, task: str, changes: dict[str, Any], problem: str, last: bool
) -> None:
    path = longbench_folder / f"{task}.jsonl"
    rows = [json.loads(line) for line in (longbench_folder / "trec.jsonl").read_text().splitlines()]
    rows = [row | {"answers": ["Paragraph 7"]} if task.startswith("passage") else row for row in rows]
    rows[-last] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished = run("eval", "longbench", "--data-dir", longbench_folder, "--model", "no/such/model")
    assert finished.code == 1
    assert f"error: Row '{rows[-last]['_id']}' of {task} {problem}" in finished.err.splitlines()[-1]
    assert "Loading" not in finished.err


@pytest.mark.parametrize("plot_format", ["svg", "png"])
def test_pictures_of_clusters(run: Run, model_folder: Path, asked_file: Path, plot_format: str) -> None:
    finished = run(
        "eval", "clusters", "--dataset", asked_file, "--model", model_folder, "--size", 48, "--layers", "1",
        "--format", plot_format, "--decode-tokens", 4, "-o", "new/pictures",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert finished.out.splitlines() == [
        f"new/pictures/clusters-layer-1.{plot_format}", f"new/pictures/decode-attention-layer-1.{plot_format}",
    ]  # fmt: skip
    assert all(Path(path).stat().st_size > 5000 for path in finished.out.splitlines())


def test_a_picture_of_a_prompt_that_was_cut_says_so(run: Run, model_folder: Path) -> None:
    finished = run(
        "eval", "clusters", "--dataset", "lines", "--tokens", 600, "--model", model_folder, "--size", 48,
        "--layers", "1", "--decode-tokens", 4,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "prompts  1 cut in the middle to fit" in finished.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--size", "300"], "fits in size 300, so there are no clusters to draw"),
        (["--size", "48", "--layers", "7"], "layer 7"),
        (["--size", "16"], "with a window of 32 it must be at least 33"),
    ],
)
def test_clusters_that_cannot_be_drawn(
    run: Run, model_folder: Path, asked_file: Path, options: Sequence[str], problem: str
) -> None:
    finished = run(
        "eval", "clusters", "--dataset", asked_file, "--model", model_folder, "--decode-tokens", 4, *options
    )
    assert finished.code == 1
    assert problem in finished.err.splitlines()[-1]


def test_where_no_pictures_can_be_is_said_before_anything_runs(run: Run) -> None:
    Path("file").touch()
    finished = run("eval", "clusters", "--model", "nowhere", "--size", "48", "-o", "file")
    assert finished.code == 2
    assert "--output" in finished.err


# Profiles.


def edited(profile: Path, path: Path, section: str, **changes: Any) -> Path:
    document = json.loads(profile.read_text(encoding="utf-8"))
    document[section] |= changes
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_profile_takes_part_at_its_size(needle: Callable[..., Finished], profile_file: Path) -> None:
    finished = needle("--methods", f"topk,{profile_file}", "--sizes", "64", "--json")
    assert finished.code == 0, finished.err
    cells = {(it.method, it.size) for it in results(finished.json()["results"])}
    assert cells == {("full", None), ("topk", 48), ("topk", 64), (f"clusterattn ({profile_file.stem})", 48)}


def test_without_sizes_those_of_the_profiles_count(
    run: Run, model_folder: Path, tale: Path, profile_file: Path
) -> None:
    finished = run(
        "eval", "needle", "--model", model_folder, "--haystack", tale, "--tokens", "300", "--depths", 1,
        "--methods", f"topk,{profile_file}", "--json",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert {it.size for it in results(finished.json()["results"])} == {None, 48}


def test_the_profile_of_another_model_is_refused(
    needle: Callable[..., Finished], profile_file: Path, tmp_path: Path
) -> None:
    other = edited(profile_file, tmp_path / "other.json", "model", num_hidden_layers=7)
    finished = needle("--methods", f"topk,{other}")
    assert finished.code == 1
    assert "was made for another model (num_hidden_layers: profile 7, model 2); tune one" in finished.err
    assert "--force" not in finished.err
    assert "Measuring" not in finished.err


def test_clusters_of_a_profile(
    run: Run, model_folder: Path, asked_file: Path, profile_file: Path, tmp_path: Path
) -> None:
    command = ["eval", "clusters", "--dataset", asked_file, "--model", model_folder]
    finished = run(*command, "--profile", profile_file, "--layers", "0", "--decode-tokens", 4)
    assert finished.code == 0, finished.err
    refused = run(*command, "--profile", profile_file, "--size", 64)
    assert refused.code == 2
    assert "the profile's is 48" in said(refused)
    snapkv = edited(profile_file, tmp_path / "s.json", "compression", method={"name": "topk"})
    refused = run(*command, "--profile", snapkv)
    assert refused.code == 2
    assert "it is one of topk, which has no clusters" in said(refused)


def test_a_profile_that_was_tuned_again_is_another_method(
    needle: Callable[..., Finished], profile_file: Path, run: Run
) -> None:
    mine = Path("mine.json")
    found = []
    for theta in (0.01, 0.02):
        method = {"name": "clusterattn", "num_block": 4, "theta": theta}
        edited(profile_file, mine, "compression", method=method)
        finished = needle("--methods", f"topk,{mine}", "--json")
        assert finished.code == 0, finished.err
        found.append({it["method"] for it in finished.json()["groups"][0]["means"]})
    assert found[0] == {"full", "topk", "clusterattn (mine)"}
    names = {f"clusterattn (mine), theta {theta}" for theta in (0.01, 0.02)}
    assert found[1] == {"full", "topk", *names}
    (group,) = finished.json()["groups"]
    assert {it["parameters"]["theta"] for it in group["methods"] if it["method"] in names} == {0.01, 0.02}
    page = run("report", finished.json()["results"])
    assert page.code == 0, page.err
    assert all(name in Path("report.html").read_text() for name in names)


def test_what_a_profile_was_tuned_on_is_known_under_any_name(
    run: Run, model_folder: Path, dataset_file: Path, profile_file: Path
) -> None:
    Path("link.jsonl").symlink_to(dataset_file)
    Path("copy.jsonl").write_bytes(dataset_file.read_bytes())
    options = ["--model", model_folder, "--methods", profile_file, "--window", 8, "--decode-tokens", 2]
    for name in (dataset_file, "link.jsonl", "./link.jsonl", "copy.jsonl"):
        finished = run("eval", "fit", "--dataset", name, *options, "-o", "mine.jsonl")
        assert finished.code == 0, finished.err
        assert "was tuned on 4 of these 4 prompts" in finished.err
    rows = dataset_file.read_text().splitlines(keepends=True)
    Path("other.jsonl").write_text("".join(rows[:2]))
    assert "was tuned on" not in run("eval", "fit", "--dataset", "other.jsonl", *options).err


def test_methods_that_are_added_are_shown_beside_those_that_are_there(
    needle: Callable[..., Finished],
) -> None:
    needle("--methods", "topk", "-o", "mine.jsonl")
    finished = needle("--methods", "h2o", "--sizes", "64", "-o", "mine.jsonl", "--json")
    assert "run      2 prompts, 4 results, 2 of them found in the file" in finished.err
    cells = {(it["method"], it["size"]) for it in finished.json()["groups"][0]["means"]}
    assert cells == {("full", None), ("topk", 48), ("h2o", 64)}
    # Those of other prompts are not.
    other = needle("--methods", "snapkv", "--seed", 1, "-o", "mine.jsonl", "--json")
    cells = {(it["method"], it["size"]) for it in other.json()["groups"][0]["means"]}
    assert cells == {("full", None), ("snapkv", 48)}


# What goes wrong on the way.


def test_ctrl_c_keeps_what_is_measured_and_the_same_command_goes_on(
    needle: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = GenerationBenchmark.measure
    begun: list[str] = []

    def pressed(*args: Any) -> Any:
        begun.append("")
        for result in measure(*args):
            yield result
            # In the second prompt, after its first result.
            if len(begun) == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GenerationBenchmark, "measure", pressed)
        finished = needle("--json", "-o", "mine.jsonl")
    assert finished.code == 1
    assert finished.out == ""
    # Its first result was yielded, but not yet written.
    assert finished.err.splitlines()[-1] == (
        "error: Interrupted: 4 of 6 results are in mine.jsonl; run the same command again to go on from there."
    )
    assert len(results("mine.jsonl")) == 4
    again = needle("--json", "-o", "mine.jsonl")
    assert "4 of them found in the file" in again.err
    whole = needle("--json", "-o", "whole.jsonl").json()
    assert again.json()["groups"] == whole["groups"]


def test_a_prompt_that_fails_is_named_and_the_run_goes_on(
    needle: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = GenerationBenchmark.measure

    def fails(self: GenerationBenchmark, session: Any, task: Any, entering: Any) -> Any:
        if task.labels["depth"] == 0:
            raise CompressionError("attention of layer 1 is not finite")
        return measure(self, session, task, entering)

    monkeypatch.setattr(GenerationBenchmark, "measure", fails)
    finished = needle("--json")
    assert finished.code == 0
    assert "300-0.000-0-0 is left out: attention of layer 1 is not finite" in finished.err
    assert {it.labels["depth"] for it in results(finished.json()["results"])} == {1}


def test_if_every_prompt_fails_that_is_an_error(
    needle: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise CompressionError("not finite")

    monkeypatch.setattr(GenerationBenchmark, "measure", fails)
    finished = needle("--json")
    assert finished.code == 1
    assert finished.out == ""
    assert finished.err.splitlines()[-1] == "error: No prompt could be measured; the reasons are above."


def test_a_question_that_is_not_known_cannot_be_the_window(
    run: Run, model_folder: Path, dataset_file: Path
) -> None:
    finished = run(
        "eval", "samples", "--dataset", dataset_file, "--model", model_folder, *SMALL, "--window", "query"
    )
    assert finished.code == 1
    assert re.search(r"are its question is not known; give rows with", finished.err.splitlines()[-1])


def test_a_file_that_another_process_adds_to_is_left_to_it(needle: Callable[..., Finished]) -> None:
    with open_run(Path("mine.jsonl")):
        finished = needle("-o", "mine.jsonl")
    assert finished.code == 1
    assert "Another process is adding to mine.jsonl" in finished.err
    assert "Measuring" not in finished.err


def test_a_full_disk_is_a_sentence(needle: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        finished = needle("-o", "mine.jsonl")
    assert finished.code == 1
    assert "No space left on device" in finished.err.splitlines()[-1]
    assert needle("-o", "mine.jsonl").code == 0


def test_a_haystack_that_is_too_short(needle: Callable[..., Finished]) -> None:
    Path("short.txt").write_text("One. Two.")
    finished = needle("--haystack", "short.txt")
    assert finished.code == 1
    assert "The haystack has 2 sentences" in finished.err
