"""Collecting captures: one for each prompt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from clusterprof.data import Prompt
from clusterprof.errors import spares_the_run
from clusterprof.methods import Need
from clusterprof.profile import DroppedSample
from clusterprof.profiling.capture import Capture, capture_prompt, end_tokens
from clusterprof.profiling.settings import TuneListener, TuneSettings
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime.words import starts_of_words
from clusterprof.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Captured:
    """What became of the prompts: those with a capture, and those that were dropped."""

    prompts: list[Prompt] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    dropped: list[DroppedSample] = field(default_factory=list)

    def usable(self, prompts: Sequence[Prompt], size: int) -> "Captured":
        """Those of some prompts that a size compresses: longer than it, and with a window below it."""
        ids = {prompt.id for prompt in prompts if len(prompt.input_ids) > size}
        part = Captured(dropped=[sample for sample in self.dropped if sample.id in ids])
        for prompt, capture in zip(self.prompts, self.captures, strict=True):
            if prompt.id not in ids:
                continue
            error = _overlong(capture.window, size)
            if error is None:
                part.prompts.append(prompt)
                part.captures.append(capture)
            else:
                part.dropped.append(DroppedSample(id=prompt.id, reason=error))
        return part


def capture_all(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    settings: TuneSettings,
    store: CaptureStore,
    listener: TuneListener,
    *,
    needs: frozenset[Need] = frozenset(),
) -> Captured:
    """Capture every prompt, or find its capture in the store; one that fails is dropped and named.

    Parameters
    ----------
    needs : frozenset of str
        What the methods that will choose from the captures need; words are always there.
    """
    result = Captured()
    accumulate = "accumulated" in needs
    told = False
    for prompt in prompts:
        started, seconds = time.monotonic(), 0.0
        window = _window(prompt, settings)
        error = _overlong(window, max(settings.sizes))
        capture = None if error else store.load(prompt.input_ids, window, accumulated=accumulate)
        if not error and capture is None:
            try:
                capture = capture_and_save(
                    model,
                    tokenizer,
                    prompt,
                    store,
                    window=window,
                    accumulate=accumulate,
                )
            except Exception as failure:
                if not spares_the_run(failure):
                    raise
                error = one_line(" ".join(str(failure).split())) or type(failure).__name__
            seconds = time.monotonic() - started
        if capture is None:
            result.dropped.append(DroppedSample(id=prompt.id, reason=str(error)[:1000]))
        else:
            result.prompts.append(prompt)
            result.captures.append(capture)
        listener.captured(prompt, seconds, error)
        if not told and store.held_bytes > store.limit_bytes:
            listener.over_limit(store.limit_bytes)
            told = True
    return result


def find_capture(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Prompt,
    store: CaptureStore,
    *,
    window: int,
    accumulate: bool = False,
) -> Capture:
    """A prompt's capture from the store, or made now and kept there; raises as :func:`capture_and_save`."""
    return store.load(prompt.input_ids, window, accumulated=accumulate) or capture_and_save(
        model, tokenizer, prompt, store, window=window, accumulate=accumulate
    )


def capture_and_save(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Prompt,
    store: CaptureStore,
    *,
    window: int,
    accumulate: bool,
) -> Capture:
    """Capture a prompt; the file is then the only copy, and the page cache the only memory it takes.

    Raises
    ------
    CompressionError
        As :func:`clusterprof.profiling.capture.capture_prompt`.
    ClusterprofError
        If the file cannot be written.
    """
    input_ids = torch.tensor([prompt.input_ids], device=model.device)
    capture = capture_prompt(
        model,
        input_ids,
        window=window,
        decode_tokens=store.origin.decode_tokens,
        end_tokens=end_tokens(model, tokenizer),
        accumulate=accumulate,
        word_starts=starts_of_words(tokenizer, input_ids[0]),
    )
    return store.save(prompt.input_ids, capture)


def _window(prompt: Prompt, settings: TuneSettings) -> int:
    if settings.window != "query":
        return settings.window
    assert prompt.query_length is not None
    return prompt.query_length


def _overlong(window: int, size: int) -> str | None:
    """Why a question cannot be the window, if it cannot; a number of tokens is known to be below ``size``."""
    if window < size:
        return None
    return (
        f"Its question has {window} tokens and leaves nothing of --size {size} for the rest of the prompt; "
        "raise --size, or use --window N."
    )
