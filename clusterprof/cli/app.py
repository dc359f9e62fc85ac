"""The root of the command line: puts the commands together, and nothing else."""

from collections.abc import Sequence
from typing import Annotated

import typer

import clusterprof
from clusterprof.cli._shell import Root, Session, run
from clusterprof.cli.apply import apply
from clusterprof.cli.bench import bench
from clusterprof.cli.captures import captures
from clusterprof.cli.compare import compare
from clusterprof.cli.datasets import datasets
from clusterprof.cli.doctor import doctor
from clusterprof.cli.evaluation import evaluation
from clusterprof.cli.models import models
from clusterprof.cli.profiles import profiles
from clusterprof.cli.report import report
from clusterprof.cli.tune import tune

app = typer.Typer(
    name="clusterprof",
    cls=Root,
    no_args_is_help=True,
    add_completion=False,
    # Tracebacks are for --debug, and plain there.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(tune)
app.command()(apply)
app.command()(bench)
app.add_typer(evaluation, name="eval")
app.command()(compare)
app.command()(report)
app.add_typer(profiles, name="profiles")
app.add_typer(datasets, name="datasets")
app.add_typer(models, name="models")
app.add_typer(captures, name="captures")
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clusterprof {clusterprof.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="CLUSTERPROF_DEBUG", help="Show tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Tune KV-cache compression for your workload offline, and apply it with transformers."""
    session: Session = context.obj
    session.debug = debug


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 3 a target was not met.

    Parameters
    ----------
    args : sequence of str, optional
        What the user typed after ``clusterprof``; by default that of this process.
    """
    run(app, args)
