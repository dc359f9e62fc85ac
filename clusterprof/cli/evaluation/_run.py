"""What every benchmark's command does: check, load, measure, show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._files import check_writable
from clusterprof.cli._model import ModelChoice
from clusterprof.cli._shell import print_json
from clusterprof.cli.evaluation._options import (
    DEFAULT_SIZES,
    DataOptions,
    MethodOptions,
    RunOptions,
    names_of,
    numbers_of,
)
from clusterprof.errors import ClusterprofError, DataError, ProfileError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from clusterprof.data import Dataset, Row
    from clusterprof.evaluation.contestants import Contestant
    from clusterprof.evaluation.records import Record, RunFile
    from clusterprof.evaluation.run import Benchmark
    from clusterprof.evaluation.session import Session
    from clusterprof.evaluation.tasks import Entrant, Task, TaskMaker
    from clusterprof.profile import Window
    from clusterprof.report.evaluation_progress import EvaluationProgress


@dataclass(frozen=True)
class Plan:
    """What a command asks for.

    Attributes
    ----------
    bench : Benchmark
        What is measured.
    entering : sequence of Entrant
        On whom.
    tasks : callable
        Makes the prompts, once there is a model.
    decode_tokens : int
        Of captures; 0 for benchmarks without.
    capture_memory : int
        Bytes that the files of all captures may take together; 0 for benchmarks without.
    longest : int, optional
        Most tokens of a prompt.
    whole : bool
        Leave prompts out that would have to be cut.
    """

    bench: "Benchmark"
    entering: "Sequence[Entrant]"
    tasks: "Callable[[TaskMaker], list[Task]]"
    decode_tokens: int = 0
    capture_memory: int = 0
    longest: int | None = None
    whole: bool = False


def entering(chosen: MethodOptions, window: "Window") -> "list[Entrant]":
    """Who enters, by the options; profiles are read here."""
    from clusterprof.evaluation.contestants import contestants
    from clusterprof.evaluation.tasks import entrants

    names = names_of(chosen.methods, "--methods")
    try:
        compared = contestants(names)
        return entrants(compared, sizes_of(chosen.sizes, compared), window)
    except ProfileError:
        raise
    except ClusterprofError as error:
        raise typer.BadParameter(str(error)) from error


def sizes_of(text: str | None, compared: "Sequence[Contestant]" = ()) -> list[int]:
    """The sizes that are asked for; by default the profiles' own, or a few."""
    own = [contestant.size for contestant in compared if contestant.size is not None]
    if text is None and own:
        return own
    return numbers_of(DEFAULT_SIZES if text is None else text, "--sizes", lowest=2)


def check_replayable(entrants: "Sequence[Entrant]") -> None:
    """Raise a BadParameter if one evicts at every step, which a replay of the full run's steps cannot show."""
    evicting = next((it.contestant.label for it in entrants if it.evicts_decoded), None)
    if evicting is not None:
        raise typer.BadParameter(
            f"{evicting} evicts while decoding, which is not measured here; needle, lines, longbench, perplexity and "
            "samples do.",
            param_hint="--methods",
        )


def run(options: RunOptions, plan: Plan) -> None:
    """Measure what a command asks for, and show it.

    Raises
    ------
    ClusterprofError
        If something cannot be done as asked, or Ctrl-C ended it; what was measured until then is in the file.
    """
    from clusterprof.evaluation.records import open_run
    from clusterprof.report.console import message_console, say
    from clusterprof.report.evaluation_progress import EvaluationProgress

    console = message_console()
    say(console, f"Loading {options.model or 'the default model'}")

    # From here on it takes seconds, for torch alone.
    from clusterprof.models import default_model

    choice = ModelChoice(options.model or default_model(), options.running)
    path = options.output or _default_path(plan.bench.name, choice.id)
    check_writable(path, "results")
    with open_run(path) as results, EvaluationProgress(console) as progress:
        try:
            session, tasks = _prepare(plan, choice, console)
            records = _measure(session, plan, tasks, results, progress)
        except KeyboardInterrupt:
            raise ClusterprofError(progress.interruption(path)) from None
    say(console, f"Results are in {path}; make a page of them with")
    say(console, f"  clusterprof report {path} -o report.html")
    _show(records, path, as_json=options.as_json)


def _default_path(bench: str, model: str) -> Path:
    from clusterprof.profile.location import model_name

    return Path("runs") / f"{bench}-{model_name(model)}.jsonl"


def _prepare(plan: Plan, choice: ModelChoice, console: "Console") -> "tuple[Session, list[Task]]":
    from clusterprof.cache import cache_dir
    from clusterprof.evaluation.contestants import tuned_on
    from clusterprof.evaluation.session import Session
    from clusterprof.evaluation.tasks import TaskMaker, check_questions
    from clusterprof.report.console import say

    model, tokenizer = choice.load(console)
    for entrant in plan.entering:
        if entrant.contestant.profile is not None:
            entrant.contestant.profile.check(model, tokenizer)
    session = Session.open(
        model,
        tokenizer,
        cache_dir(),
        decode_tokens=plan.decode_tokens,
        capture_memory=plan.capture_memory,
    )
    maker = TaskMaker(model, tokenizer, plan.longest, plan.whole)
    tasks = plan.tasks(maker)
    say_prompts(maker, tasks, console)
    check_questions(tasks, plan.entering)
    for sentence in tuned_on(plan.entering, tasks):
        say(console, sentence, style="yellow")
    if not tasks:
        raise DataError("No prompt is left to measure anything on; allow longer prompts, or give more data.")
    compressing = [it for it in plan.entering if it.size is not None]
    if compressing and not any(it.evicts(task.prompt) for it in compressing for task in tasks):
        longest = max(len(task.prompt.input_ids) for task in tasks)
        smallest = min(it.size or 0 for it in compressing)
        raise DataError(
            f"Every prompt fits in the smallest size of {smallest} (the longest has {longest} tokens), so there is "
            "nothing to compress; choose smaller sizes or longer prompts."
        )
    return session, tasks


def say_prompts(maker: "TaskMaker", tasks: "Sequence[Task]", console: "Console") -> None:
    """Say how many prompts are not what they were."""
    from clusterprof.report.console import say
    from clusterprof.report.numbers import listed

    for reason, count in maker.left_out.items():
        say(console, f"prompts  {count:,} left out, because {reason}")
    if tasks and maker.exhausted:
        # Or a mean over tasks would be one of fewer than were asked for, unsaid.
        say(
            console,
            f"prompts  none left of {listed(maker.exhausted)}, so no result is about that",
            style="yellow",
        )
    cut = sum(task.prompt.tokens_cut > 0 for task in tasks)
    if cut:
        say(console, f"prompts  {cut:,} cut in the middle to fit")


def _measure(
    session: "Session",
    plan: Plan,
    tasks: "Sequence[Task]",
    results: "RunFile",
    progress: "EvaluationProgress",
) -> "list[Record]":
    from clusterprof.evaluation.run import evaluate

    records = evaluate(session, plan.bench, tasks, plan.entering, results, progress)
    if not records:
        raise ClusterprofError("No prompt could be measured; the reasons are above.")
    # What other methods and sizes did on these prompts, in earlier runs, belongs to the same tables.
    asked = {record.asked for record in records}
    return [record for record in results.records.values() if record.asked in asked]


def _show(records: "Sequence[Record]", path: Path, *, as_json: bool) -> None:
    from clusterprof.report.answers_shown import answer_tables
    from clusterprof.report.console import result_console, say
    from clusterprof.report.evaluation_document import summary_document
    from clusterprof.report.evaluation_tables import evaluation_notes, evaluation_tables

    if as_json:
        print_json({"results": str(path), **summary_document(records)})
        return
    console = result_console()
    for table in [*answer_tables(records), *evaluation_tables(records, console.width)]:
        console.print(table)
    for sentence in evaluation_notes(records):
        say(console, sentence)


def loaded_tasks(
    data: DataOptions,
    *,
    samples: int | None,
    seed: int,
    max_new_tokens: int | None = None,
    check: "Callable[[Sequence[Row]], None] | None" = None,
) -> "Callable[[TaskMaker], list[Task]]":
    """A maker of tasks out of a dataset, whose rows are checked now where that needs no tokenizer.

    Parameters
    ----------
    samples : int, optional
        How many rows, of each prompt length where a generator is asked for several; by default all.
    check : callable, optional
        Raises if the drawn rows are not what the benchmark needs.
    """
    from clusterprof.cli._data import load_rows
    from clusterprof.data import sample_rows

    lengths: list[int | None] = [None]
    if data.tokens is not None:
        lengths = [*numbers_of(data.tokens, "--tokens", lowest=opt.MIN_TOKENS)]

    def load(length: int | None, tokenizer: "PreTrainedTokenizerBase | None") -> "Dataset | None":
        return load_rows(data.dataset, length, seed, data.data_dir, data.templates, tokenizer)

    # Also says that a dataset takes no length.
    known = load(lengths[0], None)
    if known is not None and check is not None:
        check(sample_rows(known, fraction=1.0, samples=samples, seed=seed))

    def make(maker: "TaskMaker") -> "list[Task]":
        tasks = []
        for length in lengths:
            loaded = known or load(length, maker.tokenizer)
            assert loaded is not None
            tasks += maker.draw(
                loaded,
                samples=samples,
                seed=seed,
                max_new_tokens=max_new_tokens,
                labels={} if length is None else {"tokens": length},
            )
        # Others than above, where some of those would have to be cut.
        if check is not None:
            check([task.row for task in tasks])
        return tasks

    return make
