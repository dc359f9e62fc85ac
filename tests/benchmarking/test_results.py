import pytest

from clusterprof.benchmarking.measure import Measurements, Samples
from clusterprof.benchmarking.results import decode_results, prefill_results
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import subjects
from clusterprof.methods import TopK
from clusterprof.profile import Compression

SUBJECTS = subjects(Compression(size=512, window=32, method=TopK()), tuned=True)[:3]
SETTINGS = BenchSettings(tokens=(500, 1000), batch_sizes=(1, 4), new_tokens=10)


def measurements() -> Measurements:
    found = Measurements()
    found.prefills[1000, 1, "full"] = Samples([2.0, 9.0, 4.0], peak_bytes=70, kv_bytes_end=40)
    found.prefills[1000, 1, "ours"] = Samples([5.0, 5.0, 5.0], peak_bytes=50, kv_bytes_end=20)
    found.prefills[500, 1, "ours"] = Samples([1.0], peak_bytes=30, kv_bytes_end=20)
    found.decodes[1000, 4, "full"] = Samples([8.0, 8.0, 1.0], kv_bytes_start=160, kv_bytes_end=164)
    found.decodes[1000, 4, "full_preallocated"] = Samples([4.0], kv_bytes_start=164, kv_bytes_end=164)
    found.decodes[1000, 4, "ours"] = Samples([2.0], kv_bytes_start=80, kv_bytes_end=84)
    return found


def test_prefills_are_medians_and_slower_is_above_one() -> None:
    first, full, ours = prefill_results(measurements(), SUBJECTS, SETTINGS)
    assert (first.tokens, first.subject, first.seconds, first.ratio_to_full) == (500, "ours", 1.0, None)
    assert (full.seconds, full.ratio_to_full, full.peak_bytes, full.kv_bytes) == (4.0, 1.0, 70, 40)
    assert (ours.seconds, ours.ratio_to_full, ours.peak_bytes, ours.kv_bytes) == (5.0, 1.25, 50, 20)


def test_spread_is_the_longest_over_the_shortest() -> None:
    first, full, ours = prefill_results(measurements(), SUBJECTS, SETTINGS)
    assert (first.spread, full.spread, ours.spread) == (None, 4.5, 1.0)
    assert decode_results(measurements(), SUBJECTS, SETTINGS)[0].spread == 8.0


def test_only_a_prompt_above_the_size_is_compressed() -> None:
    compressed = {
        (it.tokens, it.subject): it.compressed for it in prefill_results(measurements(), SUBJECTS, SETTINGS)
    }
    assert compressed == {(500, "ours"): False, (1000, "full"): False, (1000, "ours"): True}


def test_decoding_counts_all_rows_and_faster_is_above_one() -> None:
    full, roomy, ours = decode_results(measurements(), SUBJECTS, SETTINGS)
    assert [it.tokens_per_s for it in (full, roomy, ours)] == [5.0, 10.0, 20.0]
    assert [it.ratio_to_full for it in (full, roomy, ours)] == [1.0, 2.0, 4.0]
    assert [it.ratio_to_preallocated for it in (full, roomy, ours)] == [0.5, 1.0, 2.0]
    assert (ours.batch, ours.prefilled_rows, ours.kv_bytes_start, ours.kv_bytes_end) == (4, 1, 80, 84)


def test_what_has_no_number_has_its_reason() -> None:
    found = measurements()
    found.decodes[1000, 4, "full"] = Samples(error="out of memory")
    full, _, ours = decode_results(found, SUBJECTS, SETTINGS)
    assert (full.tokens_per_s, full.error) == (None, "out of memory")
    assert (ours.tokens_per_s, ours.ratio_to_full, ours.ratio_to_preallocated) == (20.0, None, 2.0)


def test_what_was_begun_but_not_measured_is_no_result() -> None:
    found = measurements()
    found.prefills[500, 1, "full"] = Samples()
    found.decodes[500, 1, "full"] = Samples(kv_bytes_start=20)
    assert len(prefill_results(found, SUBJECTS, SETTINGS)) == 3
    assert len(decode_results(found, SUBJECTS, SETTINGS)) == 3


@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_were_really_read(whole: bool) -> None:
    settings = BenchSettings(tokens=(1000,), batch_sizes=(1, 4), prefill_batch=whole)
    found = measurements()
    found.prefills[1000, 4, "full"] = Samples([3.0], peak_bytes=200, kv_bytes_end=160)
    assert {it.rows for it in prefill_results(found, SUBJECTS, settings)} == ({1, 4} if whole else {1})
    assert {it.prefilled_rows for it in decode_results(found, SUBJECTS, settings)} == {4 if whole else 1}
