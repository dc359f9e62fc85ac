"""`clusterprof report`: what runs measured, as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._files import check_writable, folder_to_fill
from clusterprof.cli._shell import print_json
from clusterprof.errors import ClusterprofError, DataError

if TYPE_CHECKING:
    from clusterprof.evaluation.records import Record


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Files that `eval` or `compare` wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path(
        "report.html"
    ),
    plots: Annotated[
        Path | None,
        typer.Option(
            callback=folder_to_fill,
            metavar="FOLDER",
            help="Also write each plot as an SVG file into this folder.",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Put what was measured on one HTML page, with plots, tables and explanations; it loads nothing."""
    from clusterprof.report.console import message_console, say
    from clusterprof.report.progress import waiting

    check_writable(output, "page")
    console = message_console()
    # A file that is named twice is one.
    paths = list(dict.fromkeys(runs))
    if any(path.exists() and output.exists() and path.samefile(output) for path in paths):
        raise typer.BadParameter(f"{output} is one of the runs, and would be lost.", param_hint="--output")
    try:
        with waiting(console, f"Reading {'1 file' if len(paths) == 1 else f'{len(paths):,} files'}"):
            measured = [(path.name, _records(path)) for path in paths]
        with waiting(console, f"Drawing {sum(len(found) for _, found in measured):,} results"):
            from clusterprof.report.page import render

            page = render(measured)
    except KeyboardInterrupt:
        raise ClusterprofError("Interrupted; no page was written.") from None
    from clusterprof.profile.files import replace_file

    try:
        replace_file(output, page.encode())
    except OSError as error:
        raise ClusterprofError(
            f"The page {output} cannot be written ({error.strerror or error}); name another file with --output."
        ) from error
    say(console, f"The page is in {output}")
    records = [record for _, found in measured for record in found]
    if plots is not None:
        from clusterprof.report.evaluation_plots import save_plots

        written = save_plots(records, plots)
        say(console, f"{len(written)} plots are in {plots}")
    if as_json:
        from clusterprof.report.evaluation_document import summary_document

        print_json(summary_document(records))


def _records(path: Path) -> "list[Record]":
    from clusterprof.evaluation.records import read_records

    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it that `clusterprof eval` wrote.")
    if not path.exists():
        raise DataError(f"There is no run {path}; check the path, or make one with `clusterprof eval`.")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; name one that `clusterprof eval` wrote.")
    records = read_records(path)
    if not records:
        raise DataError(f"The run {path} has no results yet; continue it with the command that began it.")
    return records
