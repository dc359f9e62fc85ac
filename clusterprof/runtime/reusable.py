"""Contexts that may be entered again once they have ended."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from functools import partial, wraps
from types import TracebackType
from typing import ParamSpec

P = ParamSpec("P")


class Reusable(ContextDecorator):
    """A context that is made anew each time it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: ExitStack[bool | None] = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._entered.__exit__(kind, error, traceback)


def reusable(make: Callable[P, AbstractContextManager[None]]) -> Callable[P, Reusable]:
    """Let what a function of contexts returns be entered again, which a generator's context refuses."""

    @wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Reusable:
        return Reusable(partial(make, *args, **kwargs))

    return wrapper
