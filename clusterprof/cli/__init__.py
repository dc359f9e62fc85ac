"""The command line: `clusterprof COMMAND`, one file per command."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit; arguments and exit codes as in :mod:`clusterprof.cli.app`."""
    try:
        from clusterprof.cli.app import main as run
    except KeyboardInterrupt:
        # From then on it is an error like any other.
        sys.exit("error: Interrupted.")
    run(args)
