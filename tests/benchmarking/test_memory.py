import os
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterprof.benchmarking.memory import peak_bytes, weight_bytes
from clusterprof.errors import ClusterprofError
from tests.tiny import tiny_llama

CPU = torch.device("cpu")


def numbers(count: int, device: torch.device = CPU) -> Tensor:
    """Four bytes each."""
    return torch.zeros(count, dtype=torch.float32, device=device)


def test_the_highest_sum_counts_not_the_last() -> None:
    def run() -> str:
        first = numbers(10_000)
        second = numbers(50_000)
        del first
        third = numbers(2_500)
        del second, third
        return "done"

    assert peak_bytes(run, CPU) == (240_000, "done")


def test_memory_that_was_freed_can_be_used_again() -> None:
    def run() -> None:
        for _ in range(10):
            numbers(10_000)

    assert peak_bytes(run, CPU)[0] == 40_000


def test_the_result_counts_and_what_was_there_before_does_not() -> None:
    before = [numbers(100_000)]

    def run() -> Tensor:
        before.clear()
        return numbers(10_000)

    peak, result = peak_bytes(run, CPU)
    assert peak == 40_000
    assert result.shape == (10_000,)


def test_temporaries_inside_an_operation_count() -> None:
    tensor = numbers(10_000).view(100, 100)

    # No tensor of this size is ever seen from Python: the transposed copy comes and goes inside a call.
    peak, _ = peak_bytes(lambda: tensor.t().reshape(-1).sum(), CPU)
    assert 40_000 <= peak < 80_000


def test_a_run_is_not_confused_by_what_earlier_ones_left() -> None:
    """A trace's own total still holds what was allocated in an earlier trace and freed since."""

    def run() -> Tensor:
        numbers(10_000)
        return numbers(10_000)

    for _ in range(3):
        kept = peak_bytes(run, CPU)
        assert kept[0] == 40_000
        del kept
        # Allocated outside of any trace, most likely where the freed one was.
        untraced = numbers(10_000)
        del untraced


def test_it_says_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    peak_bytes(lambda: numbers(10), CPU)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("before", [None, "99"])
def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if before is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", before)
    peak_bytes(lambda: numbers(10), CPU)
    assert os.environ.get("KINETO_LOG_LEVEL") == before


def test_an_error_comes_through_and_the_next_run_works() -> None:
    def run() -> Any:
        raise MemoryError("too much")

    with pytest.raises(MemoryError, match="too much"):
        peak_bytes(run, CPU)
    assert peak_bytes(lambda: numbers(10), CPU)[0] == 40


def test_another_device_is_an_error() -> None:
    with pytest.raises(ClusterprofError, match="type meta"):
        peak_bytes(lambda: None, torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_cuda() -> None:
    device = torch.device("cuda")

    def run() -> Tensor:
        first = numbers(2**20, device)
        numbers(2**22, device)
        return first

    # Held from before, and freed by nobody: it does not count.
    before = numbers(2**24, device)
    peak, result = peak_bytes(run, device)
    assert peak == 4 * (2**20 + 2**22)
    assert (len(before), len(result)) == (2**24, 2**20)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_count_once(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    embeddings = 128 * 64
    attention = 64 * (64 + 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 96 + 2 * 64
    rope = 2 * 8
    assert weight_bytes(model) == 4 * (embeddings * (1 if tied else 2) + 2 * layer + 64 + rope)
