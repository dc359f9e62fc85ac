"""Which objective predicts what users want: rank correlations over points of ClusterAttn's search space.

    python -m benchmarks.objective --workload needle --sizes 128 256 512 --file needle.jsonl

Points are spread evenly over the space. Objectives are means over tuning prompts; what users want is measured on
other prompts: right answers on `needle`, loss and agreement with the full run elsewhere, where each prompt can be
either, and so all is a mean over ways to part them. Beside its rank correlation with them stands what the three points
give that an objective prefers, and what the three best do. Results go to the file as they come, and a second run goes
on where the first one stopped.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
Indices = NDArray[np.int64]
Values = NDArray[np.float64]


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
    prompts = prompts_of(tokenizer, arguments.workload, arguments.tuning + arguments.held_out)
    tuning = [capture_of(session, prompt) for prompt in prompts[: arguments.tuning]]
    candidates = {
        size: points_of(search_space("clusterattn", tuning, size, WINDOW, "kl"), arguments.points)
        for size in arguments.sizes
    }
    done = {(record["role"], record["prompt"]) for record in _read(arguments.file)}
    with arguments.file.open("a") as file:
        for prompt, capture in zip(prompts, tuning, strict=False):
            if ("tuning", prompt.id) not in done:
                _write(file, "tuning", prompt.id, replayed(model, capture, candidates))
        if arguments.workload == "needle":
            for name, scores in _answered(session, candidates, arguments.held_out, done):
                _write(file, "held-out", name, scores)
        else:
            for prompt in prompts[arguments.tuning :]:
                if ("held-out", prompt.id) not in done:
                    scores = replayed(model, capture_of(session, prompt), candidates)
                    _write(file, "held-out", prompt.id, scores)
    _report(Measured.read(arguments.file, arguments.workload), arguments.sizes, arguments.workload)


def prompts_of(tokenizer: PreTrainedTokenizerBase, workload: str, count: int) -> list[Prompt]:
    """So many prompts of a built-in workload."""
    dataset = load_dataset(workload, tokenizer=tokenizer, tokens=TOKENS)
    rows = sample_rows(dataset, samples=count)
    return [build_prompt(row, tokenizer, max_tokens=TOKENS) for row in rows]


def capture_of(session: Session, prompt: Prompt) -> Capture:
    """The capture of a prompt, made or found."""
    return find_capture(session.model, session.tokenizer, prompt, session.captures, window=WINDOW)


def points_of(space: SearchSpace, count: int) -> list[Compression]:
    """Points spread evenly over a space, with gaps filled as by default."""
    names = [name for name in space.distributions if name != "gap_pooling"]
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


def replayed(
    model: PreTrainedModel, capture: Capture, candidates: dict[int, list[Compression]]
) -> dict[int, list[Record]]:
    """Each candidate's scores on a capture, by size."""
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


@dataclass(frozen=True)
class Measured:
    """What a file holds, and how its prompts are parted.

    Attributes
    ----------
    records : list of dict
        One per prompt.
    tuning, held_out : array of int
        Which of them have objectives, and which have what users want.
    tuned_on : int
        Prompts that an objective is measured on.
    """

    records: list[Record]
    tuning: Indices
    held_out: Indices
    tuned_on: int

    @classmethod
    def read(cls, path: Path, workload: str) -> "Measured":
        records = _read(path)
        tuning, held_out = (
            np.array([i for i, record in enumerate(records) if record["role"] == role])
            for role in ("tuning", "held-out")
        )
        if workload == "needle":
            return cls(records, tuning, held_out, len(tuning))
        # A replay measures both.
        every = np.arange(len(records))
        return cls(records, every, every, len(tuning))

    def parted(self, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """Prompts to measure objectives on, and others; by chance where each can be either."""
        if self.tuning is not self.held_out:
            return self.tuning, self.held_out
        order = rng.permutation(self.tuning)
        return order[: self.tuned_on], order[self.tuned_on :]

    def values(self, size: int, name: str) -> Values:
        """Prompts by points, NaN where a prompt has no such value; more is better."""
        sign = 1 if _higher(name) else -1
        return sign * np.array(
            [[point.get(name, np.nan) for point in record["scores"][str(size)]] for record in self.records]
        )


def _report(measured: Measured, sizes: Sequence[int], workload: str) -> None:
    wanted = ("accuracy", "rouge1") if workload == "needle" else ("loss", "agreement")
    headings = [f"{name} | at its best points (best)" for name in wanted]
    print(f"| size | objective | {' | '.join(headings)} |")
    print(f"|---|---|{'---|---|' * len(wanted)}")
    correlations: dict[tuple[str, str], list[float]] = {}
    for size in sizes:
        for objective in DIRECTIONS:
            cells = []
            for name in wanted:
                tables = measured.values(size, objective), measured.values(size, name)
                correlation, low, high = _correlation(measured, *tables)
                correlations.setdefault((objective, name), []).append(correlation)
                chosen, possible = _of_best(measured, *tables)
                cells.append(f"{correlation:.2f} ({low:.2f} to {high:.2f}) | {chosen:.2f} ({possible:.2f})")
            print(f"| {size} | {objective} | {' | '.join(cells)} |")
        ceilings = [f"*{_ceiling(measured, measured.values(size, name)):.2f}* |" for name in wanted]
        print(f"| {size} | *ceiling* | {' | '.join(ceilings)} |")
    print("\nmean rank correlation over the sizes:")
    for (predictor, name), each in correlations.items():
        print(f"{predictor} with {name}: {np.mean(each):.3f}")


def _correlation(measured: Measured, objective: Values, wanted: Values) -> tuple[float, float, float]:
    """Spearman's, mean over ways to part the prompts, and a 95 % interval over ways to resample the parts, too."""
    rng = np.random.default_rng(0)

    def correlation(tuning: Indices, held_out: Indices) -> float:
        return float(spearmanr(objective[tuning].mean(axis=0), wanted[held_out].mean(axis=0)).statistic)

    parted = [measured.parted(rng) for _ in range(RESAMPLES)]
    resampled = [correlation(*(rng.choice(part, len(part)) for part in parts)) for parts in parted]
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return float(np.mean([correlation(*parts) for parts in parted])), low, high


def _ceiling(measured: Measured, wanted: Values) -> float:
    """The rank correlation that the true order of the points, that of endlessly many prompts, would have.

    It is the square root of the held-out prompts' reliability (Spearman 1904), which follows from how well halves of
    the prompts agree, and from how many more than a half are held out (Spearman and Brown 1910).
    """
    rng = np.random.default_rng(0)
    half = len(measured.held_out) // 2
    orders = [rng.permutation(measured.held_out) for _ in range(RESAMPLES)]
    parts = [(wanted[order[:half]], wanted[order[half : 2 * half]]) for order in orders]
    agreed = np.nanmean([spearmanr(a.mean(axis=0), b.mean(axis=0)).statistic for a, b in parts])
    longer = len(measured.parted(rng)[1]) / half
    return float(np.sqrt(max(0.0, longer * agreed / (1 + (longer - 1) * agreed))))


def _of_best(measured: Measured, objective: Values, wanted: Values) -> tuple[float, float]:
    """What the objective's best points give, and the best there are; means over ways to part the prompts."""
    rng = np.random.default_rng(0)
    found = []
    for tuning, held_out in (measured.parted(rng) for _ in range(RESAMPLES)):
        means = wanted[held_out].mean(axis=0)
        best = np.argsort(objective[tuning].mean(axis=0))[-BEST:]
        found.append((means[best].mean(), np.sort(means)[-BEST:].mean()))
    chosen, possible = np.abs(np.mean(found, axis=0))
    return float(chosen), float(possible)


def _higher(name: str) -> bool:
    return DIRECTIONS.get(name, "maximize") == "maximize"  # type: ignore[call-overload, no-any-return]


if __name__ == "__main__":
    main()
