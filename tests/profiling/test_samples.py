"""Which prompts are tuned on, and which others judge the result."""

from dataclasses import replace
from typing import Any

import pytest

from clusterprof.data import Dataset, sample_rows
from clusterprof.errors import DataError
from clusterprof.profiling.samples import Samples, draw_samples
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.target import Target
from tests.profiling.test_tune import Loaded, dataset, loaded

__all__ = ["loaded"]

ROWS = dataset(range(50, 70))


def drawn(loaded: Loaded, data: Dataset = ROWS, **options: Any) -> Samples:
    settings = TuneSettings(**{"sizes": (40,), "decode_tokens": 4, **options})
    return draw_samples(*loaded, data, settings)


def ids(samples: Samples) -> tuple[list[str], list[str]]:
    return [prompt.id for prompt in samples.tuning], [prompt.id for prompt in samples.held_out]


@pytest.mark.parametrize("options", [{}, {"fraction": 0.5}, {"samples": 7}, {"samples": 3, "holdout": 17}])
def test_held_out_rows_are_never_among_the_tuned_ones(loaded: Loaded, options: dict[str, Any]) -> None:
    held_out_by_seed = []
    for seed in range(8):
        tuning, held_out = ids(drawn(loaded, seed=seed, **options))
        assert len(set(tuning + held_out)) == len(tuning) + len(held_out)
        assert set(tuning + held_out) <= {row.id for row in ROWS.rows}
        held_out_by_seed.append(frozenset(held_out))
    # They are drawn, not the same ones each time.
    assert len(set(held_out_by_seed)) > 1


@pytest.mark.parametrize(
    ("options", "tuned", "held_out"),
    [
        # So many that a difference can be shown, unless it is said otherwise.
        ({}, 6, 6),
        ({"fraction": 0.2}, 4, 6),
        ({"samples": 1}, 1, 6),
        ({"samples": 6}, 6, 6),
        # As many again.
        ({"samples": 7}, 7, 7),
        ({"samples": 6, "holdout": 2}, 6, 2),
        ({"samples": 6, "holdout": 0}, 6, 0),
        # No more than what is left.
        ({"samples": 15}, 15, 5),
        ({"samples": 6, "holdout": 1000}, 6, 14),
        ({"fraction": 1.0}, 20, 0),
        ({"fraction": 1.0, "holdout": 3}, 20, 0),
    ],
)
def test_so_many_are_held_out(loaded: Loaded, options: dict[str, Any], tuned: int, held_out: int) -> None:
    samples = drawn(loaded, **options)
    assert (len(samples.tuning), len(samples.held_out)) == (tuned, held_out)


@pytest.mark.parametrize(
    ("rows", "tuned", "held_out"),
    [
        (1, 1, 0),
        (2, 1, 1),
        (5, 2, 3),
        (11, 5, 6),
        (12, 6, 6),
        (29, 6, 6),
        (33, 7, 7),
        (40, 8, 8),
        (100, 20, 20),
    ],
)
def test_a_fifth_is_tuned_on_but_not_too_few(loaded: Loaded, rows: int, tuned: int, held_out: int) -> None:
    samples = drawn(loaded, dataset(range(50, 50 + rows)))
    assert (len(samples.tuning), len(samples.held_out)) == (tuned, held_out)


def test_as_many_are_held_out_as_a_target_takes(loaded: Loaded) -> None:
    for share, needed in ((0.8, 14), (0.6, 6), (0.5, 6)):
        target = Target("agreement", 0.9, share)
        assert len(drawn(loaded, samples=4, target=target).held_out) == needed
    assert len(drawn(loaded, samples=6, target=Target("agreement", 0.9), holdout=14).held_out) == 14


def test_holding_out_does_not_change_what_is_tuned_on(loaded: Loaded) -> None:
    expected = [row.id for row in sample_rows(ROWS, samples=5, seed=3)]
    for holdout in (None, 0, 2, 15):
        assert ids(drawn(loaded, samples=5, seed=3, holdout=holdout))[0] == expected


def test_the_order_of_the_rows_does_not_matter(loaded: Loaded) -> None:
    backwards = replace(ROWS, rows=ROWS.rows[::-1])
    for part, other in zip(ids(drawn(loaded)), ids(drawn(loaded, backwards)), strict=True):
        assert part == other[::-1]


def test_what_is_longer_than_a_size_is_kept_in_both_parts(loaded: Loaded) -> None:
    samples = drawn(loaded, fraction=0.5)
    assert samples.longer_than(40) == samples
    longer = samples.longer_than(58)
    for part, before in zip(ids(longer), ids(samples), strict=True):
        assert part == [name for name in before if int(name.removeprefix("row-")) > 58]
        assert 0 < len(part) < len(before)


def test_each_size_needs_a_longer_prompt_to_tune_on(loaded: Loaded) -> None:
    # 69 is there, but held out.
    tuned = [int(name.removeprefix("row-")) for name in ids(drawn(loaded, samples=2))[0]]
    longest = max(tuned)
    assert longest < 69
    assert len(drawn(loaded, samples=2, holdout=18, sizes=(40, longest - 1)).held_out) == 18
    with pytest.raises(
        DataError,
        match=rf"All 2 sampled prompts of texts fit in --size {longest} \(the longest has {longest} ",
    ):
        drawn(loaded, samples=2, holdout=18, sizes=(40, longest))


def test_the_largest_size_must_leave_room_for_decoded_tokens(loaded: Loaded) -> None:
    with pytest.raises(DataError, match=r"--decode-tokens 400 leaves 112 tokens.* than --size 112; lower"):
        drawn(loaded, sizes=(40, 112), decode_tokens=400)
