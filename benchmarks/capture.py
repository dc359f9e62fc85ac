"""What a capture costs over plain generation of the same tokens after the same prompt.

    python -m benchmarks.capture [--tokens 2000 4000] [--decode-tokens 64] [--repeats 3]

Generation is `model.generate()`, greedy, with its cache, and takes turns with the capture and with writing its file.
Prints ratios of medians. Times are those of the process on one thread, so that others on the machine disturb them
little; waiting for a disk is not in them.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import process_time

import torch
from transformers import PreTrainedModel

from clusterprof.data import Prompt, build_prompt, load_dataset
from clusterprof.models import load_model
from clusterprof.profiling.capture import capture_prompt, end_tokens
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.store import CaptureStore


def main() -> None:
    parser = argparse.ArgumentParser(description="a capture against plain generation")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model("builtin")
    for tokens in arguments.tokens:
        row = load_dataset("docs", tokenizer=tokenizer, tokens=tokens).rows[0]
        prompt = build_prompt(row, tokenizer, max_tokens=tokens)
        origin = Origin.of(model, tokenizer, decode_tokens=arguments.decode_tokens)
        seconds = [
            _measure(model, end_tokens(model, tokenizer), prompt, origin) for _ in range(arguments.repeats)
        ]
        generation, capturing, whole = map(median, zip(*seconds, strict=True))
        print(
            f"prompt {len(prompt.input_ids)} tokens, {arguments.decode_tokens} decoded at most: capture / generate = "
            f"{capturing / generation:.3f}, with its file written {whole / generation:.3f}",
            flush=True,
        )


def _measure(
    model: PreTrainedModel, ends: set[int], prompt: Prompt, origin: Origin
) -> tuple[float, float, float]:
    """Seconds of generation, of the capture, and of the capture with its file written."""
    input_ids, steps = torch.tensor([prompt.input_ids]), origin.decode_tokens
    started = process_time()
    # One token more than is fed: the capture knows the one after the last, too.
    generated = model.generate(  # type: ignore[operator]
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=steps + 1, do_sample=False
    )
    generation = process_time() - started

    started = process_time()
    capture = capture_prompt(model, input_ids, window=32, decode_tokens=steps, end_tokens=ends)
    capturing = process_time() - started
    if not torch.equal(generated[0, input_ids.shape[1] :], capture.tokens):
        raise RuntimeError("The capture decoded other tokens than generate().")

    with tempfile.TemporaryDirectory() as folder:
        store = CaptureStore(Path(folder), origin)
        started = process_time()
        store.save(prompt.input_ids, capture)
        writing = process_time() - started
    return generation, capturing, capturing + writing


if __name__ == "__main__":
    main()
