"""The two consoles: results on stdout, everything else on stderr."""

import os

from rich.console import Console

from clusterprof.text import one_line

# Logs are wider than the 80 columns that rich assumes where there is no terminal.
_LOG_WIDTH = 120


def message_console() -> Console:
    """Return the console for people, on stderr; text is printed as it is, never as markup."""
    return _console(stderr=True)


def result_console() -> Console:
    """Return the console for results, on stdout."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _LOG_WIDTH
    return console


def say(console: Console, sentence: str, style: str | None = None) -> None:
    """Print a sentence on one line, however long; the terminal wraps it where it must, and obeys nothing in it."""
    console.print(one_line(sentence), style=style, soft_wrap=True)
