"""Records to start from, valid for every benchmark, and whole runs made of them."""

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from clusterprof.evaluation.records import Record, record_key
from clusterprof.methods import default_method

ENVIRONMENT = {
    "model": "tiny/llama",
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "sdpa",
    "clusterprof": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
}
PAPER = "its paper's values"
LAYERS, HEADS = 3, 4


def record(**overrides: Any) -> Record:
    """A needle record of SnapKV at size 128, with whatever fields are given instead.

    ``method="full"`` leaves size, window and parameters out; another method gets its paper's parameters at the
    size. The key is made of everything else.
    """
    fields: dict[str, Any] = {
        "bench": "needle",
        "environment": ENVIRONMENT,
        "dataset": "needle",
        "prompt": "needle-0",
        "prompt_tokens": 1000,
        "labels": {"tokens": 1000, "depth": 0.5},
        "method": "snapkv",
        "size": 128,
        "window": 32,
        "scores": {"accuracy": 1.0, "rouge1": 0.9},
        **overrides,
    }
    if fields["method"] == "full":
        fields |= {"size": None, "window": None}
    if "parameters" not in fields:
        fields |= _papers_values(fields["method"], fields["size"])
    fields.setdefault("origin", PAPER)
    return Record(**{"key": record_key(fields), **fields})


def _papers_values(method: str, size: int | None) -> dict[str, Any]:
    if size is None:
        return {"origin": "nothing is evicted", "parameters": {"name": "full"}}
    name, evicts = method.partition(" ")[0].removesuffix("+decode"), method.endswith("+decode")
    return {"parameters": default_method(name, size, evict_while_decoding=evicts).model_dump()}


def write_run(path: Path, records: Iterable[Record]) -> Path:
    """Write records as a run's file."""
    lines = (it.model_dump_json(exclude_defaults=True) + "\n" for it in records)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _contestants(methods: Iterable[str], sizes: Iterable[int]) -> list[dict[str, Any]]:
    return [{"method": "full"}, *({"method": m, "size": s} for m, s in product(methods, sizes))]


# How much of the full cache's quality a method keeps at the smallest size; invented.
_KEPT = {
    "full": 1.0,
    "clusterattn": 0.97,
    "snapkv": 0.9,
    "topk": 0.45,
    "streaming_llm": 0.25,
    "h2o": 0.35,
    "kmeans": 0.6,
    "dbscan": 0.55,
    "ngram": 0.7,
}
METHODS = tuple(name for name in _KEPT if name != "full")


def _quality(contestant: dict[str, Any], sizes: tuple[int, ...]) -> float:
    kept, size = _KEPT[contestant["method"]], contestant.get("size", max(sizes))
    return kept + (1 - kept) * 0.6 * sizes.index(size) / len(sizes)


def needle_run(
    methods: tuple[str, ...] = METHODS,
    sizes: tuple[int, ...] = (128, 256),
    lengths: tuple[int, ...] = (1000, 2000, 4000),
    repeats: int = 3,
) -> Iterator[Record]:
    """Needle prompts of these lengths at five depths."""
    rng = Random(0)
    cells = list(product(lengths, (0.0, 0.25, 0.5, 0.75, 1.0), range(repeats)))
    for number, (tokens, depth, _) in enumerate(cells):
        luck = rng.random()
        for contestant in _contestants(methods, sizes):
            chance = _quality(contestant, sizes) * (0.97 - 0.1 * (tokens / max(lengths)) ** 2)
            right = float(luck < chance)
            yield record(
                prompt=f"needle-{number}",
                prompt_tokens=tokens,
                labels={"tokens": tokens, "depth": depth, "needle": "number", "haystack": "topics"},
                scores={"accuracy": right, "rouge1": 0.3 + 0.6 * right},
                text="The number is 4821." if right else "The number is 48.",
                references=("4821",),
                **contestant,
            )


def lines_run(
    methods: tuple[str, ...] = METHODS, sizes: tuple[int, ...] = (256,), repeats: int = 6
) -> Iterator[Record]:
    """Lines prompts of four lengths."""
    rng = Random(1)
    for tokens, number in product((1000, 2000, 4000, 8000), range(repeats)):
        luck = rng.random()
        for contestant in _contestants(methods, sizes):
            chance = _quality(contestant, sizes) * (1 - 0.3 * tokens / 8000)
            yield record(
                bench="lines",
                dataset="lines",
                prompt=f"lines-{tokens}-{number}",
                prompt_tokens=tokens,
                labels={"tokens": tokens},
                scores={"accuracy": float(luck < chance)},
                **contestant,
            )


TASKS = {
    "qasper": "single-document QA",
    "hotpotqa": "multi-document QA",
    "qmsum": "summarisation",
    "lcc": "code",
}


def longbench_run(
    methods: tuple[str, ...] = METHODS, sizes: tuple[int, ...] = (256, 512), repeats: int = 5
) -> Iterator[Record]:
    """LongBench prompts of four tasks in four groups."""
    rng = Random(2)
    for (task, group), number in product(TASKS.items(), range(repeats)):
        base = 20 + 50 * rng.random()
        for contestant in _contestants(methods, sizes):
            score = base * _quality(contestant, sizes) + rng.gauss(0, 2)
            yield record(
                bench="longbench",
                dataset=task,
                prompt=f"{task}-{number}",
                prompt_tokens=3000 + number,
                labels={"task": task, "group": group},
                scores={"score": min(100.0, max(0.0, score))},
                text=f"An answer to {task}, number {number}.",
                references=("The right answer.", "Another one."),
                **contestant,
            )


def perplexity_run(
    methods: tuple[str, ...] = METHODS, sizes: tuple[int, ...] = (256,), repeats: int = 6
) -> Iterator[Record]:
    """Reference answers of two datasets."""
    rng = Random(3)
    for dataset, number in product(("qasper", "lcc"), range(repeats)):
        base = 1 + rng.random()
        for contestant in _contestants(methods, sizes):
            loss = base + 1.5 * (1 - _quality(contestant, sizes)) + rng.gauss(0, 0.05)
            yield record(
                bench="perplexity",
                dataset=dataset,
                prompt=f"{dataset}-{number}",
                labels={},
                scores={"loss": loss},
                **contestant,
            )


def hit_rate_run() -> Iterator[Record]:
    """Hit rates per layer and step bin at three prompt lengths."""
    rng = Random(4)
    for tokens, number in product((1000, 2000, 4000), range(3)):
        curve = [
            [
                max(0.0, 0.95 - 0.02 * layer - 0.01 * step - tokens / 1e5 + rng.gauss(0, 0.01))
                for step in range(8)
            ]
            for layer in range(LAYERS)
        ]
        yield record(
            bench="hit-rate",
            prompt=f"needle-{tokens}-{number}",
            prompt_tokens=tokens,
            labels={"tokens": tokens},
            method="full",
            parameters={"name": "full", "theta": 5e-4, "mu": 5e-5},
            scores={"hit_rate": sum(map(sum, curve)) / (8 * LAYERS)},
            curves={"hit_rate": curve},
        )


def _fit(quality: float, rng: Random) -> dict[str, Any]:
    heads = [
        [min(1.0, 0.8 + 0.19 * quality - 0.02 * layer + rng.gauss(0, 0.01)) for _ in range(HEADS)]
        for layer in range(LAYERS)
    ]
    return {
        "scores": {
            "cosine": sum(map(sum, heads)) / (LAYERS * HEADS),
            "log_kl": -6 * quality + rng.gauss(0, 0.1),
            "kl": max(0.0, 1 - quality + rng.gauss(0, 0.02)),
            "agreement": min(1.0, max(0.0, quality + rng.gauss(0, 0.02))),
        },
        "curves": {"cosine_by_head": heads},
    }


def fit_run(sizes: tuple[int, ...] = (128,), repeats: int = 4) -> Iterator[Record]:
    """How well five methods fit the attention of a few prompts."""
    rng = Random(5)
    methods = ("clusterattn", "kmeans", "dbscan", "ngram", "topk")
    for number, method, size in product(range(repeats), methods, sizes):
        contestant = {"method": method, "size": size}
        yield record(
            bench="fit",
            prompt=f"needle-{number}",
            labels={"tokens": 2000},
            **_fit(_quality(contestant, sizes), rng),
            **contestant,
        )


def ablation_run(sizes: tuple[int, ...] = (128,), repeats: int = 4) -> Iterator[Record]:
    """ClusterAttn over a grid of theta and num_block."""
    rng = Random(6)
    for number, size, block, theta in product(range(repeats), sizes, (2, 8, 32), (1e-4, 1e-3, 3e-3, 1e-2)):
        quality = 1 - 0.2 * abs(theta - 3e-3) / 3e-3 - 0.01 * abs(block - 8)
        yield record(
            bench="ablation",
            prompt=f"needle-{number}",
            labels={"tokens": 2000, "num_block": block, "theta": theta},
            method="clusterattn",
            size=size,
            parameters={"name": "clusterattn", "num_block": block, "theta": theta, "gap_pool": 15},
            **_fit(quality, rng),
        )


def samples_run(methods: tuple[str, ...] = ("clusterattn", "snapkv")) -> Iterator[Record]:
    """Generated texts of two prompts, at two sizes."""
    for task, contestant in product(("qasper", "lcc"), _contestants(methods, (256, 512))):
        yield record(
            bench="samples",
            dataset=task,
            prompt=f"{task}-0",
            labels={"task": task},
            scores={},
            text=f"{contestant['method']} answers: {task} & more <than> this.\nAnd a second line.",
            references=("What would have been right.",),
            **contestant,
        )


def every_run(methods: tuple[str, ...] = METHODS) -> dict[str, list[Record]]:
    """A run of each benchmark, by its name."""
    return {
        "needle": list(needle_run(methods)),
        "lines": list(lines_run(methods)),
        "longbench": list(longbench_run(methods)),
        "perplexity": list(perplexity_run(methods)),
        "hit-rate": list(hit_rate_run()),
        "fit": list(fit_run()),
        "ablation": list(ablation_run()),
        "samples": list(samples_run()),
    }
