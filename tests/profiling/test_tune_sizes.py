"""Several sizes are tuned on one set of captures, each as it would be alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.errors import DataError
from clusterprof.profile import Profile
from clusterprof.profiling import collect
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.search import search
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.spaces import SearchSpace
from clusterprof.profiling.tune import TuneResult, tune
from tests.profiling.test_query_window import questions
from tests.profiling.test_tune import SETTINGS, Listener, Loaded, dataset, loaded, run, run_sizes

__all__ = ["loaded"]

LENGTHS = (44, 46, 47, 70, 75, 80, 85, 90)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that are run in full."""
    seen: list[int] = []

    def spy(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Capture:
        seen.append(input_ids.shape[1])
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", spy)
    return seen


def timeless(profile: Profile) -> dict[str, Any]:
    """A profile without what no two runs share."""
    document = profile.model_dump()
    del document["search"]["duration_s"], document["environment"]["created"]
    return document


def trials(folder: Path) -> dict[str, list[tuple[dict[str, Any], float | None]]]:
    """Points and values of each study in a cache folder."""
    storage = f"sqlite:///{folder / 'studies.db'}"
    return {
        name: [
            (trial.params, trial.value)
            for trial in optuna.load_study(study_name=name, storage=storage).trials
        ]
        for name in optuna.get_all_study_names(storage)
    }


@pytest.mark.parametrize("window", [8, "query"])
def test_each_size_has_the_profile_of_a_run_of_its_own(
    loaded: Loaded, tmp_path: Path, captured: list[int], window: Any
) -> None:
    data = dataset(LENGTHS) if window == 8 else questions(*range(4, 12), context=60)
    options: dict[str, Any] = {
        "data": data, "fraction": 0.5, "window": window, "storage": None, "trials": 3,
    }  # fmt: skip
    alone = [run(loaded, tmp_path / str(size), sizes=(size,), **options) for size in (40, 50)]
    captured.clear()
    # In whichever order they are given, the smallest comes first.
    together = run_sizes(loaded, tmp_path / "both", sizes=(50, 40), **options)
    assert len(captured) == len(set(captured)) == 8
    assert [result.profile.compression.size for result in together] == [40, 50]
    for found, expected in zip(together, alone, strict=True):
        assert timeless(found.profile) == timeless(expected.profile)
        assert found.judgement == expected.judgement
        assert found.samples == expected.samples
    known = trials(tmp_path / "both")
    assert known == {**trials(tmp_path / "40"), **trials(tmp_path / "50")}
    # ClusterAttn's and SnapKV's at either size.
    assert len(known) == 4


def test_a_size_leaves_out_what_it_does_not_compress(
    loaded: Loaded, tmp_path: Path, captured: list[int]
) -> None:
    listener = Listener()
    small, large = run_sizes(
        loaded, tmp_path, dataset(LENGTHS), listener, sizes=(40, 50), fraction=0.5, trials=2
    )
    fitting = {f"row-{length}" for length in (44, 46, 47)}
    for result, left_out in ((small, set()), (large, fitting)):
        data = result.profile.dataset
        tuning, held_out = set(data.sampled_ids), set(data.held_out_ids)
        assert (len(tuning), len(held_out)) == (4, 4)
        assert result.samples["fitting"] == data.prompts_fitting == len(tuning & left_out)
        assert result.samples["used"] == len(tuning - left_out) == result.profile.results.tuning.samples
        assert result.samples["held_out"] == len(held_out - left_out) == len(result.judgement.tuned)
        assert result.samples["dropped"] == 0
    assert [sum(it.samples[part] for part in ("used", "held_out")) for it in (small, large)] == [8, 5]
    assert listener.events[0] == ("prepared", 4, 4)
    assert not [event for event in listener.events if event[0] == "left out"]
    assert sorted(captured) == sorted(LENGTHS)


def test_a_question_longer_than_a_size_is_left_out_there_only(
    loaded: Loaded, tmp_path: Path, captured: list[int]
) -> None:
    listener = Listener()
    data = questions(7, 45, 9, 11, context=60)
    small, large = run_sizes(loaded, tmp_path, data, listener, sizes=(40, 50), window="query", trials=2)
    assert len(captured) == 4
    [dropped] = small.profile.search.dropped_samples
    assert dropped.id == "asks-45"
    assert "has 45 tokens and leaves nothing of --size 40" in dropped.reason
    assert large.profile.search.dropped_samples == ()
    assert [result.samples["used"] for result in (small, large)] == [3, 4]
    # It is told when its size's turn comes.
    kinds = [event[0] for event in listener.events]
    assert listener.events[kinds.index("searching") - 1] == ("left out", dropped)
    assert kinds.count("left out") == 1


def test_a_question_longer_than_every_size_is_not_even_captured(
    loaded: Loaded, tmp_path: Path, captured: list[int]
) -> None:
    listener = Listener()
    data = questions(7, 65, 9, context=80)
    results = run_sizes(loaded, tmp_path, data, listener, sizes=(40, 50), window="query", trials=2)
    assert len(captured) == 2
    for result in results:
        assert [sample.id for sample in result.profile.search.dropped_samples] == ["asks-65"]
    # Once, while the prompts are captured.
    assert len([event for event in listener.events if event[0] == "captured" and event[3]]) == 1
    assert not [event for event in listener.events if event[0] == "left out"]


def test_a_prompt_that_failed_is_not_dropped_where_it_would_fit(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Capture:
        if input_ids.shape[1] == 46:
            raise MemoryError("too little")
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", failing)
    small, large = run_sizes(loaded, tmp_path, dataset((46, 80, 90)), sizes=(40, 50), trials=2)
    assert [sample.id for sample in small.profile.search.dropped_samples] == ["row-46"]
    assert large.profile.search.dropped_samples == ()
    for result in (small, large):
        samples = result.samples
        assert samples["fitting"] + samples["dropped"] + samples["used"] == samples["sampled"] == 3


def test_a_result_is_there_before_the_next_size_begins(loaded: Loaded, tmp_path: Path) -> None:
    listener = Listener()
    settings = TuneSettings(**{**SETTINGS, "sizes": (40, 50), "trials": 2})
    results = tune(*loaded, dataset(), settings, cache_dir=tmp_path, listener=listener)
    assert next(results).profile.compression.size == 40
    assert {event[1] for event in listener.events if event[0] == "searching"} == {40}
    assert next(results).profile.compression.size == 50


def interrupt(monkeypatch: pytest.MonkeyPatch, method: str, size: int, after: int) -> None:
    """Ctrl-C in a search, after so many finished trials."""

    def interrupted(study: Any, evaluator: Any, space: SearchSpace, **options: Any) -> None:
        here = (space.default.name, space.size) == (method, size)
        if not here or after:
            search(study, evaluator, space, **{**options, "trials": after if here else options["trials"]})
        if here:
            raise KeyboardInterrupt

    monkeypatch.setattr("clusterprof.profiling.tune.search", interrupted)


def tuned_until_interrupted(loaded: Loaded, folder: Path) -> list[TuneResult]:
    """What came before a KeyboardInterrupt, if one came out."""
    found: list[TuneResult] = []
    settings = TuneSettings(**{**SETTINGS, "sizes": (40, 50), "trials": 3})
    try:
        for result in tune(*loaded, dataset(), settings, cache_dir=folder, listener=Listener()):
            found.append(result)
    except KeyboardInterrupt:
        pass
    return found


def shown(results: Sequence[TuneResult]) -> list[tuple[int, int, bool, bool]]:
    """Size, trials, whether it was interrupted, and whether SnapKV tuned takes part."""
    return [
        (
            result.profile.compression.size,
            result.profile.search.trials,
            result.interrupted,
            "SnapKV tuned" in {method.label for method in result.judgement.methods},
        )
        for result in results
    ]


@pytest.mark.parametrize(
    ("method", "size", "after", "expected"),
    [
        ("clusterattn", 40, 0, []),
        ("clusterattn", 40, 2, [(40, 2, True, True)]),
        # SnapKV's comes first; of the method itself there is nothing yet.
        ("snapkv", 40, 0, []),
        ("snapkv", 40, 1, []),
        ("clusterattn", 50, 0, [(40, 3, False, True)]),
        # The first two trials are made however few there are to be.
        ("clusterattn", 50, 1, [(40, 3, False, True), (50, 2, True, True)]),
        ("snapkv", 50, 1, [(40, 3, False, True)]),
    ],
)
def test_ctrl_c_keeps_what_is_there(
    loaded: Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    size: int,
    after: int,
    expected: list[tuple[int, int, bool, bool]],
) -> None:
    interrupt(monkeypatch, method, size, after)
    assert shown(tuned_until_interrupted(loaded, tmp_path)) == expected


def test_a_size_without_a_usable_prompt_is_named_before_anything_runs(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"takes all of --size 40 \(the shortest has 41 tokens\)"):
        run_sizes(loaded, tmp_path, questions(41, 42), sizes=(40, 50), window="query")
    assert not (tmp_path / "captures").exists()
