"""The measuring loop, the same code in both environments; imports neither clusterprof nor kvpress."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.kvpress.exchange import PLAIN, PromptRuns, Run, Task

# Takes tokens (1, n), the cache and the first token's position; returns the last token's logits (1, vocabulary).
Forward = Callable[[Tensor, DynamicCache, int], Tensor]
# Takes a prompt's length; what is prefilled inside the context is compressed.
Compressor = Callable[[int], AbstractContextManager[object]]


@torch.inference_mode()
def measure(
    task: Task, side: str, model: PreTrainedModel, forward: Forward, compressors: dict[str, Compressor]
) -> list[PromptRuns]:
    """Run every prompt with the full cache and with each compressor, one right after the other.

    Which comes first changes from prompt to prompt, so that a machine that slows down favours none.
    """
    variants: dict[str, Compressor] = {PLAIN: lambda length: nullcontext(), **compressors}
    names = list(variants)
    results = []
    # The first prompt comes twice: what only the first runs of a process pay for is not measured.
    for turn, prompt in enumerate([task.prompts[0], *task.prompts]):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        runs, keys = {}, {}
        for name in order:
            runs[name], keys[name] = _run(task, prompt, model, forward, variants[name])
        results.append({name: _with_kept(runs[name], keys[name], keys[PLAIN], task.size) for name in names})
        done = f"prompt {turn} of {len(task.prompts)}" if turn else "warmed up"
        print(f"{side}: {done}", file=sys.stderr, flush=True)
    return results[1:]


def _run(
    task: Task, prompt: list[int], model: PreTrainedModel, forward: Forward, compressor: Compressor
) -> tuple[Run, list[Tensor]]:
    """Measurements without the kept positions, and the keys by layer as the prefill left them."""
    tokens = torch.tensor([prompt])
    cache = DynamicCache(config=model.config)
    # Decoding stays inside the context, as in `with ...: model.generate(...)`, which both projects document.
    with compressor(len(prompt)):
        start = time.perf_counter()
        token = forward(tokens, cache, 0).argmax(-1, keepdim=True)
        prefill_s = time.perf_counter() - start
        keys = [_keys_of(layer) for layer in cache.layers]
        generated = [token]
        start = time.perf_counter()
        for step in range(task.decode_tokens):
            token = forward(token, cache, len(prompt) + step).argmax(-1, keepdim=True)
            generated.append(token)
        decode_s = time.perf_counter() - start
    return Run(prefill_s, decode_s, torch.cat(generated, dim=-1)[0].tolist(), []), keys


def _keys_of(layer: object) -> Tensor:
    keys: Tensor = layer.keys  # type: ignore[attr-defined]
    return keys[0].clone()


def _with_kept(run: Run, keys: list[Tensor], full: list[Tensor], size: int) -> Run:
    if keys is full:
        return run
    kept = [kept_positions(*layer) for layer in zip(keys, full, strict=True)]
    if any(positions.shape[-1] != size for positions in kept):
        raise RuntimeError(f"{kept[0].shape[-1]} tokens were kept where {size} were asked for")
    return Run(run.prefill_s, run.decode_s, run.tokens, [positions.tolist() for positions in kept])


def kept_positions(keys: Tensor, full: Tensor) -> Tensor:
    """Which positions a compressed cache really holds, found by its keys among those of the full cache.

    Parameters
    ----------
    keys : Tensor
        One layer's keys after a compressed prefill, ``(kv_heads, kept, head_dim)``, in any order.
    full : Tensor
        The same layer's after a plain prefill of the same prompt, ``(kv_heads, length, head_dim)``.

    Returns
    -------
    Tensor
        int64 ``(kv_heads, kept)``, sorted.

    Raises
    ------
    RuntimeError
        If a key is not, bit for bit, one of the full cache's, or is there twice.
    """
    nearest = torch.cdist(keys, full).argmin(-1)
    same = torch.equal(full.gather(1, nearest[..., None].expand(-1, -1, full.shape[-1])), keys)
    positions = nearest.sort(dim=-1).values
    if not same or (positions.diff() == 0).any():
        raise RuntimeError("the compressed cache does not consist of distinct tokens of the full one")
    return positions
