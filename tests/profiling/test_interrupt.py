"""Ctrl-C between trials."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from clusterprof.profiling.interrupt import held_back_interrupt


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_is_restored() -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def two_trials(steps: list[str], *, presses: int, asks: bool) -> None:
    with held_back_interrupt(lambda: steps.append("heard")) as check:
        for trial in ("first", "second"):
            for _ in range(presses):
                press_ctrl_c()
            steps.append(trial)
            if asks:
                check()


@pytest.mark.parametrize(
    ("presses", "asks", "done"),
    [(1, True, ["heard", "first"]), (2, True, ["heard"]), (2, False, ["heard"])],
    ids=["after the trial", "a second one at once", "whether or not it is asked for"],
)
def test_it_comes_after_the_trial_or_the_second_one_at_once(
    presses: int, asks: bool, done: list[str]
) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        two_trials(steps, presses=presses, asks=asks)
    assert steps == done


def test_one_that_nobody_asks_for_comes_at_the_end() -> None:
    def work() -> None:
        with held_back_interrupt(lambda: None):
            press_ctrl_c()
            steps.append("done")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["done"]


def test_an_error_is_not_replaced_by_it() -> None:
    def work() -> None:
        with held_back_interrupt(lambda: None):
            press_ctrl_c()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        work()


def test_without_it_nothing_is_raised() -> None:
    steps: list[str] = []
    two_trials(steps, presses=0, asks=True)
    assert steps == ["first", "second"]


def test_a_handler_of_the_program_is_left_alone() -> None:
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        two_trials([], presses=1, asks=True)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [True, True]


def test_other_threads_have_none() -> None:
    steps: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(two_trials, steps, presses=0, asks=True).result()
    assert steps == ["first", "second"]
