"""`clusterprof captures`: what the captures of earlier runs take, and deleting them."""

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._shell import print_json
from clusterprof.errors import ClusterprofError

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.profiling.capture_files import CaptureFile, CaptureHeader, State

    Found = tuple[CaptureFile, State, CaptureHeader | None]

captures = typer.Typer(no_args_is_help=True, help="List and delete the captures that runs left in the cache.")
_DAY_S = 86_400


def _days(value: float | None) -> float | None:
    # Written this way round, NaN is out of range too.
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of days, 0 or more.")
    return value


@captures.command("ls")
def list_captures(as_json: opt.Json = False) -> None:
    """List the captures, the least recently used first."""
    from clusterprof.report.console import message_console, result_console, say
    from clusterprof.report.numbers import size_text

    folder = _folder()
    found = _look(folder)
    total = sum(file.bytes for file, _, _ in found)
    if as_json:
        entries = [_entry(*each) for each in found]
        print_json({"folder": str(folder), "bytes": total, "captures": entries})
        return
    if not found:
        say(message_console(), f"There are no captures in {folder}.")
        return
    result_console().print(_table(found))
    say(
        message_console(),
        f"{len(found)} files, {size_text(total)} in {folder}; delete them with `clusterprof captures clean`.",
    )


@captures.command("clean")
def clean_captures(
    older_than: Annotated[
        float | None,
        typer.Option(callback=_days, metavar="DAYS", help="Only those not used for so many days."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only those of this model, as `captures ls` names it."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Delete captures; a later run makes anew what it needs, and one that is under way loses nothing."""
    from clusterprof.cli._model import ModelChoice
    from clusterprof.profiling.capture_files import delete
    from clusterprof.report.console import message_console, say
    from clusterprof.report.numbers import size_text

    name = None if model is None else ModelChoice(model, opt.Running()).id
    newest = math.inf if older_than is None else time.time() - older_than * _DAY_S
    found = _look(_folder())
    chosen = [
        file
        for file, _, header in found
        if not file.busy
        and file.used <= newest
        and (name is None or (header is not None and header.model == name))
    ]
    deleted = delete(chosen)
    freed = sum(file.bytes for file in deleted)
    if as_json:
        print_json({"files": len(found), "deleted": len(deleted), "bytes": freed})
    else:
        typer.echo(f"deleted {len(deleted)} of {len(found)} files, {size_text(freed)} freed")
    left = [file for file in chosen if file not in deleted and file.path.exists()]
    if left:
        raise ClusterprofError(
            f"{len(left)} of {len(chosen)} files in {_folder()} could not be deleted; check who may write there."
        )
    if model is not None and not chosen:
        say(message_console(), "See `clusterprof captures ls` for the models that there are captures of.")


def _folder() -> Path:
    from clusterprof.cache import cache_path

    return cache_path() / "captures"


def _look(folder: Path) -> "list[Found]":
    from clusterprof.profiling.capture_files import capture_files, look_into

    return [(file, *look_into(file)) for file in capture_files(folder)]


def _entry(file: "CaptureFile", state: "State", header: "CaptureHeader | None") -> dict[str, Any]:
    return {
        "file": file.path.name,
        "state": state,
        "model": header and header.model,
        "prompt_tokens": header and header.prompt_length,
        "window": header and header.window,
        "decoded_tokens": header and header.decoded,
        "bytes": file.bytes,
        "last_used": datetime.fromtimestamp(file.used, UTC).isoformat(timespec="seconds"),
    }


def _table(found: "list[Found]") -> "Table":
    from rich.table import Table

    from clusterprof.report.numbers import size_text
    from clusterprof.text import one_line

    table = Table("model", "prompt tokens", "window", "decoded tokens", "size on disk", "last used")
    for column in table.columns[1:5]:
        column.justify = "right"
    for file, state, header in found:
        used = f"{datetime.fromtimestamp(file.used):%Y-%m-%d %H:%M}"
        if header is None:
            cells = [f"({state})", "", "", ""]
        else:
            numbers = (header.prompt_length, header.window, header.decoded)
            cells = [one_line(header.model), *(f"{number:,}" for number in numbers)]
        table.add_row(*cells, size_text(file.bytes), used)
    return table
