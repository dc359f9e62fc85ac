"""What surrounds every command: errors as one sentence with an exit code, and JSON on stdout."""

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from clusterprof.errors import ClusterprofError

FAILED = 1


@dataclass
class Session:
    """What the root options say, for as long as one command runs."""

    debug: bool = False


def run(app: typer.Typer, args: Sequence[str] | None) -> None:
    """Run a command line and exit; whatever goes wrong is one sentence on stderr, unless ``--debug``."""
    session = Session()
    try:
        app(args, obj=session)
    except ClusterprofError as error:
        _fail(session, str(error))
    except Exception as error:
        _fail(session, f"{_unexpected(error)} (run `clusterprof --debug ...` to see where it comes from)")


def _fail(session: Session, sentence: str) -> None:
    from clusterprof.report.console import message_console, one_line, say

    if session.debug:
        traceback.print_exc()
    say(message_console(), f"error: {one_line(sentence)}")
    sys.exit(FAILED)


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
