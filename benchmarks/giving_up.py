"""What giving candidates up early saves and loses, for the tests that a search could use.

    python -m benchmarks.giving_up needle.jsonl docs.jsonl code.jsonl

The files are those of `benchmarks.objective`, which has every point's scores on every prompt. A search is imitated on
them: 50 of the points in random order, four at a time, each prompt by prompt on 10 of them, until it is shown to be
behind the best one so far. The loss is how far the best point that is left lies behind the best of the 50, as a
share of their range.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterprof.profiling.objective import DIRECTIONS
from clusterprof.profiling.search import is_behind

POINTS, PROMPTS, ROUND = 50, 10, 4
# All of two, three, ... samples worse.
CHANCES = [1 / 4, 1 / 8, 1 / 16, 1 / 32]


def main() -> None:
    parser = argparse.ArgumentParser(description="what giving candidates up early saves and loses")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=5, help="imitated searches per file and size")
    arguments = parser.parse_args()
    print(
        "| objective | given up at p of at most | replays made | best point kept | loss, mean | loss, highest |"
    )
    print("|---|---|---|---|---|---|")
    for objective, direction in DIRECTIONS.items():
        tables = [
            table if direction == "maximize" else -table
            for path in arguments.files
            for table in _tables(path, objective)
        ]
        for chance in CHANCES:
            # The same prompts and orders for each.
            rng = np.random.default_rng(0)
            runs = [_imitated(table, chance, rng) for table in tables for _ in range(arguments.repeats)]
            made, losses = np.array(runs).T
            print(
                f"| {objective} | 1/{1 / chance:.0f} | {made.mean():.2f} | {(losses == 0).mean():.2f} "
                f"| {losses.mean():.4f} | {losses.max():.3f} |"
            )


def _tables(path: Path, objective: str) -> list[NDArray[np.float64]]:
    """Of each size: prompts by points."""
    records = [json.loads(line)["scores"] for line in path.read_text().splitlines()]
    return [
        np.array([[point[objective] for point in it[size]] for it in records if objective in it[size][0]])
        for size in records[0]
    ]


def _imitated(table: NDArray[np.float64], chance: float, rng: np.random.Generator) -> tuple[float, float]:
    """Share of the replays that were made, and the loss; more is better in the table."""
    prompts = rng.choice(len(table), min(PROMPTS, len(table)), replace=False)
    values = table[np.ix_(prompts, rng.permutation(table.shape[1])[:POINTS])]
    means = values.mean(axis=0)
    best: int | None = None
    made = 0
    for start in range(0, POINTS, ROUND):
        known = best
        for point in range(start, min(start + ROUND, POINTS)):
            seen = len(prompts)
            if known is not None:
                gains = values[:, point] - values[:, known]
                seen = next((n for n in range(1, seen) if is_behind(gains[:n], chance)), seen)
            made += seen
            if seen == len(prompts) and (best is None or means[point] > means[best]):
                best = point
    assert best is not None
    return made / values.size, float((means.max() - means[best]) / np.ptp(means))


if __name__ == "__main__":
    main()
