"""What an evaluation is doing."""

import time
from typing import TYPE_CHECKING, Self

from clusterprof.report.console import say
from clusterprof.report.display import display_for
from clusterprof.report.numbers import counted, duration_text
from clusterprof.text import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from clusterprof.evaluation.records import Record
    from clusterprof.evaluation.tasks import Task


class EvaluationProgress:
    """An `EvaluationListener` that shows the run on a console; a context manager that clears up after itself.

    Attributes
    ----------
    done, results, dropped : int
        Results that are there, those that shall be there in the end, and tasks that were left out.
    """

    def __init__(self, console: "Console") -> None:
        self._console, self._display = console, display_for(console)
        self.done = self.results = self.dropped = 0
        self._known, self._started = 0, time.monotonic()
        self._task = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.end()

    def begin(self, tasks: int, results: int, known: int) -> None:
        """Say what is to be done, and start counting."""
        found = f", {known:,} of them found in the file" if known else ""
        say(self._console, f"run      {counted(tasks, 'prompt')}, {counted(results, 'result')}{found}")
        self.done = self._known = known
        self.results, self._started = results, time.monotonic()
        if known < results:
            self._display.begin("Measuring", results, known)

    def measuring(self, task: "Task", results: int) -> None:
        """Note which prompt is measured now."""
        self._task = f"{task.dataset} {one_line(task.prompt.id)} ({len(task.prompt.input_ids):,} tokens)"

    def measured(self, record: "Record") -> None:
        """Advance by one result."""
        self.done += 1
        elapsed = time.monotonic() - self._started
        left = (self.results - self.done) * elapsed / (self.done - self._known)
        note = f", about {duration_text(left)} left" if left > 0 else ""
        self._display.update(self.done, self._task + note)

    def left_out(self, task: "Task", reason: str) -> None:
        """Say that a prompt could not be measured."""
        self.dropped += 1
        say(self._console, f"{task.prompt.id} is left out: {reason}", style="yellow")

    def interruption(self, path: "Path") -> str:
        """Return what Ctrl-C left behind, and how to go on."""
        if self.results == 0:
            return "Interrupted before anything was measured; run the same command again to start over."
        return (
            f"Interrupted: {self.done:,} of {self.results:,} results are in {path}; run the same command again to go "
            "on from there."
        )
