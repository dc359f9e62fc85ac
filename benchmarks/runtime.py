"""What compression costs a prefill, and what it brings to decoding, on the built-in model.

    python -m benchmarks.runtime [--size 512] [--short 1000] [--middle 4000] [--long 8000] [--batch-size 8]

Prints four ratios, each of medians of one run: prefill time with compression over without, at three lengths; peak
memory of the prefill beyond an uncompressed one's, against one layer's keys and values plus the window's scores;
the time of a decode step after the long prompt over the short one's; decoded tokens per second at the batch size,
over those of transformers' growing cache and of a preallocated full cache. `clusterprof bench` measures the same on
any model, and more.
"""

import argparse

from clusterprof.benchmarking.prompts import bench_prompts
from clusterprof.benchmarking.run import run_bench
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import FULL, PREALLOCATED, Subject
from clusterprof.methods import ClusterAttn
from clusterprof.models import load_model
from clusterprof.profile import Compression

WINDOW = 32


class Silent:
    """Shows nothing."""

    def begin(self, measurements: int) -> None: ...

    def measuring(self, what: str) -> None: ...

    def end(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description="what compression costs a prefill and brings to decoding")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--short", type=int, default=1000)
    parser.add_argument("--middle", type=int, default=4000)
    parser.add_argument("--long", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    model, tokenizer = load_model("builtin")
    ours = Subject(
        "ours",
        "ClusterAttn",
        Compression(size=arguments.size, window=WINDOW, method=ClusterAttn.paper_default(arguments.size)),
    )
    lengths = (arguments.short, arguments.middle, arguments.long)
    settings = BenchSettings(
        tokens=lengths,
        batch_sizes=(1, arguments.batch_size),
        new_tokens=arguments.steps,
        repeats=arguments.repeats,
    )
    prompts = bench_prompts(tokenizer, 1, arguments.long)
    report = run_bench(model, prompts, [FULL, PREALLOCATED, ours], settings, Silent())

    config = model.config
    prefills = {(row.tokens, row.subject): row for row in report.prefill}
    for tokens in lengths:
        full, compressed = prefills[tokens, "full"], prefills[tokens, "ours"]
        assert full.peak_bytes is not None
        assert compressed.peak_bytes is not None
        layer = tokens * config.num_key_value_heads * config.head_dim * 2 * model.dtype.itemsize
        scores = tokens * config.num_attention_heads * WINDOW * 4
        print(
            f"prefill of {tokens} tokens: time with / without compression = {compressed.ratio_to_full:.3f}; "
            f"peak memory {compressed.peak_bytes / 1e6:.1f} MB, {(compressed.peak_bytes - full.peak_bytes) / 1e6:+.1f} "
            f"MB against without (one layer and the window's scores: {(layer + scores) / 1e6:.1f} MB)"
        )
    decodes = {(row.tokens, row.batch, row.subject): row for row in report.decode}
    for batch in settings.batch_sizes:
        short, long = (decodes[tokens, batch, "ours"].tokens_per_s for tokens in (lengths[0], lengths[-1]))
        assert short is not None
        assert long is not None
        print(
            f"decode step, batch {batch}: after {lengths[-1]} tokens / after {lengths[0]} = {short / long:.3f}"
        )
    for tokens in lengths:
        row = decodes[tokens, arguments.batch_size, "ours"]
        print(
            f"decoding at batch {row.batch} after {tokens} tokens: {row.tokens_per_s:.1f} tokens/s, "
            f"{row.ratio_to_full:.2f} times the growing full cache, "
            f"{row.ratio_to_preallocated:.2f} times the preallocated one"
        )


if __name__ == "__main__":
    main()
