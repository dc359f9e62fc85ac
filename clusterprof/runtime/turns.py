"""Turns: what a ``generate`` call says about its prompt, and no single forward knows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from transformers import Cache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.runtime.eviction import Eviction
from clusterprof.runtime.transformers_names import CACHE


@dataclass
class Turn:
    """A prompt, or a later turn, that a ``generate`` call is about to answer.

    Attributes
    ----------
    prompt_length : int
        Tokens up to its end, those of earlier turns included.
    cache : Cache, optional
        Where it goes to, once its first forward has come.
    start : int
        Tokens that were there before.
    """

    prompt_length: int
    cache: Cache | None = None
    start: int = 0

    def feed(self, cache: Cache, seen: int, new_tokens: int) -> None:
        """Note that a forward brings so many tokens to a cache that has seen others before."""
        if self.cache is not None:
            return
        # transformers' assisted generation does not look at what the cache holds before the first forward.
        if seen > 0 and new_tokens >= self.prompt_length:
            raise CompressionError(
                f"Assisted generation feeds all {self.prompt_length} tokens of the conversation to a cache that holds "
                f"{seen} of them already; pass an empty cache, or leave the drafts out in later turns."
            )
        self.cache, self.start = cache, seen


class RunningTurn(threading.local):
    """The turn of the running ``generate`` call, the innermost one; each thread has its own."""

    turn: Turn | None = None


@contextmanager
def turns_of_generate(model: PreTrainedModel, running: RunningTurn, eviction: Eviction) -> Iterator[None]:
    """Let ``generate`` say how long its prompt is: where chunks of it end, and where drafts of the answer begin."""
    attributes = vars(model)
    before = {name: attributes[name] for name in ("generate",) if name in attributes}
    plain: Any = model.generate

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        _refuse_assistant(model, kwargs)
        prompts, length = _prompt_shape(args, kwargs)
        eviction.check_prompts(prompts)
        outer, running.turn = running.turn, Turn(length)
        try:
            return plain(*args, **kwargs)
        finally:
            running.turn = outer

    attributes["generate"] = generate
    try:
        yield
    finally:
        del attributes["generate"]
        attributes.update(before)


def _prompt_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Prompts, and tokens of each, those of earlier turns included."""
    given = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    # With a cache, the tokens may be the new ones only; the attention mask always has the length of all.
    mask = kwargs.get("attention_mask")
    # Without any input, generate() starts from the token that begins a text.
    shapes = [(1, 1), *(tensor.shape[:2] for tensor in (*given, mask) if tensor is not None)]
    prompts, length = (max(sizes) for sizes in zip(*shapes, strict=True))
    # The older name is still taken.
    cache = kwargs.get(CACHE, kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() >= length:
        raise CompressionError(
            f"The cache passed to generate() already holds {int(cache.get_seq_length())} tokens, and the input has "
            f"{length}; pass the tokens of the whole conversation, or the new ones with the attention mask of all."
        )
    return prompts, length


def _refuse_assistant(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    settings = [kwargs.get("generation_config"), model.generation_config]
    # Refused here, not when it drafts: transformers would leave the model with the layers that do.
    early_exit = [
        kwargs.get("assistant_early_exit"),
        *(getattr(s, "assistant_early_exit", None) for s in settings),
    ]
    if getattr(settings[0], "is_assistant", False) or any(early_exit):
        raise CompressionError(
            "An assistant model cannot draft inside compress(), which would have to take drafts back from a compressed "
            "prompt; leave it out of the context (a copy of it, if it is the model itself), or use "
            "prompt_lookup_num_tokens."
        )
