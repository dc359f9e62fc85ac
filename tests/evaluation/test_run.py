import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError, DataError, UnsupportedModelError
from clusterprof.evaluation.contestants import contestants
from clusterprof.evaluation.generation import GenerationBenchmark
from clusterprof.evaluation.groups import comparable
from clusterprof.evaluation.records import Record, open_run, read_records
from clusterprof.evaluation.run import Measured, evaluate
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, Task, entrants
from clusterprof.methods import ClusterAttn, TopK
from clusterprof.profile import Baseline, Environment, LayerOverride
from tests.evaluation.engine import Heard, make_entrants, make_tasks, open_session, row
from tests.evaluation.test_contestants import saved
from tests.profile.examples import profile
from tests.tiny import tiny_llama

NAMES = ["topk", "snapkv"]
# Of the profile that the tests save.
THETA = 0.003


@dataclass
class Bench:
    """Measures how long prompts are, and remembers what it was asked for."""

    name: str = "length"
    settings: Mapping[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, str, int | None]] = field(default_factory=list)
    failure: BaseException | None = None
    # Which result fails, counted over all; none by default.
    fails_at: int | None = None

    def measures(self, task: Task, entrant: Entrant) -> bool:
        return entrant.contestant.label != "h2o"

    def measure(
        self, session: Session, task: Task, entering: Sequence[Entrant]
    ) -> Iterator[tuple[Entrant, Measured]]:
        # In an order of its own.
        for entrant in reversed(entering):
            if len(self.asked) == self.fails_at:
                assert self.failure is not None
                self.fails_at = None
                raise self.failure
            self.asked.append((task.prompt.id, entrant.contestant.label, entrant.size))
            yield entrant, Measured({"length": len(task.prompt.input_ids)}, {"curve": [1, 2]}, "text")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture
def session(model: PreTrainedModel, tmp_path: Path) -> Session:
    return open_session(model, tmp_path)


@pytest.fixture
def tasks(session: Session) -> list[Task]:
    return make_tasks(session, [row(60), row(50)])


def measure(
    session: Session,
    tasks: Sequence[Task],
    path: Path,
    entering: Sequence[Entrant] | None = None,
    bench: Any = None,
    heard: Heard | None = None,
) -> tuple[list[Record], Bench]:
    bench = bench or Bench()
    entering = make_entrants(NAMES) if entering is None else entering
    with open_run(path) as run:
        return evaluate(session, bench, tasks, entering, run, heard or Heard()), bench


def cells(records: Sequence[Record]) -> list[tuple[str, str, int | None]]:
    return [(it.prompt, it.method, it.size) for it in records]


ALL = [
    (prompt, method, None if method == "full" else 24)
    for prompt in ("row-60-0", "row-50-0")
    for method in ("full", "topk", "snapkv")
]


def test_a_record_for_every_prompt_method_and_size(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    records, bench = measure(session, tasks, path, heard=heard)
    assert cells(records) == ALL
    assert sorted(bench.asked, key=str) == sorted(ALL, key=str)
    assert heard.begun == [(2, 6, 0)]
    assert heard.measuring_ == [("row-60-0", 3), ("row-50-0", 3)]
    # They are in the file in the order in which they were measured.
    assert read_records(path) == heard.records
    assert cells(heard.records) == bench.asked
    assert {it.key: it for it in heard.records} == {it.key: it for it in records}


def test_a_record_holds_what_was_measured_and_on_what(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    labelled = replace(tasks[0], labels={"tokens": 60})
    ablation = replace(contestants(["topk"])[1], labels=(("theta", 0.5),))
    records, _ = measure(session, [labelled], tmp_path / "r", entrants([*contestants([]), ablation], [24], 8))
    full, topk = records
    assert (topk.bench, topk.dataset, topk.prompt, topk.prompt_tokens) == ("length", "places", "row-60-0", 60)
    assert (topk.method, topk.origin) == ("topk", "its paper's values")
    assert topk.parameters == {"name": "topk", "version": TopK.version}
    assert (topk.size, topk.window, full.size, full.window) == (24, 8, None, None)
    assert (topk.labels, full.labels) == ({"tokens": 60, "theta": 0.5}, {"tokens": 60})
    assert (topk.scores, topk.curves, topk.text) == ({"length": 60.0}, {"curve": [1, 2]}, "text")
    assert topk.references == ("ash bay",)
    assert full.parameters == {"name": "full"}
    assert full.environment["model"] == session.model.config.name_or_path
    assert session.captures.fingerprint.startswith(full.environment["fingerprint"])
    named = {"model", "fingerprint"}
    assert full.environment.keys() - named == Environment.model_fields.keys() - {"created"}
    assert full.asked == topk.asked != full.key


def test_overrides_tell_results_apart(session: Session, tasks: list[Task], tmp_path: Path) -> None:
    def entering(theta: float) -> list[Entrant]:
        values = ClusterAttn(num_block=8, theta=theta)
        overrides = (LayerOverride(layers=(0, 1), method=values),) if theta != THETA else ()
        compression = {"size": 24, "window": 8, "overrides": overrides}
        path = saved(tmp_path / "mine.json", compression=compression)
        return entrants(contestants([str(path)])[1:], [24], 8)

    path = tmp_path / "run.jsonl"
    made = [measure(session, tasks[:1], path, entering(theta))[0][0] for theta in (THETA, 0.25, 0.2500001)]
    plain, first, _ = made
    assert len({it.key for it in made}) == len(read_records(path)) == 3
    assert plain.parameters.keys() == ClusterAttn.model_fields.keys() | {"version"}
    assert first.parameters == plain.parameters | {"layers 0 to 1": "(theta 0.25)"}
    (group,) = comparable(made)
    assert [it.method for it in group.records] == [
        "clusterattn (mine)",
        "clusterattn (mine), layers 0 to 1 (theta 0.25)",
        "clusterattn (mine), layers 0 to 1 (theta 0.2500001)",
    ]
    # Nothing is measured anew.
    assert measure(session, tasks[:1], path, entering(0.25))[1].asked == []


def test_a_prompt_that_fits_is_marked(session: Session, tasks: list[Task], tmp_path: Path) -> None:
    records, _ = measure(session, tasks, tmp_path / "run.jsonl", make_entrants(["topk"], [24, 55]))
    assert [(it.prompt, it.size) for it in records if it.labels] == [("row-50-0", 55)]
    assert {it.labels.get("fits", 0) for it in records} == {0, 1}


def test_a_prompt_that_was_cut_is_marked(session: Session, tasks: list[Task], tmp_path: Path) -> None:
    cut = changed_prompt(tasks[0], tokens_cut=7)
    records, _ = measure(session, [cut, tasks[1]], tmp_path / "run.jsonl")
    assert [it.labels for it in records] == [{"cut": 7}] * 3 + [{}] * 3


def test_a_rerun_measures_nothing_anew(session: Session, tasks: list[Task], tmp_path: Path) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    first, _ = measure(session, tasks, path)
    content = path.read_bytes()
    again, bench = measure(session, tasks, path, heard=heard)
    assert again == first
    assert (bench.asked, heard.measuring_, heard.begun) == ([], [], [(2, 6, 6)])
    assert path.read_bytes() == content


def test_a_session_of_another_day_has_the_same_keys(tasks: list[Task], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    measure(open_session(tiny_llama(), tmp_path), tasks, path)
    fresh = open_session(tiny_llama(), tmp_path / "other")
    _, bench = measure(fresh, make_tasks(fresh, [row(50), row(60)]), path)
    assert bench.asked == []


def test_what_is_added_later_is_all_that_is_measured(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    measure(session, tasks[:1], path, make_entrants(["topk"]))
    records, bench = measure(session, tasks, path, make_entrants(NAMES, [24, 40]), heard=heard)
    assert len(records) == 10
    assert not set(bench.asked) & {("row-60-0", "full", None), ("row-60-0", "topk", 24)}
    assert len(bench.asked) == 8
    assert heard.begun == [(2, 10, 2)]
    # And what is no longer asked for stays in the file, but is no result of this run.
    records, bench = measure(session, tasks[1:], path, make_entrants(["snapkv"], [40]))
    assert cells(records) == [("row-50-0", "full", None), ("row-50-0", "snapkv", 40)]
    assert bench.asked == []
    assert len(read_records(path)) == 10


def test_what_a_benchmark_does_not_measure_is_no_result(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    heard = Heard()
    records, _ = measure(session, tasks, tmp_path / "run.jsonl", make_entrants(["h2o", "topk"]), heard=heard)
    assert heard.begun == [(2, 4, 0)]
    assert {it.method for it in records} == {"full", "topk"}


def test_a_task_that_comes_twice_is_measured_once(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    heard = Heard()
    records, bench = measure(session, [*tasks, tasks[0]], tmp_path / "run.jsonl", heard=heard)
    assert cells(records) == ALL
    assert len(bench.asked) == 6
    assert heard.begun == [(3, 6, 0)]


def changed_prompt(task: Task, **changes: Any) -> Task:
    return replace(task, prompt=replace(task.prompt, **changes))


def test_whatever_determines_a_result_is_in_its_key(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    task, (_, topk) = tasks[0], make_entrants(["topk"])
    with torch.no_grad():
        other_model = tiny_llama()
        other_model.lm_head.weight[3, 3] += 1
    of_topk = {"baselines": (Baseline(method=TopK(), metrics=profile().results.metrics),)}
    path = saved(
        tmp_path / "topk.json", compression={"method": TopK(), "size": 24, "window": 8}, results=of_topk
    )
    runs: list[tuple[Session, Task, Entrant, Bench]] = [
        (session, task, topk, Bench()),
        (open_session(other_model, tmp_path), task, topk, Bench()),
        (open_session(session.model, tmp_path, decode_tokens=9), task, topk, Bench()),
        (session, changed_prompt(task, input_ids=(*task.prompt.input_ids, 9)), topk, Bench()),
        (session, changed_prompt(task, query_length=2), topk, Bench()),
        (session, changed_prompt(task, id="another"), topk, Bench()),
        (session, replace(task, dataset="elsewhere"), topk, Bench()),
        (session, replace(task, references=("other",)), topk, Bench()),
        (session, replace(task, max_new_tokens=9), topk, Bench()),
        (session, replace(task, labels={"tokens": 60}), topk, Bench()),
        (session, task, make_entrants(["topk"], [25])[1], Bench()),
        (session, task, make_entrants(["topk"], window=9)[1], Bench()),
        (session, task, make_entrants(["snapkv"])[1], Bench()),
        (session, task, make_entrants(["h2o+decode"])[1], Bench()),
        (session, task, make_entrants([])[0], Bench()),
        (session, task, entrants(contestants([str(path)]), [], 8)[1], Bench()),
        (session, task, topk, Bench(name="another")),
        (session, task, topk, Bench(settings={"window": 8})),
        (session, task, topk, Bench(settings={"window": 9})),
    ]
    results = tmp_path / "run.jsonl"
    for session_, task_, entrant, bench in runs:
        measure(session_, [task_], results, [entrant], bench)
    keys = [it.key for it in read_records(results)]
    assert len(set(keys)) == len(keys) == len(runs)


def test_a_method_that_selects_otherwise_than_before_is_measured_anew_and_apart(
    session: Session, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entering = tmp_path / "run.jsonl", make_entrants(["topk"])
    measure(session, tasks, path, entering)
    monkeypatch.setattr(TopK, "version", TopK.version + 1)
    _, bench = measure(session, tasks, path, entering)
    assert {label for _, label, _ in bench.asked} == {"topk"}
    (group,) = comparable(read_records(path))
    assert {it.method for it in group.records} == {"full", "topk, version 1", "topk, version 2"}


def test_a_tuned_profile_takes_part(session: Session, tasks: list[Task], tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.json", compression={"size": 24, "window": 8})
    entering = entrants(contestants([str(path), "topk"]), [], 8)
    bench = GenerationBenchmark("samples", lambda task, text: {})
    records, _ = measure(session, tasks[:1], tmp_path / "run.jsonl", entering, bench)
    assert {it.method: it.origin for it in records} == {
        "full": "nothing is evicted",
        "clusterattn (mine)": "profile mine.json, tuned on needle",
        "topk": "its paper's values",
    }


@pytest.mark.parametrize(
    "failure",
    [
        CompressionError("not finite"),
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
    ],
)
def test_a_prompt_that_fails_is_left_out_and_named(
    failure: Exception, session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    # The second result of the first prompt.
    records, bench = measure(session, tasks, path, bench=Bench(failure=failure, fails_at=1), heard=heard)
    assert heard.dropped == [("row-60-0", str(failure))]
    assert cells(records) == [("row-60-0", "snapkv", 24), *ALL[3:]]
    assert len(bench.asked) == 4
    # The next run tries again what is missing, and nothing else.
    records, bench = measure(session, tasks, path)
    assert cells(records) == ALL
    assert sorted(bench.asked) == sorted(ALL[:2], key=str)


@pytest.mark.parametrize(
    "failure",
    [KeyboardInterrupt(), DataError("no answer"), UnsupportedModelError("never"), RuntimeError("a fault")],
)
def test_what_ends_the_run_leaves_what_is_there(
    failure: BaseException, session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    with pytest.raises(type(failure)):
        measure(session, tasks, path, bench=Bench(failure=failure, fails_at=4), heard=heard)
    assert heard.dropped == []
    assert read_records(path) == heard.records
    assert len(heard.records) == 4
    records, bench = measure(session, tasks, path)
    assert cells(records) == ALL
    assert len(bench.asked) == 2


def test_a_crash_in_the_middle_of_a_write_costs_one_result(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    first, _ = measure(session, tasks, path)
    path.write_bytes(path.read_bytes()[:-30])
    again, bench = measure(session, tasks, path)
    assert again == first
    assert len(bench.asked) == 1


def test_a_dataset_whose_name_is_a_long_path_can_be_recorded(
    session: Session, tasks: list[Task], tmp_path: Path
) -> None:
    name = f"/{'folder/' * 300}two\nlines.jsonl"
    path = tmp_path / "run.jsonl"
    records, _ = measure(session, [replace(tasks[0], dataset=name)], path)
    assert all(it.dataset.startswith("/folder/folder/") for it in records)
    assert json.loads(path.read_text().splitlines()[0])["dataset"] == records[0].dataset


def test_a_result_that_cannot_be_written_is_not_told_as_measured(
    session: Session, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, heard = tmp_path / "run.jsonl", Heard()
    syncs: list[int] = []

    def full(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DataError, match="No space left on device"):
            measure(session, tasks, path, heard=heard)
    assert len(heard.records) == 2
    assert heard.dropped == []
    records, _ = measure(session, tasks, path)
    assert cells(records) == ALL


def test_a_question_that_leaves_no_room_at_a_size_is_left_out_there_alone(
    session: Session, tmp_path: Path
) -> None:
    tasks = make_tasks(session, [row(90, "where is the lake by the bay?")])
    entering = entrants(contestants(["topk"]), [24, 48], "query")
    heard = Heard()
    records, _ = measure(session, tasks, tmp_path / "run.jsonl", entering, heard=heard)
    assert [(it.method, it.size) for it in records] == [("full", None), ("topk", 48)]
    ((prompt, reason),) = heard.dropped
    assert prompt == tasks[0].prompt.id
    assert "which leaves nothing of size 24" in reason
