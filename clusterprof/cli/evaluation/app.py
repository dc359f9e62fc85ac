"""The group of benchmarks: puts its commands together, and nothing else."""

import typer

from clusterprof.cli.evaluation.attention import ablation, fit, hit_rate
from clusterprof.cli.evaluation.clusters import clusters
from clusterprof.cli.evaluation.lines import lines
from clusterprof.cli.evaluation.longbench import longbench
from clusterprof.cli.evaluation.needle import needle
from clusterprof.cli.evaluation.texts import perplexity, samples

evaluation = typer.Typer(
    no_args_is_help=True,
    help="Measure methods against the full cache: one benchmark per command, each prompt prefilled once.",
)
for command in (needle, lines, longbench, perplexity, samples, fit, hit_rate, ablation, clusters):
    evaluation.command(command.__name__.replace("_", "-"))(command)
