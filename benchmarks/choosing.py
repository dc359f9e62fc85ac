"""What comes of a search's best point on other prompts, taken always, or only where it is shown to be better.

    python -m benchmarks.choosing --workload needle --file needle.jsonl

SnapKV's points with average pooling, the paper's and others spread over ClusterAttn's space are replayed on all
prompts. A tune is imitated on them: on some prompts, drawn by chance, the best of SnapKV's points is the start, and 48
of the others, drawn by chance, are what a search tries; what it takes is held against the start on the prompts that
were not drawn. Results go to the file as they come, and a second run goes on where the first one stopped.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import IntDistribution
from optuna.trial import create_trial

from benchmarks.objective import DECODE_TOKENS, WINDOW, Values, capture_of, points_of, prompts_of, replayed
from clusterprof.cache import cache_dir
from clusterprof.evaluation.session import Session
from clusterprof.methods import Reduction, SnapKV
from clusterprof.models import load_model
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.choice import choose
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName
from clusterprof.profiling.spaces import SearchSpace, search_space

_REDUCTIONS: tuple[Reduction, ...] = ("mean", "max")
KERNELS = (1, 3, 5, 9, 13, 19, 25, 31, 37, 45, 53, 63)
SPREAD, SEARCHED = 64, 48
# Of one prompt, each point's scores.
ScoresBySize = dict[str, list[dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description="what comes of a search's best point on other prompts")
    parser.add_argument("--workload", default="needle")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tuned-on", type=int, nargs="+", default=[4, 8, 16], help="prompts of them")
    parser.add_argument("--repeats", type=int, default=100, help="imitated tunes per size")
    parser.add_argument("--file", type=Path, required=True, help="results, JSON lines")
    arguments = parser.parse_args()

    model, tokenizer = load_model("builtin")
    session = Session.open(model, tokenizer, cache_dir(), decode_tokens=DECODE_TOKENS)
    prompts = prompts_of(tokenizer, arguments.workload, arguments.prompts)
    # The range of theta is that of these.
    captures = [capture_of(session, prompt) for prompt in prompts[:8]]
    candidates = {size: _candidates(captures, size) for size in arguments.sizes}
    done = _read(arguments.file)
    with arguments.file.open("a") as file:
        for prompt in prompts:
            if prompt.id not in done:
                scores = replayed(model, capture_of(session, prompt), candidates)
                file.write(json.dumps({"prompt": prompt.id, "scores": scores}) + "\n")
                file.flush()
    done = _read(arguments.file)
    scores_by_prompt = [done[prompt.id] for prompt in prompts]
    _report(scores_by_prompt, arguments.sizes, arguments.tuned_on, arguments.repeats)


def _read(path: Path) -> dict[str, ScoresBySize]:
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {record["prompt"]: record["scores"] for record in records}


def _candidates(captures: Sequence[Capture], size: int) -> list[Compression]:
    """The paper's point, SnapKV's, and others."""
    space = search_space("clusterattn", captures, size, WINDOW, "log_kl")
    return [space.compression(space.first), *_snapkv(space), *points_of(space, SPREAD)]


def _snapkv(space: SearchSpace) -> list[Compression]:
    return [
        space.compression(point)
        for kernel in KERNELS
        for importance in _REDUCTIONS
        if (point := space.like(SnapKV(kernel_size=kernel, importance=importance))) is not None
    ]


def _report(
    records: Sequence[ScoresBySize], sizes: Sequence[int], tuned_on: Sequence[int], repeats: int
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("| objective | tuned on | taken | ahead of the start by, mean | ahead | behind |")
    print("|---|---|---|---|---|---|")
    for objective in DIRECTIONS:
        # Prompts by points.
        tables = [
            np.array([[point[objective] for point in record[str(size)]] for record in records])
            for size in sizes
        ]
        for count in tuned_on:
            # The same prompts and points for each objective.
            rng = np.random.default_rng(0)
            gains = [_imitated(table, objective, count, rng) for table in tables for _ in range(repeats)]
            for name, each in zip(("the best", "the best if shown"), np.array(gains).T, strict=True):
                ahead, behind = (each > 0).mean(), (each < 0).mean()
                print(f"| {objective} | {count} | {name} | {each.mean():+.4f} | {ahead:.2f} | {behind:.2f} |")


def _imitated(
    table: Values, objective: ObjectiveName, count: int, rng: np.random.Generator
) -> tuple[float, float]:
    """How far the best point, and the one that is taken, are ahead of the start on the prompts not tuned on."""
    order = rng.permutation(len(table))
    tuning, others = table[order[:count]], table[order[count:]]
    sign = -1 if DIRECTIONS[objective] == "minimize" else 1
    start = 1 + int(np.argmax(sign * tuning[:, 1 : 1 + 2 * len(KERNELS)].mean(axis=0)))
    searched = 1 + 2 * len(KERNELS) + rng.permutation(SPREAD)[:SEARCHED]
    found = int(searched[np.argmax(sign * tuning[:, searched].mean(axis=0))])
    # The others would not be taken, and many trials take long to add.
    study = _study(tuning, [0, start, found], objective)
    taken, _ = choose(study, [{"point": 0}, {"point": start}], seed=0)
    means = sign * others.mean(axis=0)
    best, chosen = (means[trial.params["point"]] - means[start] for trial in (study.best_trial, taken))
    return float(best), float(chosen)


def _study(table: NDArray[np.float64], points: Sequence[int], objective: ObjectiveName) -> optuna.Study:
    study = optuna.create_study(direction=DIRECTIONS[objective])
    distribution = IntDistribution(0, table.shape[1] - 1)
    for point in points:
        values = table[:, point]
        study.add_trial(
            create_trial(
                value=float(values.mean()),
                params={"point": point},
                distributions={"point": distribution},
                intermediate_values=dict(enumerate(values.tolist())),
            )
        )
    return study


if __name__ == "__main__":
    main()
