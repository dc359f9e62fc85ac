"""Displays: one phase of work at a time, as a live bar on a terminal or a plain line now and then in a log."""

import time
from typing import TYPE_CHECKING, Protocol

from clusterprof.report.console import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_LINE_EVERY_S = 3.0


class Display(Protocol):
    """Shows one phase at a time."""

    def begin(self, title: str, total: int, completed: int = 0) -> None:
        """Start a phase of so many steps."""

    def update(self, completed: int, note: str) -> None:
        """Say how many steps are done, and something about them."""

    def end(self) -> None:
        """Leave the console to others; another phase may begin later."""


class _Bars:
    """For terminals."""

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.table import Column

        def whole() -> Column:
            return Column(no_wrap=True, overflow="ignore")

        self._progress = Progress(
            SpinnerColumn(table_column=whole()),
            TextColumn("{task.description}", markup=False, table_column=whole()),
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=whole()),
            Elapsed(table_column=whole()),
            # What there is no room for is cut here.
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None

    def begin(self, title: str, total: int, completed: int = 0) -> None:
        self._progress.start()
        self._task = self._progress.add_task(title, total=total, completed=completed, note="")

    def update(self, completed: int, note: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=completed, note=note)

    def end(self) -> None:
        self._progress.stop()
        # Another phase would draw the bars of these once more.
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._task = None


class _Lines:
    """For logs: the first and the last step of a phase, and one every few seconds in between."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._title, self._total, self._said = "", 0, -_LINE_EVERY_S

    def begin(self, title: str, total: int, completed: int = 0) -> None:
        self._title, self._total, self._said = title, total, -_LINE_EVERY_S
        say(self._console, f"{title} {completed}/{total}")

    def update(self, completed: int, note: str) -> None:
        now = time.monotonic()
        if completed >= self._total or now - self._said >= _LINE_EVERY_S:
            self._said = now
            say(self._console, f"{self._title} {completed}/{self._total}  {note}")

    def end(self) -> None:
        pass


def display_for(console: "Console") -> Display:
    """Return what suits the console."""
    return _Bars(console) if console.is_terminal else _Lines(console)
