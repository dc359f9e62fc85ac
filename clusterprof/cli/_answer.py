"""One greedy answer to a prompt, with or without compression, and what it cost."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import Cache, DynamicCache, GenerationConfig, TextStreamer

from clusterprof.runtime import CompressedLayer, cache_bytes, compress
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import stored
from clusterprof.runtime.transformers_names import CACHE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.profile import Compression


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered with.

    Attributes
    ----------
    kv_bytes, kv_bytes_full : int
        Of the prompt's cache right after the prefill, and what it would be without compression.
    prefill_s : float
        Until the first token, compression included.
    decode_tokens_per_s : float, optional
        Over the tokens after the first; None if there are none.
    """

    text: str
    kv_bytes: int
    kv_bytes_full: int
    prefill_s: float
    decode_tokens_per_s: float | None


def answer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    input_ids: "Tensor",
    compression: "Compression | None",
    *,
    query_length: int | None,
    max_new_tokens: int,
    echo: bool,
    on_first: Callable[[], None],
) -> Answer:
    """Answer a prompt greedily.

    Of the model's own generation settings only the special tokens count: this is about the cache, and a
    sampler, a stop string or another cache would bend what is measured. The others are taken off the model.

    Parameters
    ----------
    input_ids : Tensor
        int64 ``(1, prompt_length)`` on the model's device.
    compression : Compression, optional
        What the prompt's cache is compressed to; without it nothing is.
    query_length : int, optional
        Tokens of the prompt's question, if that is the observation window.
    echo : bool
        Write the text to stdout as it is generated.
    on_first : callable
        Called when the first token is there.

    Raises
    ------
    CompressionError
        If the model cannot be compressed.
    """
    model.generation_config = _special_tokens(model.generation_config)
    cache = DynamicCache(config=decoder_of(model).config)
    watch = _Watch(tokenizer, cache, echo=echo, on_first=on_first)

    def generate() -> "Tensor":
        output: Tensor = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            streamer=watch,
            max_new_tokens=max_new_tokens,
            **{CACHE: cache},
        )
        return output

    if compression is None:
        output = generate()
    else:
        with compress(model, compression, query_length=query_length, tokenizer=tokenizer):
            output = generate()
    steps = len(watch.ticks) - 1
    return Answer(
        text=str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)),
        kv_bytes=watch.kv_bytes,
        kv_bytes_full=watch.kv_bytes_full,
        prefill_s=watch.ticks[0] - watch.started,
        decode_tokens_per_s=steps / (watch.ticks[-1] - watch.ticks[0]) if steps else None,
    )


def _special_tokens(settings: GenerationConfig | None) -> GenerationConfig:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {name: getattr(settings, name, None) for name in names}
    return GenerationConfig(**tokens)  # type: ignore[no-untyped-call]


@torch.inference_mode()
def warm_up(model: "PreTrainedModel", input_ids: "Tensor") -> None:
    """Run a few tokens: the first forward of a process pays for what later ones find ready."""
    model(input_ids=input_ids[:, :8])


class _Watch(TextStreamer):
    """Notes when each token comes and how large the prompt's cache is; shows the text if asked to."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        cache: Cache,
        *,
        echo: bool,
        on_first: Callable[[], None],
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._cache, self._echo, self._on_first = cache, echo, on_first
        self.started = 0.0
        self.ticks: list[float] = []
        self.kv_bytes = self.kv_bytes_full = 0

    def put(self, value: "Tensor") -> None:
        now = time.perf_counter()
        if self.next_tokens_are_prompt:
            self.started = now
        else:
            self.ticks.append(now)
            if len(self.ticks) == 1:
                # No token of the answer is in the cache yet.
                self.kv_bytes = cache_bytes(self._cache)
                self.kv_bytes_full = _uncompressed_bytes(self._cache)
                self._on_first()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._echo:
            sys.stdout.write(text + "\n" * stream_end)
            sys.stdout.flush()


def _uncompressed_bytes(cache: Cache) -> int:
    total = cache_bytes(cache)
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            keys, values = stored(layer)
            total += layer.evicted * (keys.nbytes + values.nbytes) // keys.shape[-2]
    return total
