from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.benchmarking.capacity import Capacity, capacities, within_context
from clusterprof.benchmarking.results import Decode, Prefill

TOKENS = 100
Sizes = st.integers(1, 200)


def estimate(
    *,
    peak: int,
    cache: int,
    free: int,
    batch: int = 1,
    rows: int = 1,
    compressed: bool = False,
    proportional: bool = True,
) -> Capacity:
    """Of one row with this prefill peak and cache, in a memory with so much room beside the weights."""
    name = "ours" if compressed else "full"
    prefill = Prefill(TOKENS, rows, name, compressed, 1.0, 1.0, peak * rows, cache * rows, None)
    decode = Decode(TOKENS, batch, rows, name, compressed, 1.0, 1.0, 1.0, cache * batch, cache * batch, None)
    [found] = capacities([prefill], [decode], weights=77, memory=77 + free, proportional=proportional)
    return found


@given(peak=Sizes, cache=Sizes, free=st.integers(0, 2000))
def test_one_row_more_would_not_fit(peak: int, cache: int, free: int) -> None:
    found = estimate(peak=peak, cache=cache, free=free)
    fitting = [rows for rows in range(1, 2002) if rows * peak <= free and rows * cache <= free]
    assert found.largest_batch == max(fitting, default=0)
    fitting = [rows for rows in range(1, 2002) if peak + (rows - 1) * cache <= free]
    assert found.largest_batch_one_by_one == max(fitting, default=0)


@given(peak=Sizes, cache=Sizes, free=st.integers(0, 2000), batch=st.integers(1, 9), compressed=st.booleans())
def test_one_token_more_would_not_fit(peak: int, cache: int, free: int, batch: int, compressed: bool) -> None:
    found = estimate(peak=peak, cache=cache, free=free, batch=batch, compressed=compressed)

    def longest(*, one_by_one: bool) -> int:
        for tokens in count(1):
            # In hundredths of a byte, as the prompt has a hundred tokens.
            peak_then = peak * tokens
            cache_then = cache * (TOKENS if compressed else tokens)
            together = batch * max(peak_then, cache_then)
            needed = peak_then + (batch - 1) * cache_then if one_by_one else together
            if needed > free * TOKENS:
                return tokens - 1
        raise AssertionError

    # One token of tolerance for the rounding of a division.
    assert found.longest_prompt == pytest.approx(longest(one_by_one=False), abs=1)
    assert found.longest_prompt_one_by_one == pytest.approx(longest(one_by_one=True), abs=1)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_peak_of_several_rows_is_shared_among_them(rows: int) -> None:
    found = estimate(peak=10, cache=5, free=100, batch=4, rows=rows)
    assert (found.largest_batch, found.largest_batch_one_by_one) == (10, 19)


def test_compression_pays_most_where_rows_come_one_by_one() -> None:
    full = estimate(peak=50, cache=40, free=1000)
    ours = estimate(peak=20, cache=5, free=1000, compressed=True)
    assert (full.largest_batch, full.largest_batch_one_by_one) == (20, 24)
    assert (ours.largest_batch, ours.largest_batch_one_by_one) == (50, 197)


def test_weights_alone_may_be_too_much() -> None:
    found = estimate(peak=50, cache=40, free=-10)
    assert (found.largest_batch, found.largest_batch_one_by_one, found.longest_prompt) == (0, 0, 0)
    assert found.longest_prompt_one_by_one == 0


def test_no_length_where_the_prefill_is_not_proportional() -> None:
    found = estimate(peak=50, cache=40, free=1000, proportional=False)
    assert found.longest_prompt is found.longest_prompt_one_by_one is None
    assert found.largest_batch == 20


def test_what_was_not_measured_is_not_estimated() -> None:
    decode = Decode(TOKENS, 1, 1, "it", False, None, None, None, None, None, "out of memory")
    prefill = Prefill(TOKENS, 1, "it", False, None, None, None, None, "out of memory")
    assert capacities([prefill], [decode], weights=0, memory=1, proportional=True) == []


def test_nothing_is_estimated_for_a_compressed_cache_that_leaves_nothing_out() -> None:
    prefill = Prefill(TOKENS, 1, "ours", False, 1.0, 1.0, 50, 40, None)
    decode = Decode(TOKENS, 1, 1, "ours", False, 1.0, 1.0, 1.0, 40, 40, None)
    found = capacities([prefill], [decode], weights=0, memory=1000, proportional=True)
    assert found == [Capacity(TOKENS, 1, "ours", None, None, None, None)]


def test_no_prompt_is_longer_than_the_context() -> None:
    found = [
        Capacity(TOKENS, 2, "full", 3, 4, 500, 600),
        Capacity(TOKENS, 2, "ours", 3, 4, 501, None),
        Capacity(TOKENS, 2, "topk", 3, 4, 400, 500),
    ]
    assert within_context(found, 500) == [
        Capacity(TOKENS, 2, "full", 3, 4, 500, 500, False, True),
        Capacity(TOKENS, 2, "ours", 3, 4, 500, None, True, False),
        Capacity(TOKENS, 2, "topk", 3, 4, 400, 500, False, False),
    ]
    assert within_context(found, None) == found
