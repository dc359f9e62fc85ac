"""The command line: `clusterprof COMMAND`, one file per command."""

from clusterprof.cli.app import main

__all__ = ["main"]
