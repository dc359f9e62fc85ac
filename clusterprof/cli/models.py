"""`clusterprof models`: what can be run here, and fetching the built-in model."""

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._shell import print_json

models = typer.Typer(no_args_is_help=True, help="List models, and fetch the built-in one.")


@models.command("ls")
def list_models(as_json: opt.Json = False) -> None:
    """List the built-in model, the default one, and those in the hub's cache."""
    from clusterprof.cli._inventory import known_models

    found = known_models()
    if as_json:
        print_json([entry.__dict__ for entry in found])
        return
    from rich.table import Table

    from clusterprof.report.console import result_console
    from clusterprof.report.numbers import size_text

    table = Table("model", "on this machine", "")
    for entry in found:
        here = size_text(entry.bytes) if entry.bytes is not None else "no, fetched when used"
        table.add_row(entry.name, here, "the default" if entry.default else "")
    result_console().print(table)


@models.command("pull")
def pull() -> None:
    """Fetch and convert the built-in model now, so that later runs need no network."""
    from clusterprof.models import builtin_folder

    typer.echo(builtin_folder())
