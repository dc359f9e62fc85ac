"""Turns: what a ``generate`` call says about its prompt, and no single forward knows."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from transformers import Cache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.runtime.settings import Eviction
from clusterprof.runtime.transformers_names import CACHE

# Methods of a model that a context replaces.
_REPLACED = ("generate", "generate_batch")


@dataclass
class Turn:
    """A prompt, or a later turn, that a ``generate`` call is about to answer.

    Attributes
    ----------
    prompt_length : int
        Tokens up to its end, those of earlier turns included.
    chunked, drafted : bool
        Whether it may come in several forwards, and whether drafts of the answer may come with it.
    cache : Cache, optional
        Where it goes to, once its first forward has come.
    start : int
        Tokens that were there before.
    """

    prompt_length: int
    chunked: bool
    drafted: bool
    cache: Cache | None = None
    start: int = 0

    def feed(self, cache: Cache, seen: int, new_tokens: int) -> None:
        """Note that a forward brings so many tokens to a cache that has seen others before."""
        end = seen + new_tokens
        # What the model puts before the text by itself (soft prompts) belongs to the prompt.
        if not self.drafted and seen < self.prompt_length < end:
            self.prompt_length = end
        if self.cache is not None:
            return
        # transformers' assisted generation does not look at what the cache holds before the first forward.
        if self.drafted and seen > 0 and new_tokens >= self.prompt_length:
            raise CompressionError(
                f"Assisted generation feeds all {self.prompt_length} tokens of the conversation to a cache that holds "
                f"{seen} of them already; pass an empty cache, or leave the drafts out in later turns."
            )
        if not (self.chunked or self.drafted):
            self.prompt_length = end
        self.cache, self.start = cache, seen


class RunningTurn(threading.local):
    """The turn of the running ``generate`` call, the innermost one; each thread has its own."""

    turn: Turn | None = None


class _Calls:
    """The ``generate`` calls of a context that are running, by thread; none may outlive it."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._changed:
            if self._closed:
                raise CompressionError(
                    "This generate() belongs to a compress() context that has ended, and would not compress; call "
                    "generate inside the context, or leave the context after the thread that generates has ended."
                )
            self._running[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[thread] -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the calls of other threads, and let no new one begin."""
        own = threading.get_ident()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not any(n for thread, n in self._running.items() if thread != own))


@contextmanager
def turns_of_generate(model: PreTrainedModel, running: RunningTurn, eviction: Eviction) -> Iterator[None]:
    """Let ``generate`` say how long its prompt is: where chunks of it end, and where drafts of the answer begin.

    Leaving the context waits for ``generate`` calls that other threads have begun in it.
    """
    attributes = vars(model)
    before: dict[str, Any] = {name: attributes[name] for name in _REPLACED if name in attributes}
    plain: Any = model.generate
    calls = _Calls()

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("inputs", "generation_config"), args, strict=False)) | kwargs
        _refuse_assistant(model, given)
        prompts, turn = _turn_of(model, given)
        eviction.check_prompts(prompts)
        with calls.running():
            outer, running.turn = running.turn, turn
            try:
                return plain(*args, **kwargs)
            finally:
                running.turn = outer

    def generate_batch(*args: Any, **kwargs: Any) -> Any:
        raise CompressionError(
            "generate_batch() keeps its own paged cache, which compress() does not shrink; use generate()."
        )

    attributes.update(zip(_REPLACED, (generate, generate_batch), strict=True))
    try:
        yield
    finally:
        try:
            calls.close()
        finally:
            for name in _REPLACED:
                attributes.pop(name, None)
            attributes.update(before)


def _turn_of(model: PreTrainedModel, given: Mapping[str, Any]) -> tuple[int, Turn]:
    """How many prompts ``generate`` is given, and what it says about them."""
    ids = next(
        (given[name] for name in ("inputs_embeds", "inputs", "input_ids") if given.get(name) is not None),
        None,
    )
    # Without any input, generate() starts from the token that begins a text.
    prompts, length = (1, 1) if ids is None else ids.shape[:2]
    # The older name is still taken.
    cache = given.get(CACHE, given.get("past_key_values"))
    # What is no cache transformers refuses itself.
    seen = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
    mask = given.get("attention_mask")
    # With a cache, the tokens may be the new ones only, and then the attention mask has the length of all.
    if seen > 0 and given.get("inputs_embeds") is None and mask is not None and mask.shape[-1] != length:
        length += seen
    if length == 0:
        raise CompressionError("The prompt passed to generate() is empty; it takes at least one token.")
    if seen >= length:
        raise CompressionError(
            f"The cache passed to generate() already holds {seen} tokens, and the input has {length}; pass the tokens "
            "of the whole conversation, or the new ones with the attention mask of all."
        )
    drafted = given.get("assistant_model") is not None or any(
        _setting(model, given, name) for name in ("prompt_lookup_num_tokens", "use_mtp")
    )
    return prompts, Turn(length, bool(_setting(model, given, "prefill_chunk_size")), drafted)


def _setting(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> Any:
    """A generation setting: as an argument, in the configuration passed, or in the model's."""
    for settings in (given.get("generation_config"), model.generation_config):
        if given.get(name) is None and getattr(settings, name, None) is not None:
            return getattr(settings, name)
    return given.get(name)


def _refuse_assistant(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    is_assistant = getattr(given.get("generation_config"), "is_assistant", False)
    # Refused here, not when it drafts: transformers would leave the model with the layers that do.
    if is_assistant or _setting(model, given, "assistant_early_exit"):
        raise CompressionError(
            "An assistant model cannot draft inside compress(), which would have to take drafts back from a compressed "
            "prompt; leave it out of the context (a copy of it, if it is the model itself), or use "
            "prompt_lookup_num_tokens."
        )
