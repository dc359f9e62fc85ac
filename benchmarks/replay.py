"""Replay against the naive trial, and against its floor.

    python -m benchmarks.replay [--tokens 4000] [--decode-tokens 64] [--size 512] [--repeats 9]

The naive trial is what evaluating one (num_block, theta) costs without captures: a fresh prefill, compression,
and one decode step per token with its attention weights computed. The floor is one plain forward of the same
tokens over a cache of the same size. Also prints the largest difference in value between replay and naive trial.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from clusterprof.data import build_prompt, load_dataset
from clusterprof.methods import ClusterAttn
from clusterprof.models import load_model
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.replay import replay, replay_all
from clusterprof.runtime.selection import kept_positions
from clusterprof.runtime.transformers_names import CACHE
from tests.reference.naive_trial import full_run, trial_against

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description="replay against the naive trial")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()

    model, tokenizer = load_model("builtin")
    row = load_dataset("docs", tokenizer=tokenizer, tokens=arguments.tokens).rows[0]
    prompt = build_prompt(row, tokenizer, max_tokens=arguments.tokens)
    input_ids = torch.tensor([prompt.input_ids])
    # No end tokens: exactly so many steps are compared.
    capture = capture_prompt(
        model, input_ids, window=32, decode_tokens=arguments.decode_tokens, end_tokens=set()
    )
    compression = Compression(
        size=arguments.size, window=32, method=ClusterAttn.paper_default(arguments.size)
    )
    kept = kept_positions(compression.method, capture.observation, compression.size)
    tokens = capture.tokens[:-1].tolist()

    replay(model, capture, kept)
    _floor(model, capture, arguments.size)
    together = _several(compression)
    replays, rounds, floors = [], [], []
    # In turns, so that whatever else the machine does falls on both.
    for _ in range(arguments.repeats):
        seconds, replayed = _timed(lambda: replay(model, capture, _select(compression, capture)))
        replays.append(seconds)
        rounds.append(_timed(lambda: _round(model, capture, together))[0] / len(together))
        floors.append(_timed(lambda: _floor(model, capture, arguments.size))[0])
    replay_s, floor_s = median(replays), median(floors)
    full = full_run(model, input_ids, tokens)
    naive_s, naive = _timed(lambda: trial_against(full, model, input_ids, tokens, kept))

    differences = {
        name: float((getattr(replayed, name).double() - getattr(naive, name)).abs().max())
        for name in ("cosine", "cosine_padded", "kl", "loss", "agreement")
    }
    print(f"prompt {input_ids.shape[1]} tokens, {len(tokens)} decoded, size {arguments.size}")
    print(f"naive trial {naive_s:.2f} s, replay {replay_s:.3f} s, floor {floor_s:.3f} s")
    print(f"naive / replay = {naive_s / replay_s:.1f}")
    print(f"replay / floor = {replay_s / floor_s:.2f}")
    print(f"replay, {len(together)} in one forward / floor = {median(rounds) / floor_s:.2f}")
    print("largest difference in value: " + ", ".join(f"{name} {d:.1e}" for name, d in differences.items()))


def _several(compression: Compression) -> list[Compression]:
    """As many candidates as a search replays together."""
    methods = [ClusterAttn(num_block=num_block, theta=2e-3) for num_block in (2, 4, 8, 16)]
    return [compression.uniform(method) for method in methods]


def _round(model: PreTrainedModel, capture: Capture, compressions: list[Compression]) -> None:
    replay_all(model, capture, torch.stack([_select(each, capture) for each in compressions]))


def _select(compression: Compression, capture: Capture) -> torch.Tensor:
    return kept_positions(compression.method, capture.observation, compression.size)


@torch.inference_mode()
def _floor(model: PreTrainedModel, capture: Capture, size: int) -> None:
    cache = DynamicCache(config=model.config)
    for i, layer in capture.layers.items():
        cache.update(layer.keys[None, :, :size], layer.values[None, :, :size], i)
    model(input_ids=capture.tokens[None, :-1], use_cache=True, **{CACHE: cache})


def _timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds and the result."""
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
