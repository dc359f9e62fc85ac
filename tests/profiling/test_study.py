"""Which study a search's trials are kept in, and which ones it refuses to go on with."""

import copy
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from clusterprof.errors import ClusterprofError
from clusterprof.methods import ClusterAttn
from tests.profiling.test_tune import Listener, Loaded, dataset, loaded, run, run_sizes

__all__ = ["loaded"]


def summaries(folder: Path) -> dict[str, optuna.study.StudySummary]:
    """Every study of the default storage, by name."""
    found = optuna.get_all_study_summaries(f"sqlite:///{folder / 'studies.db'}")
    return {summary.study_name: summary for summary in found}


def test_other_settings_are_another_study(loaded: Loaded, tmp_path: Path) -> None:
    one = dataset((90,))
    options: list[dict[str, Any]] = [
        {},
        {"sizes": (41,)},
        {"seed": 1},
        {"objective": "kl"},
        {"method": "snapkv"},
        {"data": dataset((91,))},
    ]
    names = [
        run(loaded, tmp_path, trials=1, **{"data": one, **each}).profile.search.study for each in options
    ]
    assert len(set(names)) == len(names)


def test_a_named_study_of_something_else_is_refused_and_says_what_differs(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: dict[str, Any] = {"data": dataset((90,)), "trials": 1, "storage": None, "study": "mine"}
    run(loaded, tmp_path, **one)
    retrained = copy.deepcopy(loaded[0])
    with torch.no_grad():
        retrained.model.layers[0].mlp.up_proj.weight += 1e-3
    cases: list[tuple[dict[str, Any], str]] = [
        ({"window": 9}, "window 8, now 9"),
        ({"decode_tokens": 6}, "decode tokens 5, now 6"),
        ({"seed": 1}, "seed 0, now 1"),
        ({"objective": "kl"}, "objective cosine, now kl"),
        ({"data": dataset((91,))}, "other prompts"),
        ({"loaded": (retrained, loaded[1])}, "other weights"),
    ]
    for options, expected in cases:
        with pytest.raises(ClusterprofError, match=r"'mine-40' .* was made with .*--study") as caught:
            run(**{"loaded": loaded, "folder": tmp_path, **one, **options})
        said = str(caught.value).partition("was made with ")[2].partition(", so its trials")[0]
        # Other captures may have another range of theta.
        assert [part for part in said.split("; ") if not part.startswith("range of")] == [expected]
    monkeypatch.setattr(ClusterAttn, "version", 3)
    with pytest.raises(ClusterprofError, match="was made with method version 2, now 3, so"):
        run(loaded, tmp_path, **one)
    monkeypatch.undo()
    assert run(loaded, tmp_path, **one).profile.search.study == "mine-40"


def test_a_named_study_of_a_later_size_is_refused_before_any_search(loaded: Loaded, tmp_path: Path) -> None:
    one: dict[str, Any] = {"data": dataset((90,)), "trials": 1, "storage": None, "study": "mine"}
    run(loaded, tmp_path, **one, sizes=(48,), seed=1)
    listener = Listener()
    with pytest.raises(ClusterprofError, match=r"'mine-48' .* was made with seed 1, now 0, so"):
        run_sizes(loaded, tmp_path, listener=listener, **one, sizes=(40, 48))
    assert not [event for event in listener.events if event[0] == "searching"]


def test_a_study_says_what_it_was_made_with(loaded: Loaded, tmp_path: Path) -> None:
    study = run(loaded, tmp_path, trials=1, storage=None).profile.search.study
    (made_with,) = summaries(tmp_path)[study].user_attrs.values()
    readable = {"method": "clusterattn", "size": 40, "window": 8, "decode_tokens": 5, "objective": "cosine"}
    assert {part: made_with[part] for part in readable} == readable
    assert {"model", "revision", "weights", "vocabulary", "prompts", "method_version"} <= made_with.keys()
    assert made_with["prompts"].startswith("sha256:")


def test_a_name_of_the_users_is_followed_by_the_size_and_the_other_method(
    loaded: Loaded, tmp_path: Path
) -> None:
    one: dict[str, Any] = {"data": dataset((90,)), "trials": 1, "storage": None, "study": "mine"}
    run(loaded, tmp_path, **one)
    assert summaries(tmp_path).keys() == {"mine-40", "mine-40-snapkv"}
    results = run_sizes(loaded, tmp_path, sizes=(40, 50), **one)
    several = ["mine-40", "mine-50"]
    assert [result.profile.search.study for result in results] == several
    assert summaries(tmp_path).keys() == {*several, "mine-40-snapkv", "mine-50-snapkv"}
    # If SnapKV is what the user tunes, the name is its.
    run(loaded, tmp_path, method="snapkv", **{**one, "study": "theirs"})
    assert summaries(tmp_path).keys() & {"theirs-40", "theirs-40-snapkv"} == {"theirs-40"}
