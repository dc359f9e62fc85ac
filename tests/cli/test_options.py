import inspect
from typing import get_args

import pytest

from clusterprof.cli import _options as opt
from clusterprof.cli.tune import tune
from clusterprof.data.builtin import generator
from clusterprof.models.choices import ATTENTIONS, DTYPES
from clusterprof.profiling.capture_files import LIMIT_BYTES
from clusterprof.profiling.objective import DIRECTIONS
from clusterprof.profiling.settings import TuneSettings
from tests.cli.conftest import Run

TUNE = ["tune", "--dataset", "needle", "--size", "48"]


def test_choices_are_those_of_the_library() -> None:
    # Written out there, as importing them would cost every start of the command line.
    assert get_args(get_args(opt.Dtype)[0]) == DTYPES
    assert get_args(get_args(opt.Attention)[0]) == ATTENTIONS
    # The default first.
    objectives = get_args(get_args(get_args(opt.Objective)[0])[0])
    assert objectives[0] == TuneSettings.objective
    assert set(objectives) == set(DIRECTIONS)
    assert (opt.MIN_TOKENS, opt.MAX_TOKENS) == (generator.MIN_TOKENS, generator.MAX_TOKENS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("512MB", 512 * 10**6),
        ("1KiB", 1024),
    ],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert opt.memory_bytes(text) == expected


@pytest.mark.parametrize("text", ["8", "-1GB", "0GB", "8 parsecs", "nanGB", "", "9" * 40 + "GB"])
def test_what_is_no_amount_of_memory(run: Run, text: str) -> None:
    finished = run(*TUNE, "--capture-memory", text)
    assert finished.code == 2
    assert "--capture-memory" in finished.err


def test_captures_have_the_same_bound_whoever_asks() -> None:
    parameters = inspect.signature(tune).parameters
    assert opt.memory_bytes(parameters["capture_memory"].default) == LIMIT_BYTES


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "a\u202eb", "x" * 301, "x" * 5000, " "])
@pytest.mark.parametrize("option", ["--study", "--storage"])
def test_names_that_no_database_or_terminal_should_see(run: Run, option: str, value: str) -> None:
    finished = run(*TUNE, option, value)
    assert finished.code == 2
    assert option in finished.err
    assert "\x1b" not in finished.err


@pytest.mark.parametrize(
    ("option", "most"),
    [
        ("--size", 10_000_000),
        ("--window", 10_000_000),
        ("--decode-tokens", 10_000_000),
        ("--samples", 10_000_000),
        ("--trials", 10_000_000),
        ("--tokens", generator.MAX_TOKENS),
        ("--seed", 2**32 - 1),
    ],
)
@pytest.mark.parametrize("factor", [1, 10**40])
def test_a_huge_number_is_wrong_usage(run: Run, option: str, most: int, factor: int) -> None:
    finished = run(*TUNE, option, (most + 1) * factor)
    assert finished.code == 2
    assert option in finished.err
    assert str(most) in finished.err
