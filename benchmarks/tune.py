"""What a tune costs: its captures, its searches, the naive way, and what a dense grid finds.

    python -m benchmarks.tune [--tokens 4000] [--samples 10] [--decode-tokens 64] [--trials 50] [--size 512]
        [--objective kl] [--grid 200]

The naive way evaluates each candidate on each prompt by a prefill, compression and single decode steps; it is measured
on two prompts and multiplied. The grid is evaluated in full on the captures of the tune.
"""

import argparse
import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.data import Dataset, Prompt, build_prompt, load_dataset, sample_rows
from clusterprof.models import load_model
from clusterprof.profiling.collect import find_capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, mean_scores
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.spaces import search_space
from clusterprof.profiling.store import CaptureStore
from clusterprof.profiling.tune import TuneResult, tune
from clusterprof.runtime.selection import kept_positions
from tests.reference.naive_trial import full_run, trial_against

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna.trial import FrozenTrial

    from clusterprof.profile import DroppedSample
    from clusterprof.profiling.samples import Samples


@dataclass
class Clock:
    """A `TuneListener` that notes when each part of a tune begins, in seconds."""

    begun: dict[str, float] = field(default_factory=dict)

    def prepared(self, samples: "Samples") -> None:
        """Captures begin."""
        self.begun["capture"] = time.monotonic()

    def captured(self, prompt: Prompt, seconds: float, error: str | None) -> None:
        """Nothing begins."""

    def left_out(self, sample: "DroppedSample") -> None:
        """Nothing begins."""

    def over_limit(self, limit_bytes: int) -> None:
        """Nothing begins."""

    def searching(self, size: int, method: str, study: str, storage: str, done: int, trials: int) -> None:
        """A search begins."""
        self.begun[method] = time.monotonic()

    def tried(self, trials: "Sequence[FrozenTrial]", best: "FrozenTrial | None") -> None:
        """Nothing begins."""

    def interrupting(self) -> None:
        """Nothing begins."""

    def searching_per_layer(self, steps: int) -> None:
        """Nothing begins: it is not asked for."""

    def tried_per_layer(self) -> None:
        """Nothing begins."""

    def comparing(self, methods: int) -> None:
        """Judging begins."""
        self.begun["judge"] = time.monotonic()

    def compared(self, label: str) -> None:
        """Nothing begins."""

    def seconds(self, end: float) -> dict[str, float]:
        """How long each part took."""
        ends = [*list(self.begun.values())[1:], end]
        return {part: ends[i] - begun for i, (part, begun) in enumerate(self.begun.items())}


@dataclass(frozen=True)
class Cost:
    """What one tune took.

    Attributes
    ----------
    seconds : dict of str to float
        Of its captures ("capture"), each method's search, and judging ("judge").
    replays : int
        Of both searches, each of one sample.
    peak_bytes : int
        Most memory of the process, the model and memory-mapped captures included.
    """

    seconds: dict[str, float]
    replays: int
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of a tune")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--sampler", choices=["tpe", "gp", "grid"], default="tpe")
    parser.add_argument("--objective", choices=list(DIRECTIONS), default=TuneSettings.objective)
    parser.add_argument("--grid", type=int, default=200, help="points of the dense grid; 0 for none")
    parser.add_argument("--json", action="store_true", help="only the tune, as one JSON object")
    arguments = parser.parse_args()
    settings = TuneSettings(
        sizes=(arguments.size,),
        samples=arguments.samples,
        holdout=0,
        decode_tokens=arguments.decode_tokens,
        trials=arguments.trials,
        objective=arguments.objective,
        sampler=arguments.sampler,
        tokens=arguments.tokens,
    )
    model, tokenizer = load_model("builtin")
    dataset = load_dataset("docs", tokenizer=tokenizer, tokens=arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        result, cost = measured(model, tokenizer, dataset, settings, Path(folder))
        if arguments.json:
            print(json.dumps(asdict(cost)))
            return
        _print_cost(cost, _naive_trial(model, tokenizer, dataset, settings), settings)
        if arguments.grid:
            evaluator = _evaluator(model, tokenizer, dataset, settings, Path(folder))
            _print_grid(result, evaluator, settings, arguments.grid)


def measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    settings: TuneSettings,
    folder: Path,
) -> tuple[TuneResult, Cost]:
    """Tune with an empty cache folder."""
    clock = Clock()
    (result,) = tune(model, tokenizer, dataset, settings, cache_dir=folder, listener=clock)
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result, Cost(clock.seconds(time.monotonic()), int(result.timings["replays"]), peak)


def _naive_trial(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: Dataset, settings: TuneSettings
) -> float:
    """Seconds of one candidate on one prompt without captures: the median of two prompts."""
    seconds = []
    for row in sample_rows(dataset, samples=2, seed=settings.seed):
        prompt = build_prompt(row, tokenizer, max_tokens=settings.tokens or 0)
        input_ids = torch.tensor([prompt.input_ids])
        with tempfile.TemporaryDirectory() as folder:
            store = _store(model, tokenizer, settings, Path(folder))
            capture = find_capture(model, tokenizer, prompt, store, window=32)
        method = search_space("clusterattn", [capture], settings.sizes[0], 32, settings.objective).default
        kept = kept_positions(method, capture.observation, settings.sizes[0])
        tokens = capture.tokens[:-1].tolist()
        full = full_run(model, input_ids, tokens)
        started = time.perf_counter()
        trial_against(full, model, input_ids, tokens, kept)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def _evaluator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    settings: TuneSettings,
    folder: Path,
) -> Evaluator:
    """On the captures that the tune left."""
    store = _store(model, tokenizer, settings, folder)
    captures = []
    for row in sample_rows(dataset, samples=settings.samples, seed=settings.seed):
        prompt = build_prompt(row, tokenizer, max_tokens=settings.tokens or 0)
        capture = store.load(prompt.input_ids, 32, accumulated=False)
        assert capture is not None
        captures.append(capture)
    return Evaluator(model, captures)


def _store(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: TuneSettings, folder: Path
) -> CaptureStore:
    origin = Origin.of(model, tokenizer, decode_tokens=settings.decode_tokens)
    return CaptureStore(folder / "captures", origin, settings.capture_memory)


def _print_cost(cost: Cost, naive_s: float, settings: TuneSettings) -> None:
    seconds, samples = cost.seconds, settings.samples or 0
    naive = naive_s * samples * settings.trials
    print(
        f"{samples} prompts of {settings.tokens} tokens, {settings.decode_tokens} decoded, size {settings.sizes[0]}, "
        f"{settings.trials} trials, objective {settings.objective}, sampler {settings.sampler}"
    )
    print(", ".join(f"{part} {value:.1f} s" for part, value in seconds.items()))
    searches = seconds["clusterattn"] + seconds["snapkv"]
    everything = 2 * samples * settings.trials
    print(f"replays {cost.replays} of {everything}, peak memory {cost.peak_bytes / 2**30:.2f} GiB")
    print(f"ClusterAttn's search / capture = {seconds['clusterattn'] / seconds['capture']:.2f}")
    print(f"both searches / capture = {searches / seconds['capture']:.2f}")
    print(f"{settings.trials} naive trials = {naive:.0f} s")
    alone = seconds["capture"] + seconds["clusterattn"]
    print(f"naive / (capture + ClusterAttn's search) = {naive / alone:.1f}")
    print(f"naive / whole tune, SnapKV and judging included = {naive / sum(seconds.values()):.1f}")


def _print_grid(result: TuneResult, evaluator: Evaluator, settings: TuneSettings, points: int) -> None:
    objective, size = settings.objective, settings.sizes[0]
    space = search_space("clusterattn", evaluator.captures, size, 32, objective)
    grid = space.grid(points)
    values = [mean_scores(evaluator.scores(space.compression(point)))[objective] for point in grid]
    best = max(values) if DIRECTIONS[objective] == "maximize" else min(values)
    spread = max(values) - min(values)
    found = result.profile.results.tuning.value
    behind = (best - found if DIRECTIONS[objective] == "maximize" else found - best) / spread
    print(
        f"grid of {len(grid)} points: {objective} {min(values):.4f} to {max(values):.4f}, tuned {found:.4f}"
    )
    print(f"tuned behind the grid's best: {behind:.2%} of its range")


if __name__ == "__main__":
    main()
