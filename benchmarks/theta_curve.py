"""Objective along theta, from where nothing is filtered to where no head has a cluster.

    python -m benchmarks.theta_curve [--size 256] [--samples 3] [--num-block 2 8 16]

Shows the peak in between, and that cosine and divergence of the next token do not agree on where it is.
"""

import argparse

from clusterprof.cache import cache_dir
from clusterprof.data import build_prompt, load_dataset, sample_rows
from clusterprof.methods import ClusterAttn, MethodConfig, TopK
from clusterprof.models import load_model
from clusterprof.profile import Compression
from clusterprof.profiling.collect import find_capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import mean_scores
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.spaces import theta_range
from clusterprof.profiling.store import CaptureStore

THETAS = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
WINDOW, DECODE_TOKENS = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="objective along theta")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--num-block", type=int, nargs="+", default=[2, 8, 16])
    arguments = parser.parse_args()

    evaluator = _evaluator(arguments.samples)
    low, high = theta_range(evaluator.captures, arguments.size)
    print(
        f"size {arguments.size}, {arguments.samples} needle prompts; a tune searches theta in {low} to {high}"
    )
    print(f"{'num_block':>9} {'theta':>8} {'cosine':>8} {'padded':>8} {'KL':>8} {'agreement':>9}")
    for num_block in arguments.num_block:
        for theta in THETAS:
            method = ClusterAttn(num_block=num_block, theta=theta)
            _print_row(evaluator, arguments.size, method, str(num_block), str(theta))
    _print_row(evaluator, arguments.size, TopK(), "top-k", "")


def _print_row(evaluator: Evaluator, size: int, method: MethodConfig, first: str, second: str) -> None:
    scores = mean_scores(evaluator.scores(Compression(size=size, window=WINDOW, method=method)))
    print(
        f"{first:>9} {second:>8} {scores.cosine:8.4f} {scores.cosine_padded:8.4f} "
        f"{scores.kl:8.4f} {scores.agreement:9.3f}",
        flush=True,
    )


def _evaluator(samples: int) -> Evaluator:
    model, tokenizer = load_model("builtin")
    origin = Origin.of(model, tokenizer, decode_tokens=DECODE_TOKENS)
    store = CaptureStore(cache_dir() / "captures", origin)
    captures = []
    for row in sample_rows(load_dataset("needle", tokenizer=tokenizer), samples=samples):
        prompt = build_prompt(row, tokenizer, max_tokens=8000)
        captures.append(find_capture(model, tokenizer, prompt, store, window=WINDOW))
    return Evaluator(model, captures)


if __name__ == "__main__":
    main()
