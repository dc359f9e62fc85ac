import io
import itertools
import sys

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from clusterprof.data import Prompt
from clusterprof.profile import DroppedSample
from clusterprof.profiling.samples import Samples
from clusterprof.profiling.settings import TuneSettings
from clusterprof.report.display import display_for
from clusterprof.report.progress import TuneProgress, waiting

STORAGE = "postgresql://me:secret@host/db"


def prompt(name: str, tokens: int) -> Prompt:
    return Prompt(id=name, input_ids=tuple(range(tokens)), query_length=None, tokens_cut=max(0, tokens - 299))


ONE = Samples((prompt("one", 100),), ())


def trial(number: int, value: float | None) -> FrozenTrial:
    made = optuna.trial.create_trial(
        state=TrialState.FAIL if value is None else TrialState.COMPLETE,
        value=value,
        params={"num_block": 4, "theta": 0.003},
        distributions={
            "num_block": optuna.distributions.IntDistribution(1, 32),
            "theta": optuna.distributions.FloatDistribution(1e-4, 1.0),
        },
        user_attrs={"error": "not finite"} if value is None else {},
    )
    made.number = number
    return made


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=140, force_terminal=terminal, markup=False, highlight=False), file


def tune(progress: TuneProgress) -> None:
    """A tune of three prompts, one held out, of which one fails, and three trials, one of which fails."""
    prompts = [prompt("one", 100), prompt("two", 300), prompt("three\x1b[2J", 200)]
    fitting = [prompt("four", 64), prompt("five", 10), prompt("six", 9)]
    progress.prepared(Samples((*prompts[:2], fitting[0]), (prompts[2], *fitting[1:])))
    progress.captured(prompts[0], 2.0, None)
    progress.captured(prompts[1], 0.0, None)
    progress.captured(prompts[2], 1.0, "out of memory")
    progress.searching(64, "clusterattn", "places", STORAGE, 0, 2)
    progress.tried([trial(0, 0.5), trial(1, None)], trial(0, 0.5))
    progress.tried([trial(2, 0.75)], trial(2, 0.75))


def test_a_log_has_plain_lines() -> None:
    log, file = console(terminal=False)
    with TuneProgress(log, TuneSettings(sizes=(64,), trials=2)) as progress:
        tune(progress)
    lines = file.getvalue().splitlines()
    assert file.getvalue().replace("\n", "").isprintable()
    # What is held out is counted by itself, as a profile counts only what was tuned on.
    assert lines[:2] == [
        "prompts  2 to tune on, 100 to 300 tokens, 1 of them cut to the model's context; 1 more set aside, not longer "
        "than size 64",
        "held out 1 to judge by, 200 tokens; 2 more set aside, not longer than size 64",
    ]
    # 500 tokens to go at 100 tokens in 2 s.
    assert "Capturing 1/3  100 tokens in 2.0 s, about 10 s left" in lines
    assert "three\\x1b[2J is left out: out of memory" in lines
    assert any(line.startswith("Capturing 3/3") for line in lines)
    assert "Trial 1 failed: not finite" in lines
    assert "Searching clusterattn at 64 2/2  best log_kl 0.7500 at num_block 4, theta 0.003" in lines


def test_a_space_with_fewer_points_than_trials_is_counted_to_its_end() -> None:
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), method="topk", trials=50))
    progress.searching(64, "topk", "places", STORAGE, 0, 1)
    only = optuna.trial.create_trial(value=0.5)
    progress.tried([only], only)
    assert file.getvalue().splitlines()[-1] == "Searching topk at 64 1/1  best log_kl 0.5000"


def test_captures_beyond_the_bound_are_told() -> None:
    log, file = console(terminal=False)
    TuneProgress(log, TuneSettings(sizes=(64,))).over_limit(8 * 10**9)
    assert file.getvalue() == (
        "The captures of this run take more than the 8.0 GB of --capture-memory: all of them are kept while it lasts, "
        "and those of other runs are deleted.\n"
    )


def test_slow_captures_are_told_beforehand() -> None:
    said = {}
    for method in ("clusterattn", "h2o"):
        log, file = console(terminal=False)
        TuneProgress(log, TuneSettings(sizes=(64,), method=method)).prepared(ONE)
        said[method] = file.getvalue()
    assert "h2o needs the attention of all queries" in said["h2o"]
    assert "longer\n" not in said["clusterattn"]


@pytest.mark.parametrize(
    ("asked", "there", "short", "warned"),
    [
        (None, 6, False, False),
        (None, 5, False, True),
        (8, 5, True, True),
        (8, 7, True, False),
        (0, 0, False, False),
        (None, 0, False, False),
    ],
)
def test_few_held_out_prompts_are_told_beforehand(
    asked: int | None, there: int, short: bool, warned: bool
) -> None:
    log, file = console(terminal=False)
    held_out = tuple(prompt(str(number), 100) for number in range(there))
    TuneProgress(log, TuneSettings(sizes=(64,), holdout=asked)).prepared(Samples(ONE.tuning, held_out))
    assert ("8 were asked for, and there are no other rows" in file.getvalue()) == short
    assert ("Fewer than 6 held-out prompts cannot show a difference" in file.getvalue()) == warned
    alone = asked is None and there == 0
    assert ("so the prompts tuned on will have to" in file.getvalue()) == alone


def test_a_prompt_that_is_not_even_tried_is_left_out() -> None:
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), window="query"))
    progress.prepared(ONE)
    progress.captured(prompt("one", 100), 0.0, "Its question has 70 tokens.")
    assert file.getvalue().splitlines()[-2:] == [
        "one is left out: Its question has 70 tokens.",
        "Capturing 1/1  100 tokens, left out",
    ]


def test_a_prompt_that_a_size_cannot_use_is_left_out() -> None:
    log, file = console(terminal=False)
    sample = DroppedSample(id="one", reason="Its question has 70 tokens and leaves nothing of --size 64.")
    TuneProgress(log, TuneSettings(sizes=(64, 128), window="query")).left_out(sample)
    assert file.getvalue() == (
        "one is left out: Its question has 70 tokens and leaves nothing of --size 64.\n"
    )


def test_the_smallest_of_several_sizes_decides_what_is_set_aside() -> None:
    log, file = console(terminal=False)
    TuneProgress(log, TuneSettings(sizes=(128, 64))).prepared(
        Samples((prompt("one", 100), prompt("two", 64)), ())
    )
    assert file.getvalue().splitlines()[:2] == [
        "prompts  1 to tune on, 100 tokens; 1 more set aside, not longer than size 64",
        "held out 0 to judge by",
    ]


def test_every_search_is_counted_from_its_start() -> None:
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64, 128), trials=2))
    for size, method in ((64, "clusterattn"), (64, "snapkv"), (128, "clusterattn")):
        progress.searching(size, method, "places", STORAGE, 0, 2)
        for number in range(2):
            progress.tried([trial(number, 0.5)], trial(0, 0.5))
    ends = [line.partition("  ")[0] for line in file.getvalue().splitlines() if " 2/2" in line]
    assert ends == [
        "Searching clusterattn at 64 2/2", "Searching snapkv at 64 2/2", "Searching clusterattn at 128 2/2",
    ]  # fmt: skip


def test_a_terminal_is_free_for_the_result_of_each_size() -> None:
    screen, file = console(terminal=True)
    stdout = sys.stdout
    with TuneProgress(screen, TuneSettings(sizes=(64, 128), trials=1)) as progress:
        for size in (64, 128):
            begun = file.tell()
            progress.searching(size, "clusterattn", "places", STORAGE, 0, 1)
            progress.tried([trial(0, 0.5)], trial(0, 0.5))
            progress.comparing(2)
            progress.compared("tuned")
            assert screen._live_stack
            progress.compared("paper default")
            # Else what goes to stdout would come out here.
            assert not screen._live_stack
            assert sys.stdout is stdout
    # The bars of the first size are not drawn again above those of the second.
    first, second = file.getvalue()[:begun], file.getvalue()[begun:]
    assert ["at 64" in first, "at 128" in first] == [True, False]
    assert ["at 64" in second, "at 128" in second] == [False, True]


def test_names_are_escaped() -> None:
    log, file = console(terminal=False)
    TuneProgress(log, TuneSettings(sizes=(64,))).searching(
        64, "clusterattn", "a\x1b[2J\nb", "sqlite:///c\x1b[2J", 0, 50
    )
    line = file.getvalue().splitlines()[0]
    assert line.startswith("study    a\\x1b[2J\\nb ")
    assert "sqlite:///c\\x1b[2J" in line
    assert line.isprintable()


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr("clusterprof.report.progress.time.monotonic", lambda: next(clock))
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), trials=1000))
    progress.searching(64, "clusterattn", "places", STORAGE, 0, 1000)
    for number in range(1000):
        progress.tried([trial(number, 0.5)], trial(0, 0.5))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("Searching")]
    assert 30 < len(lines) < 120
    assert lines[-1].startswith("Searching clusterattn at 64 1000/1000")


def test_a_terminal_has_bars_that_end_with_the_context() -> None:
    screen, file = console(terminal=True)
    with TuneProgress(screen, TuneSettings(sizes=(64,), trials=2)) as progress:
        tune(progress)
        assert screen._live_stack
    assert not screen._live_stack
    assert "3/3" in file.getvalue()
    assert "best log_kl 0.7500" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_password_of_the_storage_is_not_shown(terminal: bool) -> None:
    out, file = console(terminal=terminal)
    with TuneProgress(out, TuneSettings(sizes=(64,))) as progress:
        progress.searching(64, "clusterattn", "places", STORAGE, 7, 50)
    assert (
        "study    places, 7 trials from before (watch it with `optuna-dashboard postgresql://host/db`)"
        in (file.getvalue())
    )
    assert "secret" not in file.getvalue()


def test_time_left_is_bounded_by_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr("clusterprof.report.progress.time.monotonic", lambda: next(clock))
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), trials=50, timeout=30.0))
    progress.searching(64, "clusterattn", "places", STORAGE, 0, 50)
    progress.tried([trial(0, 0.5)], trial(0, 0.5))
    assert "about 20 s left" in file.getvalue()


def test_time_left_is_that_of_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr("clusterprof.report.progress.time.monotonic", lambda: next(clock))
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), trials=20))
    progress.searching(64, "clusterattn", "places", STORAGE, 0, 20)
    progress.tried([trial(number, 0.5) for number in range(4)], trial(0, 0.5))
    assert "Searching clusterattn at 64 4/20  about 40 s left" in file.getvalue()


def test_a_round_that_failed_says_nothing_of_the_time_left() -> None:
    log, file = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,), trials=20))
    progress.searching(64, "clusterattn", "places", STORAGE, 0, 20)
    progress.tried([trial(0, None), trial(1, None)], None)
    assert file.getvalue().splitlines()[-2:] == ["Trial 0 failed: not finite", "Trial 1 failed: not finite"]


def test_an_interruption_says_what_is_kept() -> None:
    log, _ = console(terminal=False)
    progress = TuneProgress(log, TuneSettings(sizes=(64,)))
    assert "before a prompt was captured" in progress.interruption()
    prompts = [prompt("one", 100), prompt("two", 300)]
    progress.prepared(Samples((prompts[0],), (prompts[1],)))
    progress.captured(prompts[0], 1.0, None)
    assert "1 of 2 captures are finished and kept" in progress.interruption()
    progress.searching(64, "clusterattn", "places", STORAGE, 3, 50)
    assert "the captures and the finished trials are kept" in progress.interruption()
    assert "run the same command again" in progress.interruption()


def test_waiting_is_a_line_in_a_log_and_a_spinner_on_a_terminal() -> None:
    log, file = console(terminal=False)
    with waiting(log, "Reading") as stop:
        stop()
    assert file.getvalue() == "Reading\n"
    screen, _ = console(terminal=True)
    with waiting(screen, "Reading") as stop:
        assert screen._live_stack
        stop()
        assert not screen._live_stack


def test_what_there_is_no_room_for_is_cut_and_not_the_counts() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = display_for(console)
    display.begin("Searching clusterattn at 1024", 50, 12)
    display.update(20, "about 9 s left, best log_kl -4.2328 at num_block 2, theta 0.00706, gap_pool 21")
    display.end()
    assert isinstance(console.file, io.StringIO)
    assert "20/50" in console.file.getvalue()
    assert "about 9 s" in console.file.getvalue()
