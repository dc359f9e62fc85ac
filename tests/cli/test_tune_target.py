"""`clusterprof tune --target`: the smallest size that is good enough, or exit code 3."""

import json
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from clusterprof import Profile
from clusterprof.profiling.search import search
from clusterprof.profiling.spaces import SearchSpace
from clusterprof.profiling.target import Target
from tests.cli.conftest import WORDS, Finished, Run, _finish

# At a share of one half, five held-out prompts show a target that all of them meet.
SHARE = ["--target-share", 0.5]
SIZES = ["--size", 48, "--size", 80, "--size", 64]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[object]:
    """Without target and sizes: three rows are tuned on, five others judge; they have 100 to 200 tokens."""
    rng = Random(2)
    rows = [{"id": f"r{n}", "prompt": " ".join(rng.choices(WORDS, k=24 + 2 * n))} for n in range(9)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "tune", "--dataset", path, "--samples", 3, "--holdout", 5, "--model", model_folder,
        "--window", 8, "--decode-tokens", 4, "--trials", 1, *SHARE,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory, command: list[object]) -> Finished:
    folder = tmp_path_factory.mktemp("met")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERPROF_CACHE", str(folder / "cache"))
        target = ["--target", "kl=1000", "--plot", folder / "sizes.svg"]
        return _finish(*command, *SIZES, *target, "--output", folder / "made", "--json")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_target_that_all_sizes_meet(met: Finished) -> None:
    assert met.code == 0, met.err
    document = met.json()
    sizes = [Profile.load(each["profile"]).compression.size for each in document["profiles"]]
    assert sizes == [48, 64, 80]
    # Nobody named an objective, and this one finds what a target on the output asks for.
    assert {each["best"]["objective"] for each in document["profiles"]} == {"log_kl"}
    target = document["target"]
    assert {name: target[name] for name in ("objective", "value", "share", "smallest_size")} == {
        "objective": "kl", "value": 1000, "share": 0.5, "smallest_size": 48,
    }  # fmt: skip
    assert [each["size"] for each in target["sizes"]] == sizes
    for each in target["sizes"]:
        assert (each["prompts"], each["meeting"], each["met"]) == (5, 5, True)
        assert each["lower_bound"] == pytest.approx(0.05 ** (1 / 5))
        # Of five, all have to meet it: the worst one says what is reached.
        assert 0 < each["reached"] < 1000


def test_the_log_goes_from_the_largest_size_down(met: Finished) -> None:
    told = [
        "target   kl of at most 1000.0 for at least 50 % of prompts; the largest size is tuned first",
        "Searching clusterattn at 80 2/2",
        "Searching clusterattn at 64 2/2",
        "Searching clusterattn at 48 2/2",
        "tuned, by size",
        "target: kl of at most 1000.0 for at least 50 % of prompts",
        "Target met at size 48: kl is at most 1000.0 for 5 of 5 held-out prompts, so with 95 % confidence for at least "
        "54.9 % of all prompts like them (50 % asked for).",
        "Plot written to",
    ]
    places = [met.err.find(text) for text in told]
    assert -1 not in places
    assert places == sorted(places)
    assert max(len(line) for line in met.err.splitlines() if line.startswith(("│", "┃"))) <= 80
    assert "Not tuned" not in met.err


def test_the_plot_shows_the_target(met: Finished) -> None:
    plot = Path(met.json()["profiles"][0]["profile"]).parents[1] / "sizes.svg"
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_none_is_good_enough(run: Run, command: list[object]) -> None:
    finished = run(*command, *SIZES, "--target", "cosine=1", "-o", "out", "--json")
    assert finished.code == 3, finished.err
    document = finished.json()
    # What is tuned is kept, and smaller sizes are not tried.
    assert [path.name for path in Path("out").iterdir()] == ["rows-80.json"]
    assert document["target"]["smallest_size"] is None
    [tested] = document["target"]["sizes"]
    assert (tested["size"], tested["met"], tested["meeting"]) == (80, False, 0)
    reached = tested["reached"]
    [best] = document["profiles"]
    assert best["best"]["objective"] == "cosine"
    assert 0 < reached < best["best"]["held_out"] < 1
    assert (
        "Target not shown to be met at size 80, the largest: cosine is at least 1.0 for 0 of 5"
        in finished.err
    )
    assert f"What 50 % of prompts are shown to reach there is {reached:.4f}." in finished.err
    assert finished.err.splitlines()[-1] == "Not tuned, being smaller than that: size 48, 64."


def test_one_size_can_be_tested_too(run: Run, command: list[object]) -> None:
    finished = run(*command, "--size", 48, "--target", "agreement=0", "-o", "one.json")
    assert (finished.code, finished.out) == (0, "one.json\n")
    assert "Target met at size 48" in finished.err
    assert "largest" not in finished.err
    missed = run(*command, "--size", 48, "--target", "cosine=1", "-o", "one.json")
    assert missed.code == 3
    assert "Target not shown to be met at size 48: " in missed.err


def test_a_middle_size_is_the_smallest(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[object]
) -> None:
    check = Target.check
    verdicts = iter([True, True, False])

    def fixed(target: Target, scores: Any) -> Any:
        # All prompts meet the one goal, none the other.
        value = 1000.0 if next(verdicts) else 0.0
        return check(Target("kl", value, target.share), scores)

    monkeypatch.setattr(Target, "check", fixed)
    finished = run(*command, *SIZES, "--size", 40, "--target", "kl=0.05", "-o", "out", "--json")
    assert finished.code == 0, finished.err
    target = finished.json()["target"]
    assert [(each["size"], each["met"]) for each in target["sizes"]] == [(48, False), (64, True), (80, True)]
    assert target["smallest_size"] == 64
    assert "Target met at size 64: " in finished.err
    assert "It is not shown at size 48: kl is at most 0.05 for 0 of 5 held-out prompts" in finished.err
    assert "Not tuned, being smaller than that: size 40." in finished.err
    assert sorted(path.name for path in Path("out").iterdir()) == [f"rows-{n}.json" for n in (48, 64, 80)]


def test_too_few_prompts_are_refused(run: Run, command: list[object]) -> None:
    finished = run(*command, "--size", 48, "--target", "kl=1", "--target-share", 0.6)
    assert finished.code == 2
    assert "Loading" not in finished.err
    assert (
        "it takes at least 6 held-out prompts to show it for 60 % of prompts; raise --holdout from 5, or lower "
        "--target-share."
    ) in flat(finished.err.replace("│", " "))


def test_too_few_long_prompts_are_refused(run: Run, command: list[object]) -> None:
    finished = run(*command, "--size", 150, "--target", "kl=1")
    assert finished.code == 1
    assert "Capturing" not in finished.err
    assert "takes at least 5 held-out prompts to show at --size 150, and " in finished.err.splitlines()[-1]


@pytest.mark.parametrize(("after", "sizes"), [(0, ["80"]), (1, ["64", "80"])])
def test_ctrl_c_ends_it_as_without_a_target(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[object], after: int, sizes: list[str]
) -> None:
    def interrupted(study: Any, evaluator: Any, space: SearchSpace, **options: Any) -> None:
        here = space.size == 64 and space.default.name == "clusterattn"
        if not here or after:
            search(study, evaluator, space, **options)
        if here:
            raise KeyboardInterrupt

    monkeypatch.setattr("clusterprof.profiling.tune.search", interrupted)
    finished = run(*command, *SIZES, "--target", "kl=1000", "-o", "out")
    assert finished.code == 1
    assert sorted(path.name for path in Path("out").iterdir()) == [f"rows-{size}.json" for size in sizes]
    if after:
        assert "Target met at size 64" in finished.err
        assert finished.err.splitlines()[-1] == "Not tuned yet: size 48."
    else:
        assert finished.err.splitlines()[-2] == "Not tuned yet: size 48, 64."
        assert "run the same command again" in finished.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--target", "agreement"], "write it as agreement=0.95"),
        (["--target", "agreement=much"], "write it as agreement=0.95"),
        (["--target", "accuracy=0.9"], "choose one of cosine, "),
        (["--target", "agreement=95"], "in the range 0<=x<=1"),
        (["--target", "kl=nan"], "at least 0"),
        (["--target", "kl=1", "--target-share", "1"], "is not in the range 0.01<=x<=0.9999"),
        (["--target", "kl=1", "--target-share", "nan"], "is not in the range 0.01<=x<=0.9999"),
        (["--target", "kl=1", "--target-share", "1e-300"], "is not in the range 0.01<=x<=0.9999"),
        (["--target", "kl=1", "--target", "agreement=0.9"], "only one can be given"),
        (["--target", "kl=1", "--per-layer"], "cannot show a target as well"),
        (["--target-share", "0.9"], "there is no --target"),
        (["--plot", "sizes.txt"], "must end with .svg or .png"),
    ],
)
def test_wrong_usage(run: Run, options: list[str], told: str) -> None:
    finished = run("tune", "--dataset", "needle", "--size", 48, *options)
    assert finished.code == 2
    assert told in flat(finished.err.replace("│", ""))
    assert "Loading" not in finished.err
