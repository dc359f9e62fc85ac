"""SnapKV in clusterprof and in kvpress, side by side on the built-in model.

    python -m benchmarks.kvpress [--tokens 2000] [--samples 24] [--size 256] [--environment FOLDER]

Both keep the same number of tokens of the same needle prompts, float32 on the CPU, each in its own process and
environment; kvpress's is built first if need be. Compressed and plain runs alternate, and every ratio is taken
inside one process. ClusterAttn with the paper's values runs along on our side.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from benchmarks.kvpress.environment import KVPRESS, TRANSFORMERS, build, run_worker
from benchmarks.kvpress.exchange import SNAPKV, Task, read_runs, write_task
from benchmarks.kvpress.ours import CLUSTERATTN, measure_ours
from benchmarks.kvpress.table import agreement_text, compare_kept, numbers, render, summarise
from clusterprof.cache import cache_dir
from clusterprof.data import build_prompt, load_dataset, sample_rows
from clusterprof.errors import ClusterprofError, DataError
from clusterprof.models import builtin_folder, load_model

WINDOW, KERNEL_SIZE, DECODE_TOKENS = 32, 5, 32
LONGEST_PROMPT = 8192 - DECODE_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description="SnapKV in clusterprof and in kvpress, side by side")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompts")
    parser.add_argument("--samples", type=int, default=24, help="number of prompts")
    parser.add_argument("--size", type=int, default=256, help="tokens kept per head, the window included")
    parser.add_argument("--environment", type=Path, help="folder of kvpress's environment")
    arguments = parser.parse_args()
    try:
        print(
            compare(
                tokens=arguments.tokens,
                samples=arguments.samples,
                size=arguments.size,
                environment=arguments.environment or cache_dir() / f"kvpress-{KVPRESS}",
            )
        )
    except ClusterprofError as error:
        sys.exit(str(error))


def compare(*, tokens: int, samples: int, size: int, environment: Path) -> str:
    """Measure both sides; returns settings, table and agreement as Markdown."""
    python = build(environment.absolute())
    model, tokenizer = load_model("builtin", device="cpu", dtype="float32")
    task, answers = _needle_task(tokenizer, tokens, samples, size)
    with tempfile.TemporaryDirectory() as folder:
        task_file, runs_file = Path(folder) / "task.json", Path(folder) / "runs.json"
        write_task(task_file, task)
        run_worker(python, task_file, runs_file)
        theirs = read_runs(runs_file)
    ours = measure_ours(task, model)

    def is_right(index: int, generated: list[int]) -> bool:
        return answers[index] in numbers(answer_text(tokenizer, generated))

    rows = [
        summarise(f"kvpress {KVPRESS} SnapKVPress", theirs, SNAPKV, is_right),
        summarise("clusterprof SnapKV", ours, SNAPKV, is_right),
        summarise("clusterprof ClusterAttn, paper's values", ours, CLUSTERATTN, is_right),
    ]
    agreement = compare_kept(theirs, ours, SNAPKV, task)
    return "\n\n".join([_settings_text(task), render(rows), agreement_text(agreement)])


def answer_text(tokenizer: PreTrainedTokenizerBase, generated: list[int]) -> str:
    """What was generated up to the end-of-sequence token; decoding went on behind it for the clock's sake."""
    end = tokenizer.eos_token_id
    return str(tokenizer.decode(generated[: generated.index(end)] if end in generated else generated))


def _needle_task(
    tokenizer: PreTrainedTokenizerBase, tokens: int, samples: int, size: int
) -> tuple[Task, list[str]]:
    """What both sides do, and each prompt's answer."""
    rows = sample_rows(load_dataset("needle", tokenizer=tokenizer, tokens=tokens), samples=samples)
    prompts = [list(build_prompt(row, tokenizer, max_tokens=LONGEST_PROMPT).input_ids) for row in rows]
    shortest = min(map(len, prompts))
    if not WINDOW < size < shortest:
        raise DataError(
            f"--size is {size}, and must be above {WINDOW} and below the shortest prompt's {shortest}."
        )
    task = Task(
        model=str(builtin_folder()),
        prompts=prompts,
        size=size,
        window=WINDOW,
        kernel_size=KERNEL_SIZE,
        decode_tokens=DECODE_TOKENS,
        threads=torch.get_num_threads(),
    )
    return task, [row.answers[0] for row in rows]


def _settings_text(task: Task) -> str:
    lengths = [len(prompt) for prompt in task.prompts]
    return (
        f"{len(lengths)} needle prompts of {min(lengths):,} to {max(lengths):,} tokens, {task.size} kept per KV head; "
        f"window {task.window}, kernel {task.kernel_size}, {task.decode_tokens} decode steps; SmolLM2-135M-Instruct, "
        f"float32, CPU, {task.threads} threads, torch {torch.__version__}; transformers {transformers.__version__}, "
        f"for kvpress {TRANSFORMERS}. Medians over the prompts."
    )


if __name__ == "__main__":
    main()
