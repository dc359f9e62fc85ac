import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.evaluation.records import Record, read_records
from tests.cli.conftest import QUICK, WORDS, Finished, Run, _finish

SIZE, WINDOW = 48, 8


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows of 100 to 240 tokens."""
    rng = Random(1)
    rows = [{"id": f"r{n}", "prompt": " ".join(rng.choices(WORDS, k=22 + 2 * n))} for n in range(10)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Tune = Callable[..., Path]


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Tune:
    """By the cosine, which leaves SnapKV as it is, so that it does not take part once more."""
    folder = tmp_path_factory.mktemp("profiles")

    def make(name: str, dataset: object, *options: object) -> Path:
        path = folder / f"{name}.json"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CLUSTERPROF_CACHE", str(folder / "cache"))
            finished = _finish(
                "tune", "--dataset", dataset, "--model", model_folder, *QUICK[:-2], *options,
                "--objective", "cosine", "--output", path,
            )  # fmt: skip
        assert finished.code == 0, finished.err
        return path

    return make


@pytest.fixture(scope="module")
def tuned(tune: Tune, rows_file: Path) -> Path:
    return tune("ours", rows_file, "--fraction", 0.4, "--holdout", 2)


def seen_by(*profiles: Path) -> set[str]:
    """The rows that were tuned on, or judged the result."""
    records = [Profile.load(path).dataset for path in profiles]
    return {name for record in records for name in (*record.sampled_ids, *record.held_out_ids)}


@pytest.fixture
def snapkv(tuned: Path, tmp_path: Path) -> Path:
    """As if tuned and judged on other rows of the same data."""
    seen = seen_by(tuned)
    one, other = [f"r{n}" for n in range(10) if f"r{n}" not in seen][:2]
    path = with_rows(tuned, tmp_path / "theirs.json", [min(seen), one], [other])
    return edited(path, path, "compression", method={"name": "snapkv"})


@pytest.fixture(scope="module")
def on_lines(tune: Tune) -> Path:
    return tune("lines", "lines", "--tokens", 400, "--samples", 2, "--holdout", 2)


@pytest.fixture
def compare(run: Run) -> Callable[..., Finished]:
    return lambda *args: run("compare", *args, "--decode-tokens", 4)


def results(finished: Finished) -> list[Record]:
    assert finished.code == 0, finished.err
    return read_records(Path(finished.json()["results"]))


def edited(profile: Path, path: Path, section: str, **changes: Any) -> Path:
    document = json.loads(profile.read_text(encoding="utf-8"))
    document[section] |= changes
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def with_rows(profile: Path, path: Path, sampled: Sequence[str], held_out: Sequence[str]) -> Path:
    """As if tuned and judged on these rows."""
    document = json.loads(profile.read_text(encoding="utf-8"))
    document["dataset"] |= {"sampled_ids": sampled, "held_out_ids": held_out}
    results = document["results"]
    # What the metrics are of.
    score = results["held_out"] | {"samples": 1}
    results |= {"tuning": score, "held_out": score if held_out else None}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_help_names_every_option(run: Run) -> None:
    finished = run("compare", "--help")
    assert finished.code == 0
    for option in (
        "PROFILE...",
        "--methods",
        "--samples",
        "--decode-tokens",
        "--output",
        "--model",
        "--json",
    ):
        assert option in finished.out


def test_no_row_that_was_tuned_or_judged_on_is_used(
    compare: Callable[..., Finished], tuned: Path, model_folder: Path
) -> None:
    finished = compare(tuned, "--json")
    measured = results(finished)
    record = Profile.load(tuned).dataset
    assert (len(record.sampled_ids), len(record.held_out_ids)) == (4, 2)
    seen = seen_by(tuned)
    assert len(seen) == 6
    assert {it.prompt for it in measured} == {f"r{n}" for n in range(10)} - seen
    assert finished.json()["results"] == f"runs/held-out-{model_folder.name}.jsonl"
    assert "run      4 prompts, 24 results" in finished.err
    assert finished.err.replace("\n", "").isprintable()


def test_baselines_have_the_profiles_size_and_window(compare: Callable[..., Finished], tuned: Path) -> None:
    finished = compare(tuned, "--json")
    measured = results(finished)
    assert {(it.method, it.size, it.window) for it in measured} == {
        ("full", None, None),
        *((name, SIZE, WINDOW) for name in ("clusterattn (ours)", "clusterattn", "snapkv", "topk", "streaming_llm")),
    }  # fmt: skip
    assert {it.bench for it in measured} == {"held-out"}
    for it in measured:
        # Nobody knows how to score such rows, so nothing is generated.
        assert it.scores.keys() == {
            "cosine",
            "cosine_padded",
            "attention_output",
            "kl",
            "agreement",
            "loss",
            "log_kl",
        }
        assert it.text is None
    (group,) = finished.json()["groups"]
    ours = next(
        it for it in group["means"] if (it["method"], it["metric"]) == ("clusterattn (ours)", "cosine")
    )
    mine = [it.scores["cosine"] for it in measured if it.method == "clusterattn (ours)"]
    assert ours["mean"] == pytest.approx(sum(mine) / len(mine))
    assert ours["low"] <= ours["mean"] <= ours["high"]


def test_what_the_tune_found_of_snapkv_takes_part(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    document = json.loads(tuned.read_text(encoding="utf-8"))
    snapkv = {"name": "snapkv", "kernel_size": 29, "pooling": "max", "importance": "max"}
    baselines = document["results"]["baselines"]
    baselines.append({**next(it for it in baselines if it["method"]["name"] == "snapkv"), "method": snapkv})
    path = edited(tuned, tmp_path / "ours.json", "results", baselines=baselines)
    measured = results(compare(path, "--methods", "snapkv", "--samples", 2, "--json"))
    theirs = [it for it in measured if it.method == "snapkv (beside ours)"]
    assert [(it.size, it.window) for it in theirs] == [(SIZE, WINDOW)] * 2
    kernels = {
        it.method: it.parameters["kernel_size"] for it in measured if it.parameters["name"] == "snapkv"
    }
    assert kernels == {"snapkv": 5, "snapkv (beside ours)": 29}


def test_people_get_tables(compare: Callable[..., Finished], tuned: Path) -> None:
    finished = compare(tuned, "--methods", "topk", "--samples", 3)
    assert finished.code == 0, finished.err
    assert "clusterattn (ours)" in finished.out
    assert "cosine" in finished.out.lower()
    assert "run      3 prompts, 9 results" in finished.err


def test_several_profiles_have_seen_what_any_has_seen(
    compare: Callable[..., Finished], tuned: Path, snapkv: Path
) -> None:
    measured = results(compare(tuned, snapkv, "--methods", "full", "--json"))
    seen = seen_by(tuned, snapkv)
    assert len(seen) == 8
    assert {it.prompt for it in measured} == {f"r{n}" for n in range(10)} - seen
    assert {it.method for it in measured} == {"full", "clusterattn (ours)", "snapkv (theirs)"}


def test_a_rerun_goes_on(compare: Callable[..., Finished], tuned: Path) -> None:
    first = compare(tuned, "--methods", "topk", "--json")
    again = compare(tuned, "--methods", "topk", "--json")
    assert again.out == first.out
    assert "12 of them found in the file" in again.err
    more = compare(tuned, "--methods", "topk,h2o,ngram", "--json")
    assert "20 results, 12 of them found in the file" in more.err
    assert len(results(more)) == 20


def test_generated_data_are_generated_again_and_scored(run: Run, on_lines: Path) -> None:
    command = ["compare", on_lines, "--samples", 3, "--methods", "topk", "--json"]
    finished = run(*command, "--decode-tokens", 40)
    measured = results(finished)
    seen = seen_by(on_lines)
    assert len(seen) == 4
    assert len({it.prompt for it in measured} - seen) == 3
    # As long as the task has them, and no longer.
    assert all("accuracy" in it.scores and len(it.text or "") <= 32 for it in measured)
    assert "not scored" not in finished.err


def test_answers_that_would_be_cut_are_not_scored(compare: Callable[..., Finished], on_lines: Path) -> None:
    finished = compare(on_lines, "--samples", 3, "--methods", "topk", "--json")
    assert not any("accuracy" in it.scores or it.text is not None for it in results(finished))
    assert (
        "Answers may have 32 tokens here and would be cut at 4, so they are not scored; use --decode-tokens 32."
        in finished.err
    )


def test_a_path_may_hold_a_comma(compare: Callable[..., Finished], tuned: Path, tmp_path: Path) -> None:
    path = tmp_path / "a,b" / "one, two.json"
    path.parent.mkdir()
    path.write_bytes(tuned.read_bytes())
    measured = results(compare(path, "--methods", "full", "--samples", 1, "--json"))
    assert {it.method for it in measured} == {"full", "clusterattn (one, two)"}


def test_captures_are_bounded(compare: Callable[..., Finished], run: Run, tuned: Path) -> None:
    finished = compare(tuned, "--methods", "topk", "--samples", 2, "--capture-memory", "1KB", "--json")
    assert len({it.prompt for it in results(finished)}) == 2
    # That of the prompt which was measured last.
    assert len(run("captures", "ls", "--json").json()["captures"]) == 1


def test_a_small_profile_needs_no_window_of_32(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    small = edited(tuned, tmp_path / "small.json", "compression", size=24)
    measured = results(compare(small, "--methods", "topk", "--samples", 1, "--json"))
    assert {(it.size, it.window) for it in measured} == {(None, None), (24, WINDOW)}


def test_profiles_of_one_file_by_two_names_are_of_the_same_data(
    compare: Callable[..., Finished], tuned: Path, snapkv: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(Profile.load(tuned).dataset.name)
    edited(snapkv, snapkv, "dataset", name=str(link))
    assert len(results(compare(tuned, snapkv, "--methods", "full", "--json"))) > 0


def test_rows_that_a_profile_among_the_methods_was_tuned_on_are_not_held_out(
    compare: Callable[..., Finished], tuned: Path, snapkv: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(Profile.load(tuned).dataset.name)
    edited(snapkv, snapkv, "dataset", name=str(link))
    finished = compare(tuned, "--methods", snapkv, "--json")
    seen = seen_by(tuned) | seen_by(snapkv)
    assert {it.prompt for it in results(finished)} == {f"r{n}" for n in range(10)} - seen
    assert "was tuned on" not in finished.err


def test_rows_of_longbench_that_cannot_be_scored_are_found_before_the_model_is_loaded(
    compare: Callable[..., Finished], tune: Tune, tmp_path: Path
) -> None:
    rows = [
        {
            "input": "Where?",
            "context": " ".join(Random(n).choices(WORDS, k=30)),
            "answers": ["ash"],
            "_id": f"q{n}",
        }
        for n in range(4)
    ]
    path = tmp_path / "qasper.jsonl"

    def write() -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows[2]["answers"] = []
    write()
    profile = tune("qasper", "qasper", "--data-dir", tmp_path, "--samples", 1, "--holdout", 1)
    seen = seen_by(profile)
    assert "q2" not in seen
    finished = compare(profile, "--data-dir", tmp_path, "--model", "no/such/model")
    assert "Row 'q2' of qasper has no answers to score against" in refusal(finished)
    assert "Loading" not in finished.err


# What is refused.


def refusal(finished: Finished) -> str:
    assert finished.code == 1
    assert finished.out == ""
    last = finished.err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ([], "Missing argument 'PROFILE...'"),
        (["--methods", "topk,"], "nothing empty in it"),
        (["--methods", "topk,h2o+decode"], "h2o+decode evicts while decoding, which is not measured here"),
        (["--samples", "0"], "1"),
        (["--sizes", "48"], "No such option"),
        (["--dtype", "int4"], "bfloat16"),
    ],
)
def test_wrong_usage(run: Run, tuned: Path, args: Sequence[str], allowed: str) -> None:
    finished = run("compare", *([tuned] if args else []), *args)
    assert finished.code == 2
    assert allowed in re.sub(r"[│\s]+", " ", finished.err)


def test_a_profile_that_evicts_while_decoding_is_refused(run: Run, tuned: Path, tmp_path: Path) -> None:
    method = {"name": "streaming_llm", "evict_while_decoding": True}
    finished = run("compare", edited(tuned, tmp_path / "d.json", "compression", method=method))
    assert finished.code == 2
    assert "streaming_llm (d) evicts while decoding" in re.sub(r"[│\s]+", " ", finished.err)


def test_what_cannot_be_compared_is_refused(
    compare: Callable[..., Finished], tuned: Path, on_lines: Path
) -> None:
    assert "There is no profile nowhere.json" in refusal(compare("nowhere.json"))
    assert "no method 'magic'" in refusal(compare(tuned, "--methods", "magic"))
    assert "takes part twice" in refusal(compare(tuned, tuned))
    assert re.search(
        r"tuned on different data \(.*rows\.jsonl, rows \w{8} and lines of 400 tokens, rows \w{8}\)",
        refusal(compare(tuned, on_lines)),
    )


def test_the_profile_of_another_model_is_refused(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    other = edited(tuned, tmp_path / "other.json", "model", head_dim=99)
    message = refusal(compare(other))
    assert "was made for another model (head_dim: profile 99, model 16); tune one for this model." in message


def test_a_profile_without_a_model_needs_one(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    nameless = edited(tuned, tmp_path / "nameless.json", "model", id="")
    assert "name one with --model" in refusal(compare(nameless))


def test_rows_that_are_not_the_tuned_ones_are_refused(
    compare: Callable[..., Finished], tuned: Path, on_lines: Path, tmp_path: Path
) -> None:
    rows = Path(Profile.load(tuned).dataset.name)
    changed = tmp_path / "rows.jsonl"
    changed.write_bytes(rows.read_bytes() + b'{"prompt": "one more lake by a moor"}\n')
    moved = edited(tuned, tmp_path / "moved.json", "dataset", name=str(changed))
    message = refusal(compare(moved))
    assert "are not those that the profiles were tuned on" in message
    assert "tune again" in message
    other_seed = edited(on_lines, tmp_path / "seed.json", "dataset", seed=3)
    assert "The rows of lines are not those" in refusal(compare(other_seed))


def test_data_of_which_nothing_is_held_out_are_refused(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    ids = [f"r{n}" for n in range(10)]
    for sampled, held_out in ((ids, []), (ids[:1], ids[1:])):
        everything = with_rows(tuned, tmp_path / "everything.json", sampled, held_out)
        assert re.search(
            r"tuned and judged on all 10 rows of .*rows\.jsonl, so none is left to compare them on; tune with a "
            "smaller --fraction or --holdout",
            refusal(compare(everything)),
        )


def test_data_that_are_gone_are_named_before_the_model_is_loaded(
    compare: Callable[..., Finished], tuned: Path, tmp_path: Path
) -> None:
    gone = edited(tuned, tmp_path / "gone.json", "dataset", name="/no/such/rows.jsonl")
    finished = compare(gone, "--model", "no/such/model")
    assert "There is no file /no/such/rows.jsonl" in refusal(finished)
    assert "Loading" not in finished.err


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(
    compare: Callable[..., Finished], tuned: Path
) -> None:
    assert "it is a folder" in refusal(compare(tuned, "-o", ".", "--model", "no/such/model"))
