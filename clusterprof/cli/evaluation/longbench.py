"""`clusterprof eval longbench`: LongBench's 16 English tasks, with its protocol and metrics."""

from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._groups import with_groups
from clusterprof.cli.evaluation._options import (
    Longest,
    MethodOptions,
    RunOptions,
    Whole,
    names_of,
    samples_option,
)
from clusterprof.cli.evaluation._run import Plan, entering, run
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from clusterprof.data import Dataset
    from clusterprof.evaluation.tasks import Task, TaskMaker


@with_groups
def longbench(
    *,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Which tasks, such as qasper,trec.",
            show_default="all that are there",
            rich_help_panel="Data",
        ),
    ] = None,
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    samples: Annotated[int | None, samples_option("Rows of each task, instead of all.")] = None,
    max_tokens: Longest = None,
    whole: Whole = False,
    chosen: MethodOptions,
    options: RunOptions,
) -> None:
    """LongBench: protocol and metrics of its authors; task, group and overall means (Tables 2, 5, 6, 7)."""
    from clusterprof.data import sample_rows
    from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
    from clusterprof.evaluation.generation import GenerationBenchmark, score_longbench
    from clusterprof.evaluation.longbench_scores import GROUP_OF_TASK, check_rows

    names = list(LONGBENCH_TASKS) if tasks is None else names_of(tasks, "--tasks")
    unknown = next((name for name in names if name not in LONGBENCH_TASKS), None)
    if unknown is not None:
        raise typer.BadParameter(
            f"{unknown!r} is none of {', '.join(LONGBENCH_TASKS)}.", param_hint="--tasks"
        )
    datasets = _load(names, data_dir, templates, all_needed=tasks is not None)
    for it in datasets:
        check_rows(it.name, sample_rows(it, fraction=1.0, samples=samples, seed=options.seed))

    def make(maker: "TaskMaker") -> "list[Task]":
        made = []
        for it in datasets:
            labels = {"task": it.name, "group": GROUP_OF_TASK[it.name]}
            drawn = maker.draw(it, samples=samples, seed=options.seed, labels=labels)
            # Others than above, where some of those would have to be cut.
            check_rows(it.name, [task.row for task in drawn])
            made += drawn
        return made

    bench = GenerationBenchmark("longbench", score_longbench)
    run(options, Plan(bench, entering(chosen, options.window), make, longest=max_tokens, whole=whole))


def _load(
    names: list[str], data_dir: "Path | None", templates: "Path | None", *, all_needed: bool
) -> "list[Dataset]":
    """The tasks' rows; of a folder with only some tasks, those, unless they were asked for by name."""
    from clusterprof.data.longbench import load_longbench, longbench_tasks_in

    present = names if data_dir is None or all_needed else longbench_tasks_in(data_dir)
    if not present:
        raise DataError(
            f"There is no LongBench task in {data_dir}; give a folder with files such as qasper.jsonl."
        )
    return [load_longbench(name, data_dir, templates) for name in present]
