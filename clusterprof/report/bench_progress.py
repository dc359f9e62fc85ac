"""What a benchmark is doing."""

from typing import TYPE_CHECKING, Self

from clusterprof.report.display import display_for

if TYPE_CHECKING:
    from rich.console import Console


class BenchProgress:
    """A `BenchListener` that shows the benchmark on a console; a context manager that clears up after itself."""

    def __init__(self, console: "Console") -> None:
        self._display = display_for(console)
        self._started = self._parts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.end()

    def begin(self, measurements: int) -> None:
        """Start counting."""
        self._parts = measurements
        self._display.begin("Measuring", measurements)

    def measuring(self, what: str) -> None:
        """Say what is measured now; what came before it is done."""
        self._display.update(self._started, what)
        self._started += 1

    def end(self) -> None:
        """Fill the bar."""
        self._display.update(self._parts, "done")
