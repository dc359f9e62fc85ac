"""Run: every task under every entrant, each result written as soon as it is there, finished ones looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from clusterprof.errors import CompressionError, spares_the_run
from clusterprof.evaluation.contestants import FULL
from clusterprof.evaluation.records import Record, RunFile, record_key
from clusterprof.evaluation.tasks import Entrant, Task, window_of
from clusterprof.models import describe_model
from clusterprof.profiling.capture import end_tokens
from clusterprof.profiling.record import environment_record
from clusterprof.text import one_line

if TYPE_CHECKING:
    from clusterprof.evaluation.session import Session

# Raise it when what results mean, or how they are computed, changes; of one benchmark alone, its settings say so.
_VERSION = 1
# Characters of a dataset's name, which may be a path, that a record has room for.
_SHOWN = 500


@dataclass(frozen=True)
class Measured:
    """What came out for one entrant; the fields as in :class:`clusterprof.evaluation.records.Record`."""

    scores: Mapping[str, float]
    curves: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None


class Benchmark(Protocol):
    """What is measured on a task."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What determines a result besides model, prompt, references and method: JSON values."""

    def measures(self, task: Task, entrant: Entrant) -> bool:
        """Whether there is anything to measure of an entrant on a task."""

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        """Measure these entrants on a task, in whatever order."""


class EvaluationListener(Protocol):
    """Told what a run is doing, to show it."""

    def begin(self, tasks: int, results: int, known: int) -> None:
        """A run starts; ``known`` of its results are there from before."""

    def measuring(self, task: Task, results: int) -> None:
        """A task starts that has so many results to give."""

    def measured(self, record: Record) -> None:
        """A result is written."""

    def left_out(self, task: Task, reason: str) -> None:
        """A task could not be measured, or not for all who enter."""


def evaluate(
    session: Session,
    bench: Benchmark,
    tasks: Sequence[Task],
    entering: Sequence[Entrant],
    run: RunFile,
    listener: EvaluationListener,
) -> list[Record]:
    """Measure what is not in the file yet; returns all records of this run, those found included.

    Raises
    ------
    DataError
        If a task cannot be measured as asked, or the file not be written.
    """
    environment = environment_record(session.model).model_dump(mode="json", exclude={"created"})
    environment["model"] = describe_model(session.model).id
    # Other weights may have the same name.
    environment["fingerprint"] = session.captures.fingerprint[:12]
    planned = []
    for task in tasks:
        # Once for everyone who enters: a prompt has thousands of tokens.
        asked = record_key(_asked(session, bench, task))
        planned.append((task, asked, {_key(asked, it): it for it in entering if bench.measures(task, it)}))
    keys = list(dict.fromkeys(key for _, _, chosen in planned for key in chosen))
    listener.begin(len(tasks), len(keys), sum(key in run.records for key in keys))
    for task, asked, chosen in planned:
        missing = {it: key for key, it in chosen.items() if key not in run.records}
        without_room = _without_room(task, missing)
        for reason in dict.fromkeys(without_room.values()):
            listener.left_out(task, reason)
        missing = {it: key for it, key in missing.items() if it not in without_room}
        if not missing:
            continue
        listener.measuring(task, len(missing))
        try:
            for entrant, measured in bench.measure(session, task, list(missing)):
                record = _record(bench, task, entrant, measured, missing[entrant], asked, environment)
                run.add(record)
                listener.measured(record)
        except Exception as error:
            if not spares_the_run(error):
                raise
            listener.left_out(task, str(error))
    return [run.records[key] for key in keys if key in run.records]


def _without_room(task: Task, entering: Iterable[Entrant]) -> dict[Entrant, str]:
    """Those whose observation window, the prompt's question, does not fit in their size, and why: others go on."""
    found = {}
    for entrant in entering:
        if entrant.compression is not None and entrant.evicts(task.prompt):
            try:
                window_of(entrant.compression, task.prompt)
            except CompressionError as error:
                found[entrant] = str(error)
    return found


def _key(asked: str, entrant: Entrant) -> str:
    compression = entrant.compression
    return record_key(
        {
            "asked": asked,
            "label": entrant.contestant.label,
            "compression": None if compression is None else compression.model_dump(mode="json"),
            "parameters": _parameters(entrant),
        }
    )


def _parameters(entrant: Entrant) -> dict[str, Any]:
    """The method's own, by layer where they differ, and its version, as it may once have selected other positions."""
    if entrant.compression is None:
        return {"name": FULL}
    method = entrant.compression.method
    by_layer = {
        override.where: f"({', '.join(f'{name} {value}' for name, value in override.changes(method).items())})"
        for override in entrant.compression.overrides
    }
    return {**method.model_dump(mode="json"), "version": method.version, **by_layer}


def _asked(session: Session, bench: Benchmark, task: Task) -> dict[str, Any]:
    """What is the same for everyone who enters."""
    return {
        "version": _VERSION,
        "bench": bench.name,
        "settings": dict(bench.settings),
        "model": session.captures.fingerprint,
        "dataset": task.dataset,
        "id": task.prompt.id,
        "prompt": task.prompt.input_ids,
        "query_length": task.prompt.query_length,
        "references": task.references,
        "max_new_tokens": task.max_new_tokens,
        "labels": dict(task.labels),
        "end_tokens": sorted(end_tokens(session.model, session.tokenizer)),
    }


def _record(
    bench: Benchmark,
    task: Task,
    entrant: Entrant,
    measured: Measured,
    key: str,
    asked: str,
    environment: Mapping[str, str],
) -> Record:
    compression = entrant.compression
    labels = {**task.labels, **dict(entrant.contestant.labels)}
    if entrant.size is not None and not entrant.evicts(task.prompt) and not entrant.evicts_decoded:
        labels["fits"] = 1
    if task.prompt.tokens_cut:
        labels["cut"] = task.prompt.tokens_cut
    return Record(
        key=key,
        bench=bench.name,
        environment=dict(environment),
        dataset=one_line(task.dataset, _SHOWN),
        prompt=task.prompt.id,
        prompt_tokens=len(task.prompt.input_ids),
        labels=labels,
        method=entrant.contestant.label,
        origin=entrant.contestant.origin,
        parameters=_parameters(entrant),
        size=entrant.size,
        window=None if compression is None else compression.window,
        scores=dict(measured.scores),
        curves=dict(measured.curves),
        settings=dict(bench.settings),
        asked=asked,
        text=measured.text,
        references=task.references,
    )
