"""Ctrl-C at a safe point: between two trials, not inside the model's hooks or a transaction of the database."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back_interrupt(on_interrupt: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold back the first Ctrl-C until the caller asks for it or the context ends; a second one comes at once.

    Parameters
    ----------
    on_interrupt : callable
        Called when it comes, to tell people that it was heard.

    Yields
    ------
    callable
        Raises the KeyboardInterrupt that was held back, if there was one.
    """
    before = signal.getsignal(signal.SIGINT)
    # Other threads get no signals, and a program with a handler of its own keeps it.
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: None
        return
    came = False

    def hold_back(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        on_interrupt()

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
