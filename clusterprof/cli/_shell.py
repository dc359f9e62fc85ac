"""What surrounds every command: errors as one sentence with an exit code, and JSON on stdout."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from clusterprof.errors import ClusterprofError

FAILED = 1
# A goal that was asked for is not met.
UNMET = 3


@dataclass
class Session:
    """What the root options say, for as long as one command runs."""

    debug: bool = False


class Root(TyperGroup):
    """The root command, with Ctrl-C as an error like any other instead of typer's bare exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise ClusterprofError("Interrupted.") from None


def run(app: typer.Typer, args: Sequence[str] | None) -> None:
    """Run a command line and exit; whatever goes wrong is one sentence on stderr, unless ``--debug``."""
    session = Session()
    try:
        app(args, obj=session)
    except Exception as error:
        _fail(session, as_sentence(error))


def as_sentence(error: Exception) -> str:
    """Return an error as one sentence for people."""
    from clusterprof.text import one_line

    if isinstance(error, ClusterprofError):
        return one_line(str(error))
    if isinstance(error, OSError) and error.strerror:
        return one_line(_refused(error))
    return one_line(f"{_unexpected(error)} (run `clusterprof --debug ...` to see where it comes from)")


def _fail(session: Session, message: str) -> NoReturn:
    from clusterprof.report.console import message_console, say

    if session.debug:
        traceback.print_exc()
    say(message_console(), f"error: {message}")
    _forget_unwritten()
    sys.exit(FAILED)


def _forget_unwritten() -> None:
    # What a full disk did not take, Python would try to write once more at exit, and complain.
    try:
        typer.echo(nl=False)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> str:
    if error.filename is None:
        return f"Reading or writing failed: {error.strerror}."
    return f"Cannot use {os.fsdecode(error.filename)}: {error.strerror}."


def _unexpected(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from clusterprof.profile import first_problem

        return first_problem(error)
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


def print_json(document: Any) -> None:
    """Write one JSON document to stdout."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
