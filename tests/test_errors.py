import pytest
import torch

from clusterprof.errors import CompressionError, DataError, spares_the_run


def test_real_cpu_allocation_failure_spares_the_run() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert spares_the_run(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), CompressionError("NaN")])
def test_bad_numbers_and_too_little_memory_spare_the_run(error: Exception) -> None:
    assert spares_the_run(error)


@pytest.mark.parametrize("error", [DataError("no rows"), RuntimeError("shape mismatch"), KeyError("x")])
def test_everything_else_does_not(error: Exception) -> None:
    assert not spares_the_run(error)
