"""Memory: what a piece of work needs at its peak, and what a model's weights take."""

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from clusterprof.errors import ClusterprofError

T = TypeVar("T")

# Above the highest severity that torch's tracing library has for its messages.
_SILENT = "99"


def peak_bytes(run: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """Run something once and return the most memory it held at a time, beyond what was there before.

    On CUDA that is what torch's allocator counts. On the CPU it is the sum of torch's own allocations, to the
    byte, taken from a profiler's trace: memory that other libraries allocate is not seen, and the run takes
    longer than without, so time it apart.

    Parameters
    ----------
    run : callable
        The work. What it returns is held at the end, and so counts.
    device : torch.device
        Where it allocates: the CPU or a CUDA device.

    Returns
    -------
    tuple of int and T
        Bytes, and what `run` returned.

    Raises
    ------
    ClusterprofError
        On any other device.
    """
    if device.type == "cuda":
        return _peak_on_cuda(run, device)
    if device.type == "cpu":
        return _peak_on_cpu(run)
    raise ClusterprofError(
        f"Peak memory cannot be measured on a device of type {device.type}; use the CPU or a CUDA device."
    )


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's parameters and buffers; shared ones count once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def _peak_on_cuda(run: Callable[[], T], device: torch.device) -> tuple[int, T]:
    # Garbage that is freed in the middle of the run would make it look smaller.
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result


def _peak_on_cpu(run: Callable[[], T]) -> tuple[int, T]:
    with TemporaryDirectory() as folder, _silent_tracing():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_bytes())["traceEvents"]
    return _highest_sum(events), result


def _highest_sum(events: list[dict[str, Any]]) -> int:
    """The most bytes held at a time by what was allocated during a trace.

    Its own running total would not do: of memory that was allocated in an earlier trace and freed outside of
    any, it still believes that it is there, and takes it off when somebody else frees the same address.
    """
    held: dict[int, int] = {}
    total = highest = 0
    memory = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(memory, key=lambda event: float(event["ts"])):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            held[address] = size
            total += size
            highest = max(highest, total)
        else:
            total -= held.pop(address, 0)
    return highest


@contextmanager
def _silent_tracing() -> Iterator[None]:
    """Keep the tracing library from writing to stderr; it reads the variable when it is first used."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, _SILENT)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
