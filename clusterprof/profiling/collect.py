"""Collecting captures: from sampled rows to prompts worth compressing, and one capture for each."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from clusterprof.data import Dataset, Prompt, Row, build_prompt
from clusterprof.errors import ClusterprofError, DataError, spares_the_run
from clusterprof.methods import Need
from clusterprof.models import describe_model
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


def build_prompts(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Row],
    settings: TuneSettings,
) -> list[Prompt]:
    """The prompts of rows, cut to what the model's context leaves beside the decoded tokens.

    Raises
    ------
    DataError
        If that is not more than ``size``, or a prompt's question is to be its window and is not known.
    """
    context = describe_model(model).max_position_embeddings or sys.maxsize
    longest = context - settings.decode_tokens
    if longest <= settings.size:
        raise DataError(
            f"--decode-tokens {settings.decode_tokens} leaves {max(longest, 0)} tokens of the model's context of "
            f"{context} for a prompt, which must be longer than --size {settings.size}; lower one of the two."
        )
    prompts = [build_prompt(row, tokenizer, max_tokens=longest) for row in rows]
    if settings.window == "query":
        for row, prompt in zip(rows, prompts, strict=True):
            if prompt.query_length is None:
                raise DataError(_unknown_question(row))
    return prompts


def _unknown_question(row: Row) -> str:
    if row.question_start is None:
        return (
            f"--window query needs each prompt's question, and row {row.id!r} does not tell it from the rest; "
            "give rows with 'context' and 'question', or use --window N."
        )
    return (
        f"--window query needs to know which tokens are the question, and in row {row.id!r} it cannot be found "
        "among the prompt's (the tokenizer is not a fast one, or its chat template rewrites the text); "
        "use --window N."
    )


def longer_than_size(
    sampled: Sequence[Prompt], dataset: Dataset, settings: TuneSettings, listener: TuneListener
) -> list[Prompt]:
    """The prompts that there is something to compress of.

    Raises
    ------
    DataError
        If there is none.
    """
    prompts = [prompt for prompt in sampled if len(prompt.input_ids) > settings.size]
    listener.prepared(prompts, len(sampled) - len(prompts))
    if not prompts:
        longest = max(len(prompt.input_ids) for prompt in sampled)
        raise DataError(
            f"All {len(sampled)} sampled prompts of {dataset.name} fit in --size {settings.size} (the longest has "
            f"{longest} tokens), so there is nothing to compress; choose a smaller --size or longer prompts."
        )
    return prompts


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

    Raises
    ------
    ClusterprofError
        If none is left.
    """
    result = Captured()
    accumulate = "accumulated" in needs
    told = False
    for prompt in prompts:
        started, seconds = time.monotonic(), 0.0
        window = _window(prompt, settings)
        error = _overlong(window, settings.size)
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
    if not result.captures:
        raise ClusterprofError(
            f"No sample could be captured; the last one failed with: {result.dropped[-1].reason}"
        )
    return result


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
