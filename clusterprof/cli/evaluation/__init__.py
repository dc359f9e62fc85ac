"""`clusterprof eval BENCH`: every method on one prefill per prompt, one file per benchmark."""

from clusterprof.cli.evaluation.app import evaluation

__all__ = ["evaluation"]
