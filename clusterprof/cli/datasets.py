"""`clusterprof datasets`: the workloads that have a name."""

from dataclasses import asdict

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._shell import print_json

datasets = typer.Typer(no_args_is_help=True, help="List the datasets that have a name.")


# With a single command typer would do without its name.
@datasets.callback()
def _datasets() -> None:
    """List the datasets that have a name."""


@datasets.command("ls")
def list_named(as_json: opt.Json = False) -> None:
    """List the built-in generators and the named datasets."""
    from clusterprof.data import list_datasets

    found = list_datasets()
    if as_json:
        print_json([asdict(dataset) for dataset in found])
        return
    from rich.table import Table

    from clusterprof.report.console import message_console, result_console, say

    table = Table("dataset", "rows", "from")
    for dataset in found:
        table.add_row(dataset.name, dataset.description, dataset.source)
    result_console().print(table)
    say(
        message_console(),
        "Or a local .jsonl, .json, .csv or .parquet file, or any dataset of the hub by its id.",
    )
