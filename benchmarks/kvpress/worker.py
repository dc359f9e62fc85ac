"""kvpress's side, run in its environment: `python -m benchmarks.kvpress.worker TASK RUNS`."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from kvpress import SnapKVPress  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.kvpress.exchange import SNAPKV, read_task, write_runs
from benchmarks.kvpress.measure import measure


def main() -> None:
    task = read_task(Path(sys.argv[1]))
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, local_files_only=True)

    def forward(tokens: Tensor, cache: DynamicCache, position: int) -> Tensor:
        # As generate() does: the cache of a kvpress prompt no longer knows how many tokens there were.
        positions = torch.arange(position, position + tokens.shape[1])
        output = model(tokens, past_key_values=cache, cache_position=positions, logits_to_keep=1)
        logits: Tensor = output.logits
        return logits[:, -1]

    def compressor(length: int) -> AbstractContextManager[object]:
        press = SnapKVPress(
            compression_ratio=task.compression_ratio(length),
            window_size=task.window,
            kernel_size=task.kernel_size,
        )
        context: AbstractContextManager[object] = press(model)
        return context

    write_runs(Path(sys.argv[2]), measure(task, "kvpress", model, forward, {SNAPKV: compressor}))


if __name__ == "__main__":
    main()
