import time

import pytest
import torch

from clusterprof.benchmarking.timing import timed


def test_seconds_and_result() -> None:
    def run() -> str:
        time.sleep(0.05)
        return "done"

    seconds, result = timed(run, torch.device("cpu"))
    assert 0.05 <= seconds < 1
    assert result == "done"


def test_a_gpu_is_waited_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    timed(lambda: calls.append("run"), torch.device("cuda:1"))
    assert calls == ["wait for cuda:1", "run", "wait for cuda:1"]
