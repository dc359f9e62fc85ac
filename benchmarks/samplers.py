"""How many replays each sampler needs to come within 1 % of a dense grid's best.

    python -m benchmarks.samplers [--dataset needle] [--size 128] [--samples 6] [--grid 200] [--seeds 5]

Each sampler searches from the paper's values alone, and from where tuned SnapKV ends (`start`), as `tune` does. Prompts
have 2,000 tokens, the objective is the default one, and a replay is one of one prompt.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
from optuna.trial import TrialState

from clusterprof.cache import cache_dir
from clusterprof.data import build_prompt, load_dataset, sample_rows
from clusterprof.errors import CompressionError
from clusterprof.evaluation.session import Session
from clusterprof.methods import SnapKV
from clusterprof.models import load_model
from clusterprof.profile import Compression
from clusterprof.profiling.collect import find_capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import Scores, mean_scores
from clusterprof.profiling.search import search
from clusterprof.profiling.settings import SamplerName, TuneSettings
from clusterprof.profiling.spaces import Point, SearchSpace, search_space

WINDOW, TOKENS, TRIALS = 32, 2000, 50
OBJECTIVE = TuneSettings.objective
SAMPLERS: tuple[SamplerName, ...] = ("tpe", "gp", "grid")


@dataclass
class Counted(Evaluator):
    """Replays what no run has replayed yet, and counts what each run would have had to replay."""

    shared: dict[tuple[int, str], Scores | CompressionError] = field(default_factory=dict)
    asked: set[tuple[int, str]] = field(default_factory=set)

    def sample_scores(self, i: int, compressions: Sequence[Compression]) -> list[Scores | CompressionError]:
        keys = [(i, compression.model_dump_json()) for compression in compressions]
        self.asked.update(keys)
        new = {key: it for key, it in zip(keys, compressions, strict=True) if key not in self.shared}
        self.shared.update(zip(new, super().sample_scores(i, list(new.values())), strict=True))
        return [self.shared[key] for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description="samplers against a dense grid")
    parser.add_argument("--dataset", default="needle")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--grid", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    evaluator = _evaluator(arguments.dataset, arguments.samples)
    space, snapkv = (
        search_space(name, evaluator.captures, arguments.size, WINDOW, OBJECTIVE)
        for name in ("clusterattn", "snapkv")
    )
    values = [
        mean_scores(evaluator.scores(space.compression(point)))[OBJECTIVE]
        for point in space.grid(arguments.grid)
    ]
    goal = min(values) + 0.01 * (max(values) - min(values))
    print(
        f"grid of {len(values)} points: {OBJECTIVE} {min(values):.4f} to {max(values):.4f}; goal {goal:.4f}"
    )
    print(
        f"| sampler | start | reached it | replays until then, median | {OBJECTIVE} in the end, mean "
        f"| replays of {TRIALS} trials |"
    )
    print("|---|---|---|---|---|---|")
    for sampler in SAMPLERS:
        for warm in (False, True):
            runs = [
                _run(evaluator, space, snapkv, sampler, seed, goal, warm=warm)
                for seed in range(arguments.seeds)
            ]
            reached = [until for until, _, _ in runs if until is not None]
            print(
                f"| {sampler} | {'tuned SnapKV' if warm else 'paper'} | {len(reached)} of {len(runs)} "
                f"| {statistics.median(reached) if reached else 'none'} "
                f"| {np.mean([best for _, best, _ in runs]):.4f} | {np.mean([count for *_, count in runs]):.0f} |",
                flush=True,
            )


def _evaluator(dataset: str, samples: int) -> Counted:
    model, tokenizer = load_model("builtin")
    session = Session.open(model, tokenizer, cache_dir(), decode_tokens=64)
    rows = sample_rows(load_dataset(dataset, tokenizer=tokenizer, tokens=TOKENS), samples=samples)
    prompts = [build_prompt(row, tokenizer, max_tokens=TOKENS) for row in rows]
    captures = [find_capture(model, tokenizer, it, session.captures, window=WINDOW) for it in prompts]
    return Counted(model, captures)


def _run(
    evaluator: Counted,
    space: SearchSpace,
    snapkv: SearchSpace,
    sampler: SamplerName,
    seed: int,
    goal: float,
    *,
    warm: bool,
) -> tuple[int | None, float, int]:
    """Replays until the goal was reached, the best value, and all replays; those of SnapKV's search do not count."""
    start: Point | None = None
    if warm:
        rival = _searched(evaluator, snapkv, sampler, seed, None, [])
        method = snapkv.compression(rival.best_params).method
        assert isinstance(method, SnapKV)
        start = space.like(method)
    evaluator.asked.clear()
    counts: list[int] = []
    study = _searched(evaluator, space, sampler, seed, start, counts)
    best = np.minimum.accumulate(
        [
            trial.value if trial.state == TrialState.COMPLETE and trial.value is not None else np.inf
            for trial in study.trials
        ]
    )
    until = next((count for count, value in zip(counts, best, strict=True) if value <= goal), None)
    return until, float(best[-1]), counts[-1]


def _searched(
    evaluator: Counted,
    space: SearchSpace,
    sampler: SamplerName,
    seed: int,
    start: Point | None,
    counts: list[int],
) -> optuna.Study:
    study = optuna.create_study(direction="minimize")
    search(
        study,
        evaluator,
        space,
        sampler=sampler,
        objective=OBJECTIVE,
        trials=TRIALS,
        timeout=None,
        seed=seed,
        start=start,
        on_round=lambda trials: counts.extend([len(evaluator.asked)] * len(trials)),
        on_interrupt=lambda: None,
    )
    return study


if __name__ == "__main__":
    main()
