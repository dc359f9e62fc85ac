"""A model with prompts of every length that matters, and helpers to run it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from clusterprof import compress
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.runtime import CompressedLayer
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.cache import stored
from clusterprof.runtime.transformers_names import CACHE

WINDOW = 8
TINY = Compression(size=24, window=WINDOW, method=ClusterAttn(num_block=2, theta=0.02))


@dataclass(frozen=True)
class Subject:
    """A model, and a stream of tokens to cut prompts from."""

    model: PreTrainedModel
    stream: Tensor
    compression: Compression
    new_tokens: int

    def prompt(self, length: int, start: int = 0) -> Tensor:
        """(1, length)."""
        return self.stream[None, start : start + length]

    @property
    def window(self) -> int:
        """Length of the observation window."""
        assert self.compression.window != "query"
        return self.compression.window

    @property
    def long(self) -> int:
        """A prompt length that is well above the size."""
        return 5 * self.compression.size // 2


def random_stream(length: int = 400, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))


def tiny_subject(model: PreTrainedModel) -> Subject:
    return Subject(model, random_stream(), TINY, new_tokens=12)


def generate(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options: Any) -> Any:
    """Greedy unless said otherwise; returns what `generate` does with `return_dict_in_generate`."""
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False} | options
    if "cache" in options:
        options[CACHE] = options.pop("cache")
    run: Any = model.generate
    return _named(run(prompt, max_new_tokens=new_tokens, return_dict_in_generate=True, **options))


def forward(model: Callable[..., Any], *args: Any, cache: Cache | None = None, **options: Any) -> Any:
    """One forward; the cache is called `cache` whatever transformers' version calls it."""
    return _named(model(*args, **options, **({} if cache is None else {CACHE: cache})))


def _named(output: Any) -> Any:
    output.cache = output[CACHE]
    return output


def continuation(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options: Any) -> list[list[int]]:
    """The new tokens of each row, up to the end of its answer."""
    sequences = generate(model, prompt, new_tokens, **options).sequences[:, prompt.shape[1] :].tolist()
    end = model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in sequences]


def pad_left(prompts: Sequence[Tensor], pad: int = 2) -> tuple[Tensor, Tensor]:
    """One batch ``(rows, longest)`` of prompts ``(1, length)``, and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    rows = [
        torch.nn.functional.pad(prompt[0], (longest - prompt.shape[1], 0), value=pad) for prompt in prompts
    ]
    masks = [torch.arange(longest) >= longest - prompt.shape[1] for prompt in prompts]
    return torch.stack(rows), torch.stack(masks).long()


def compressed_layers(cache: Cache) -> list[CompressedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]


def stored_lengths(cache: Cache) -> list[int]:
    """Tokens per head that each layer holds."""
    return [stored(layer)[0].shape[2] for layer in cache.layers]  # type: ignore[arg-type]


def step_logits(
    model: PreTrainedModel, tokens: Tensor, cache: Cache, masks: Sequence[Any], positions: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Feed ``(rows, steps)`` tokens one by one; yields ``(rows, vocabulary)`` each time."""
    for step, (mask, position_ids) in enumerate(zip(masks, positions, strict=True)):
        output = forward(
            model, tokens[:, step : step + 1], cache=cache, attention_mask=mask, position_ids=position_ids
        )
        yield output.logits[:, -1]


@contextmanager
def fed_lengths(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each forward of the decoder gets."""
    lengths: list[int] = []

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = decoder_of(model).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


def greedy_singly(model: PreTrainedModel, cache: Cache, feed: Tensor, new_tokens: int) -> list[int]:
    """Feed every token in a forward of its own, then go on greedily."""
    for token in feed[0, :-1]:
        forward(model, token.view(1, 1), cache=cache)
    tokens = [feed[:, -1:]]
    for _ in range(new_tokens):
        tokens.append(forward(model, tokens[-1], cache=cache).logits[:, -1:].argmax(-1))
    return [int(token) for token in tokens[1:]]


def greedy_answer(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> Tensor:
    """The greedy answer ``(1, new_tokens)``, token by token and without generate()."""
    with compress(model, TINY):
        output = forward(model, prompt)
    first = output.logits[:, -1:].argmax(-1)
    return torch.tensor([[int(first), *greedy_singly(model, output.cache, first, new_tokens - 1)]])


def model_state(model: PreTrainedModel) -> dict[str, Any]:
    """All about a model that a context could leave changed, except its weights."""
    hooks = {
        name: [len(getattr(module, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks")]
        for name, module in model.named_modules()
    }
    forwards = {name for name, module in model.named_modules() if "forward" in vars(module)}
    return {
        "config": model.config.to_dict(),
        "attention": decoder_of(model).config._attn_implementation,
        "hooks": hooks,
        "forwards": forwards,
        "attributes": sorted(vars(model)) + sorted(vars(decoder_of(model))),
    }
