"""`clusterprof tune` with several sizes, and with prompts held out."""

import errno
import json
import shlex
from pathlib import Path
from random import Random
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.errors import CompressionError
from clusterprof.profiling.search import search
from clusterprof.profiling.spaces import SearchSpace
from tests.cli.conftest import WORDS, Finished, Run, _finish

QUICK = ["--window", "8", "--decode-tokens", "4", "--trials", "3"]
SIZES = ["--size", "64", "--size", "48"]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows of 100 to 250 tokens."""
    rng = Random(2)
    rows = [{"id": f"r{n}", "prompt": " ".join(rng.choices(WORDS, k=22 + 2 * n))} for n in range(12)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def command(rows_file: Path, model_folder: Path) -> list[object]:
    """Without sizes: six rows are tuned on, five others judge."""
    data = ["--dataset", rows_file, "--samples", 6, "--holdout", 5]
    return ["tune", *data, "--model", model_folder, *QUICK]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command: list[object]) -> Finished:
    folder = tmp_path_factory.mktemp("sizes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERPROF_CACHE", str(folder / "cache"))
        return _finish(*command, *SIZES, "--output", folder / "made" / "here", "--json")


@pytest.fixture(scope="module")
def documents(finished: Finished) -> list[Any]:
    assert finished.code == 0, finished.err
    found: list[Any] = finished.json()["profiles"]
    return found


def test_each_size_has_a_profile_in_the_folder(documents: list[Any], rows_file: Path) -> None:
    paths = [Path(document["profile"]) for document in documents]
    assert [path.name for path in paths] == ["rows-48.json", "rows-64.json"]
    assert {path.parent.name for path in paths} == {"here"}
    assert sorted(paths[0].parent.iterdir()) == paths
    for path, document, size in zip(paths, documents, (48, 64), strict=True):
        profile = Profile.load(path)
        assert profile.compression.size == size
        assert profile.compression.method.model_dump() == document["best"]["method"]


def test_json_has_the_held_out_scores_and_differences(documents: list[Any]) -> None:
    for document in documents:
        results = Profile.load(document["profile"]).results
        assert results.held_out is not None
        assert document["judged_on"] == "held out"
        assert document["best"]["tuning"] == results.tuning.value
        assert document["best"]["held_out"] == results.held_out.value
        assert document["best"]["held_out"] == pytest.approx(document["methods"][0]["log_kl"])
        assert (document["samples"]["used"], document["samples"]["held_out"]) == (6, 5)
        for method, baseline in zip(document["methods"][1:], results.baselines, strict=True):
            if method["label"] == "full":
                assert method["difference"] is baseline.difference is None
            else:
                found = method["difference"]
                assert baseline.difference is not None
                assert found["mean"] == baseline.difference.value
                assert (found["low"], found["high"]) == baseline.difference.interval_95
                assert found["samples"] == 5


def test_the_log_goes_through_the_sizes(finished: Finished, documents: list[Any]) -> None:
    told = [
        "sizes    48, 64 tokens kept per head",
        "6 to tune on",
        "5 to judge by",
        "Capturing 11/11",
        "Searching snapkv at 48 3/3",
        "Searching clusterattn at 48 3/3",
        "48 tokens kept per head, 5 prompts not tuned on",
        "log_kl, tuned minus other",
        f"Profile written to {documents[0]['profile']}",
        "Searching clusterattn at 64 3/3",
        "64 tokens kept per head, 5 prompts not tuned on",
        f"Profile written to {documents[1]['profile']}",
        "tuned, by size",
    ]
    places = [finished.err.find(text) for text in told]
    assert -1 not in places
    assert places == sorted(places)
    assert finished.err.count("Capturing 0/11") == 1
    assert finished.err.replace("\n", "").isprintable()
    assert max(len(line) for line in finished.err.splitlines() if line.startswith(("│", "┃"))) <= 80
    rows = [line.split("│") for line in finished.err.partition("tuned, by size")[2].splitlines()]
    for document, row in zip(documents, [row for row in rows if len(row) > 1], strict=True):
        scores = document["methods"][0]
        assert [cell.strip() for cell in row[1:3]] == [
            str(Profile.load(document["profile"]).compression.size), f"{scores['log_kl']:.4f}",
        ]  # fmt: skip


def test_a_profile_shows_what_is_in_it(run: Run, documents: list[Any]) -> None:
    results = Profile.load(documents[0]["profile"]).results
    said = " ".join(run("profiles", "show", documents[0]["profile"]).out.split())
    assert results.held_out is not None
    for score in (results.tuning, results.held_out):
        assert f"log_kl {score.value:.4f} on {score.samples} samples (95 % interval" in said
    assert "On the 5 held-out samples, too few to show a difference:" in said
    for method in documents[0]["methods"][1:-1]:
        assert f"{method['difference']['mean']:+.4f}" in said


def test_stdout_has_a_path_for_each_size(run: Run, command: list[object], model_folder: Path) -> None:
    finished = run(*command, *SIZES, "--size", 48, "--trials", 1, "--holdout", 0)
    assert finished.code == 0, finished.err
    folder = Path("profiles") / model_folder.name
    assert finished.out.splitlines() == [str(folder / "rows-48.json"), str(folder / "rows-64.json")]
    assert all(Path(line).is_file() for line in finished.out.splitlines())
    assert "0 to judge by" in finished.err


def test_one_size_needs_a_file_and_several_a_folder(run: Run, command: list[object]) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    several = run(*command, *SIZES, "-o", "file")
    assert several.code == 1
    assert several.err == (
        "error: cannot write 2 profiles to file: it is a file; name a folder with --output.\n"
    )
    one = run(*command, "--size", 48, "-o", "folder")
    assert one.code == 1
    assert "it is a folder; name a file in it with --output" in one.err
    assert "Loading" not in one.err
    # The same size twice is one.
    assert run(*command, "--size", 48, "--size", 48, "--trials", 1, "-o", "one.json").out == "one.json\n"


def test_a_folder_with_a_folder_in_the_way_is_found_before_the_model_is_loaded(
    run: Run, command: list[object], rows_file: Path
) -> None:
    Path("out/rows-64.json").mkdir(parents=True)
    finished = run(*command, *SIZES, "-o", "out")
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith(
        "error: cannot write the profile out/rows-64.json: it is a folder"
    )
    assert "method   " not in finished.err


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Raise an error in the search at a size, after some finished trials."""

    def stop(error: BaseException, size: int = 64, after: int = 0) -> None:
        def stopping(study: Any, evaluator: Any, space: SearchSpace, **options: Any) -> None:
            # SnapKV's search comes first.
            if (space.size, space.default.name) != (size, "clusterattn"):
                search(study, evaluator, space, **options)
                return
            if after:
                search(study, evaluator, space, **{**options, "trials": after})
            raise error

        monkeypatch.setattr("clusterprof.profiling.tune.search", stopping)

    return stop


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            KeyboardInterrupt(),
            "Interrupted: the captures and the finished trials are kept; run the same command again",
        ),
        (CompressionError("Layer 3 is not finite."), "Layer 3 is not finite."),
    ],
    ids=["interrupt", "failure"],
)
def test_what_stops_the_second_size_keeps_the_first(
    run: Run, stopped: Any, command: list[object], error: BaseException, told: str
) -> None:
    stopped(error)
    finished = run(*command, *SIZES, "-o", "out")
    assert finished.code == 1
    assert told in finished.err.splitlines()[-1]
    assert finished.out == "out/rows-48.json\n"
    assert Profile.load("out/rows-48.json").compression.size == 48
    assert [path.name for path in Path("out").iterdir()] == ["rows-48.json"]

    document = run(*command, *SIZES, "-o", "out", "--json").json()
    assert document["error"].startswith(told)
    assert [entry["profile"] for entry in document["profiles"]] == ["out/rows-48.json"]


def test_an_error_at_the_first_size_leaves_no_document(run: Run, stopped: Any, command: list[object]) -> None:
    stopped(CompressionError("Layer 3 is not finite."), size=48)
    finished = run(*command, *SIZES, "-o", "out", "--json")
    assert (finished.code, finished.out) == (1, "")
    assert finished.err.splitlines()[-1] == "error: Layer 3 is not finite."


def test_one_more_size_goes_on_with_a_named_study(run: Run, command: list[object]) -> None:
    mine = [*command, "--study", "mine", "-o"]
    run(*mine, "one.json", "--size", 48)
    finished = run(*mine, "several", *SIZES)
    assert finished.code == 0, finished.err
    told = [line.partition(" (")[0] for line in finished.err.splitlines() if line.startswith("study")]
    before = "3 trials from before"
    assert sorted(told) == [
        f"study    mine-48, {before}", f"study    mine-48-snapkv, {before}",
        "study    mine-64", "study    mine-64-snapkv",
    ]  # fmt: skip


def test_ctrl_c_in_the_first_search_says_which_sizes_are_left(
    run: Run, stopped: Any, command: list[object]
) -> None:
    stopped(KeyboardInterrupt(), size=48, after=2)
    finished = run(*command, *SIZES, "--size", 80, "-o", "out", "--json")
    assert finished.code == 1
    [document] = finished.json()["profiles"]
    assert document["interrupted"] is True
    assert document["timings"]["trials"] == 2
    assert "Interrupted: the result rests on the 2 trials finished by then" in finished.err
    assert finished.err.splitlines()[-1] == "Not tuned yet: size 64, 80."
    assert "error" not in finished.json()
    assert [path.name for path in Path("out").iterdir()] == ["rows-48.json"]


def test_a_full_disk_at_the_second_size_keeps_the_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[object]
) -> None:
    save = Profile.save

    def full(profile: Profile, path: Path) -> None:
        if profile.compression.size == 64:
            monkeypatch.setattr("os.fsync", failing)
        save(profile, path)

    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Profile, "save", full)
    finished = run(*command, *SIZES, "-o", "out")
    assert finished.code == 1
    assert "No space left on device" in finished.err.splitlines()[-1]
    assert "64 tokens kept per head" in finished.err
    assert [path.name for path in Path("out").iterdir()] == ["rows-48.json"]


def test_the_command_to_try_a_profile_can_be_pasted(finished: Finished, documents: list[Any]) -> None:
    commands = [line for line in finished.err.splitlines() if line.startswith("  clusterprof apply")]
    assert [shlex.split(line)[3] for line in commands] == [document["profile"] for document in documents]


def test_a_plot_does_not_take_the_place_of_a_profile(run: Run, command: list[object]) -> None:
    finished = run(*command, "--size", 48, "-o", "one.svg", "--plot", "../work/one.svg")
    assert finished.code == 2
    assert "where the profile goes" in finished.err
    assert not Path("one.svg").exists()


def test_a_plot_that_cannot_be_written_is_in_the_document(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[object]
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "one.svg")

    monkeypatch.setattr("clusterprof.report.figures.save_plot", full)
    options = ["--size", 48, "--trials", 1, "-o", "one.json", "--plot", "one.svg", "--json"]
    finished = run(*command, *options)
    assert finished.code == 1
    assert [each["profile"] for each in finished.json()["profiles"]] == ["one.json"]
    assert finished.json()["error"] == "Cannot use one.svg: No space left on device."


def test_a_named_study_of_another_method_is_refused_before_snapkv_is_searched(
    run: Run, command: list[object]
) -> None:
    mine = [*command, "--size", 48, "--trials", 1, "--study", "mine", "-o", "one.json"]
    assert run(*mine, "--method", "topk").code == 0
    finished = run(*mine)
    assert finished.code == 1
    assert "was made with method topk, now clusterattn" in finished.err.splitlines()[-1]
    assert "Searching" not in finished.err
