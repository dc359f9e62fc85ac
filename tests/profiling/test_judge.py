"""The tuned method is judged on prompts that the search did not see, pair by pair."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clusterprof.data import build_prompt, sample_rows
from clusterprof.methods import MethodConfig
from clusterprof.profile import Compression
from clusterprof.profiling.capture import capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, Scores
from clusterprof.profiling.tune import TuneResult
from tests.profiling.test_tune import Listener, Loaded, dataset, loaded, run

__all__ = ["loaded"]

ROWS = dataset(range(60, 70))
HALF: dict[str, Any] = {"data": ROWS, "fraction": 0.5, "trials": 3}


def scores_by_hand(loaded: Loaded, names: tuple[str, ...], method: MethodConfig) -> list[Scores]:
    """Of each row, from a capture of its own."""
    model, tokenizer = loaded
    captures = []
    for row in ROWS.rows:
        if row.id in names:
            ids = torch.tensor([build_prompt(row, tokenizer, max_tokens=500).input_ids])
            captures.append(capture_prompt(model, ids, window=8, decode_tokens=5, end_tokens={2}))
    return Evaluator(model, captures).scores(Compression(size=40, window=8, method=method))


def rows_of(result: TuneResult) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return result.profile.dataset.sampled_ids, result.profile.dataset.held_out_ids


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_the_differences_are_those_of_the_held_out_prompts(
    loaded: Loaded, tmp_path: Path, objective: ObjectiveName
) -> None:
    result = run(loaded, tmp_path, objective=objective, **HALF)
    judgement, results = result.judgement, result.profile.results
    tuning, held_out = rows_of(result)
    assert (len(tuning), len(held_out)) == (5, 5)
    assert judgement.held_out
    assert result.samples["held_out"] == len(judgement.tuned) == 5

    best = result.profile.compression.method
    mine = [scores[objective] for scores in scores_by_hand(loaded, held_out, best)]
    assert [scores[objective] for scores in judgement.tuned] == pytest.approx(mine, abs=1e-6)
    assert judgement.methods[0].behind is judgement.methods[-1].behind is None
    rng = np.random.default_rng(7)
    for found, baseline in zip(judgement.methods[1:-1], results.baselines[:-1], strict=True):
        assert found.method is not None
        others = [scores[objective] for scores in scores_by_hand(loaded, held_out, found.method)]
        differences = np.array([a - b for a, b in zip(mine, others, strict=True)])
        behind = found.behind
        assert behind is not None
        assert behind.mean == pytest.approx(sum(differences) / 5, abs=1e-6)
        # Another bootstrap, of the same pairs.
        resampled = rng.choice(differences, (20_000, 5)).mean(axis=1)
        expected = np.percentile(resampled, [2.5, 97.5])
        spread = float(np.ptp(differences))
        assert (behind.low, behind.high) == pytest.approx(expected.tolist(), abs=0.05 * spread + 1e-6)
        assert baseline.method == found.method
        assert baseline.difference is not None
        assert baseline.difference.value == behind.mean
        assert baseline.difference.interval_95 == (behind.low, behind.high)
        assert baseline.metrics.model_dump() == pytest.approx(asdict(found.scores))
    assert results.baselines[-1].difference is None


def test_the_profile_has_the_score_of_either_part(loaded: Loaded, tmp_path: Path) -> None:
    result = run(loaded, tmp_path, **HALF)
    results = result.profile.results
    for names, score in zip(rows_of(result), (results.tuning, results.held_out), strict=True):
        by_hand = scores_by_hand(loaded, names, result.profile.compression.method)
        assert score is not None
        assert score.samples == 5
        assert score.value == pytest.approx(sum(scores.cosine for scores in by_hand) / 5, abs=1e-6)
        assert score.interval_95 is not None
        assert score.interval_95[0] < score.value < score.interval_95[1]
    assert results.held_out is not None
    assert results.held_out.value != results.tuning.value
    assert results.metrics.cosine == pytest.approx(results.held_out.value)


def test_the_search_does_not_see_what_is_held_out(loaded: Loaded, tmp_path: Path) -> None:
    """Neither its values nor its choice depend on whether anything is."""
    results = [
        run(loaded, tmp_path / str(holdout), **HALF, holdout=holdout, storage=None) for holdout in (0, 2, 5)
    ]
    assert len({result.profile.search.study for result in results}) == 1
    assert len({result.profile.compression for result in results}) == 1
    assert len({result.profile.results.tuning.value for result in results}) == 1
    assert [result.samples["held_out"] for result in results] == [0, 2, 5]


@pytest.mark.parametrize("options", [{"fraction": 1.0}, {"samples": 5, "holdout": 0}])
def test_without_held_out_prompts_it_is_judged_on_those_it_was_tuned_on(
    loaded: Loaded, tmp_path: Path, options: dict[str, Any]
) -> None:
    result = run(loaded, tmp_path, ROWS, trials=3, **options)
    results = result.profile.results
    assert not result.judgement.held_out
    assert rows_of(result)[1] == ()
    assert results.held_out is None
    assert result.samples["held_out"] == 0
    assert len(result.judgement.tuned) == result.samples["used"]
    assert results.metrics.cosine == pytest.approx(results.tuning.value)


def test_held_out_prompts_that_fit_in_the_size_judge_nothing(loaded: Loaded, tmp_path: Path) -> None:
    data = dataset((60, 61, 62, 63))
    # Drawn by a hash, so the short ones are put where it falls.
    tuning = {row.id for row in sample_rows(data, samples=2)}
    rows = [
        row if row.id in tuning else type(row)(row.id, dataset((30 + i,)).rows[0].messages)
        for i, row in enumerate(data.rows)
    ]
    data = type(data)("texts", "written here", "", tuple(rows), data.content_hash, 0)
    listener = Listener()
    result = run(loaded, tmp_path, data, listener, samples=2, trials=2)
    assert listener.events[0] == ("prepared", 2, 2)
    assert len(rows_of(result)[1]) == 2
    assert not result.judgement.held_out
    assert result.profile.results.held_out is None
    assert result.samples == {
        "dataset": 4, "sampled": 2, "fitting": 0, "cut": 0, "dropped": 0, "used": 2, "held_out": 0,
    }  # fmt: skip


def test_too_few_prompts_have_differences_without_an_interval(loaded: Loaded, tmp_path: Path) -> None:
    result = run(loaded, tmp_path, ROWS, samples=3, holdout=2, trials=2)
    for found, baseline in zip(
        result.judgement.methods[1:-1], result.profile.results.baselines[:-1], strict=True
    ):
        assert found.behind is not None
        assert math.isfinite(found.behind.mean)
        assert (found.behind.low, found.behind.high, found.behind.samples) == (None, None, 2)
        assert baseline.difference is not None
        assert baseline.difference.interval_95 is None


def test_two_runs_with_the_same_seed_judge_alike(loaded: Loaded, tmp_path: Path) -> None:
    first, second = (run(loaded, tmp_path / name, **HALF) for name in ("one", "two"))
    assert first.profile.results == second.profile.results
    assert set(DIRECTIONS) == set(first.profile.results.metrics.model_dump())
