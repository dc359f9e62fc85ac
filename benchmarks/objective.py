"""Which objective predicts what users want: rank correlations over points of ClusterAttn's search space.

    python -m benchmarks.objective --workload needle --sizes 128 256 512 --file needle.jsonl

Points are spread evenly over the space. Objectives are means over tuning prompts; what users want is measured on
other prompts: right answers on `needle`, loss and agreement with the full run elsewhere. Beside its rank correlation
with them stands what the three points give that an objective prefers, and what the three best do. Results go to the
file as they come, and a second run goes on where the first one stopped.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optuna.distributions import FloatDistribution, IntDistribution
from scipy.stats import qmc, spearmanr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.cache import cache_dir
from clusterprof.data import Prompt, build_prompt, load_dataset, sample_rows
from clusterprof.errors import CompressionError
from clusterprof.evaluation.contestants import Contestant
from clusterprof.evaluation.generation import score_needle
from clusterprof.evaluation.needle import needle_tasks
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, TaskMaker
from clusterprof.models import load_model
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.collect import find_capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, Scores
from clusterprof.profiling.spaces import SearchSpace, search_space

WINDOW, DECODE_TOKENS, TOKENS = 32, 64, 2000
RESAMPLES = 1000
# Points of which the mean is told: one alone may be luck.
BEST = 3
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="rank correlation of objectives with what users want")
    parser.add_argument("--workload", default="needle")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--tuning", type=int, default=8, help="prompts that objectives are measured on")
    parser.add_argument("--held-out", type=int, default=18, help="other prompts")
    parser.add_argument("--file", type=Path, required=True, help="results, JSON lines")
    arguments = parser.parse_args()

    model, tokenizer = load_model("builtin")
    session = Session.open(model, tokenizer, cache_dir(), decode_tokens=DECODE_TOKENS)
    prompts = _prompts(tokenizer, arguments.workload, arguments.tuning + arguments.held_out)
    tuning = [_capture(session, prompt) for prompt in prompts[: arguments.tuning]]
    candidates = {
        size: _points(search_space("clusterattn", tuning, size, WINDOW, "kl"), arguments.points)
        for size in arguments.sizes
    }
    done = {(record["role"], record["prompt"]) for record in _read(arguments.file)}
    with arguments.file.open("a") as file:
        for prompt, capture in zip(prompts, tuning, strict=False):
            if ("tuning", prompt.id) not in done:
                _write(file, "tuning", prompt.id, _replayed(model, capture, candidates))
        if arguments.workload == "needle":
            for name, scores in _answered(session, candidates, arguments.held_out, done):
                _write(file, "held-out", name, scores)
        else:
            for prompt in prompts[arguments.tuning :]:
                if ("held-out", prompt.id) not in done:
                    scores = _replayed(model, _capture(session, prompt), candidates)
                    _write(file, "held-out", prompt.id, scores)
    _report(_read(arguments.file), arguments.sizes, arguments.workload)


def _prompts(tokenizer: PreTrainedTokenizerBase, workload: str, count: int) -> list[Prompt]:
    dataset = load_dataset(workload, tokenizer=tokenizer, tokens=TOKENS)
    rows = sample_rows(dataset, samples=count)
    return [build_prompt(row, tokenizer, max_tokens=TOKENS) for row in rows]


def _capture(session: Session, prompt: Prompt) -> Capture:
    return find_capture(session.model, session.tokenizer, prompt, session.captures, window=WINDOW)


def _points(space: SearchSpace, count: int) -> list[Compression]:
    names = list(space.distributions)
    unit = qmc.Sobol(len(names), seed=0).random(count)
    return [
        space.compression({name: _at(space, name, place) for name, place in zip(names, row, strict=True)})
        for row in unit
    ]


def _at(space: SearchSpace, name: str, place: float) -> Any:
    """The value at a place in 0..1 of a parameter's range."""
    distribution = space.distributions[name]
    if isinstance(distribution, IntDistribution):
        values: Sequence[Any] = range(distribution.low, distribution.high + 1, distribution.step)
    elif isinstance(distribution, FloatDistribution):
        low, high = np.log(distribution.low), np.log(distribution.high)
        return float(np.exp(low + place * (high - low)))
    else:
        values = distribution.choices  # type: ignore[attr-defined]
    return values[int(place * len(values))]


def _replayed(
    model: PreTrainedModel, capture: Capture, candidates: dict[int, list[Compression]]
) -> dict[int, list[Record]]:
    evaluator = Evaluator(model, [capture])
    return {
        size: [
            asdict(_scored(scores))
            # In one forward, as a search does it.
            for i in range(0, len(compressions), 4)
            for scores in evaluator.sample_scores(0, compressions[i : i + 4])
        ]
        for size, compressions in candidates.items()
    }


def _scored(scores: Scores | CompressionError) -> Scores:
    if isinstance(scores, CompressionError):
        raise scores
    return scores


def _answered(
    session: Session, candidates: dict[int, list[Compression]], count: int, done: set[tuple[str, str]]
) -> Iterator[tuple[str, dict[int, list[Record]]]]:
    maker = TaskMaker(session.model, session.tokenizer)
    depths = 9
    samples = -(-count // depths)
    tasks = needle_tasks(maker, tokens=[TOKENS], depths=depths, samples=samples, seed=1, haystack=None)
    someone = Contestant("point", "the search space", lambda _: candidates[min(candidates)][0].method)
    entrants = {
        Entrant(someone, size, compression): (size, place)
        for size, compressions in candidates.items()
        for place, compression in enumerate(compressions)
    }
    for task in tasks:
        if ("held-out", task.row.id) in done:
            continue
        scores: dict[int, list[Record]] = {size: [{}] * len(each) for size, each in candidates.items()}
        with torch.inference_mode():
            for entrant, text in session.answers(task, list(entrants)):
                size, place = entrants[entrant]
                scores[size][place] = dict(score_needle(task, text))
        yield task.row.id, scores


def _write(file: Any, role: str, prompt: str, scores: dict[int, list[Record]]) -> None:
    file.write(json.dumps({"role": role, "prompt": prompt, "scores": scores}) + "\n")
    file.flush()
    print(role, prompt, flush=True)


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _report(records: list[Record], sizes: Sequence[int], workload: str) -> None:
    wanted = ("accuracy", "rouge1") if workload == "needle" else ("loss", "agreement")
    rng = np.random.default_rng(0)
    print(
        f"| size | objective | {' | '.join(f'rank correlation with {name} | {name} of its best' for name in wanted)} |"
    )
    print(f"|---|---|{'---|---|' * len(wanted)}")
    for size in sizes:
        for objective in DIRECTIONS:
            cells = []
            for name in wanted:
                cells += [
                    _correlation(records, size, objective, name, rng),
                    _of_best(records, size, objective, name),
                ]
            print(f"| {size} | {objective} | {' | '.join(cells)} |")
    print(
        f"\n| size | {' | '.join(f'{name}: one half of the held-out prompts against the other' for name in wanted)} |"
    )
    print(f"|---|{'---|' * len(wanted)}")
    for size in sizes:
        print(f"| {size} | {' | '.join(f'{_repeats(records, size, name, rng):.2f}' for name in wanted)} |")


def _correlation(
    records: list[Record], size: int, objective: str, wanted: str, rng: np.random.Generator
) -> str:
    """Spearman's, with a 95 % interval over resampled tuning and held-out prompts."""
    tuning = _matrix(records, "tuning", size, objective)
    held_out = _matrix(records, "held-out", size, wanted)
    sign = 1 if _higher(objective) == _higher(wanted) else -1

    def correlation(choose: Callable[[int], Any]) -> float:
        means = (part[choose(len(part))].mean(axis=0) for part in (tuning, held_out))
        return sign * float(spearmanr(*means).statistic)

    draws = [correlation(lambda count: rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return f"{correlation(np.arange):.2f} ({low:.2f} to {high:.2f})"


def _repeats(records: list[Record], size: int, wanted: str, rng: np.random.Generator) -> float:
    """Rank correlation between halves of the held-out prompts, mean over ways to halve them.

    Low where they do not agree among themselves which points are good: what an objective predicts of all of them is
    then uncertain, whatever it is.
    """
    held_out = _matrix(records, "held-out", size, wanted)
    half = len(held_out) // 2
    orders = (rng.permutation(len(held_out)) for _ in range(RESAMPLES))
    return float(
        np.nanmean(
            [
                spearmanr(
                    held_out[order[:half]].mean(axis=0), held_out[order[half : 2 * half]].mean(axis=0)
                ).statistic
                for order in orders
            ]
        )
    )


def _of_best(records: list[Record], size: int, objective: str, wanted: str) -> str:
    """The mean over the objective's best points, and over the best there are."""
    tuning = _matrix(records, "tuning", size, objective).mean(axis=0)
    held_out = _matrix(records, "held-out", size, wanted).mean(axis=0)
    chosen = np.argsort(-tuning if _higher(objective) else tuning)[:BEST]
    possible = np.sort(-held_out if _higher(wanted) else held_out)[:BEST]
    return f"{held_out[chosen].mean():.2f} of {abs(possible).mean():.2f}"


def _matrix(records: list[Record], role: str, size: int, name: str) -> Any:
    """Prompts by points."""
    return np.array(
        [[point[name] for point in it["scores"][str(size)]] for it in records if it["role"] == role]
    )


def _higher(name: str) -> bool:
    return DIRECTIONS.get(name, "maximize") == "maximize"  # type: ignore[call-overload, no-any-return]


if __name__ == "__main__":
    main()
