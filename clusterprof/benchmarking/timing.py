"""Timing: seconds that a piece of work takes on a device."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Run something once and return the seconds it took, until the device was done with it, and its result."""
    _wait_for(device)
    started = time.perf_counter()
    result = run()
    _wait_for(device)
    return time.perf_counter() - started, result


def _wait_for(device: torch.device) -> None:
    # Work on a GPU goes on after the call that asked for it has returned.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
