"""Session: a model on which prompts are measured, each prefilled once for all who enter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from clusterprof.errors import CompressionError
from clusterprof.evaluation.decode import greedy
from clusterprof.evaluation.tasks import Entrant, Task, window_of
from clusterprof.profiling.capture import Capture, end_tokens
from clusterprof.profiling.capture_files import LIMIT_BYTES
from clusterprof.profiling.collect import find_capture
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.prefill import next_token_log_probs, prefill_prompt
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime import compress
from clusterprof.runtime.attention import decoder_of
from clusterprof.runtime.selection import kept_by_layer
from clusterprof.runtime.words import starts_of_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.methods import Observation

Result = TypeVar("Result")
# Decodes from a cache of so many rows: (cache, log-probabilities of the first token, rows) -> a result per row.
Decode = Callable[[Cache, Tensor, int], Sequence[Result]]


@dataclass(frozen=True)
class Session:
    """A model with its tokenizer, and the captures that are kept of it.

    Attributes
    ----------
    captures : CaptureStore
        Its fingerprint is one of the model, the tokenizer and the decode length.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    captures: CaptureStore

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache_dir: Path,
        *,
        decode_tokens: int = 0,
        capture_memory: int = LIMIT_BYTES,
    ) -> Session:
        """A session whose captures decode so many tokens and are kept in the cache folder, within so many bytes."""
        origin = Origin.of(model, tokenizer, decode_tokens=decode_tokens)
        store = CaptureStore(cache_dir / "captures", origin, capture_memory)
        return cls(model, tokenizer, store)

    def run(
        self, task: Task, entering: Sequence[Entrant], decode: Decode[Result]
    ) -> Iterator[tuple[Entrant, Result]]:
        """Prefill a prompt once, compress it for everyone who enters, and decode from each cache.

        Those of one size share a batch. Where nothing of prompt and answer is evicted, it is the full cache's run.

        Raises
        ------
        CompressionError
            If the model cannot be compressed, or its numbers are not finite.
        DataError
            If a window is the prompt's question, and that is not known.
        """
        stepwise = [it for it in entering if it.evicts_answer(task)]
        together = [it for it in entering if it not in stepwise]
        if together:
            yield from self._run_together(task, together, decode)
        for entrant in stepwise:
            yield entrant, self._run_stepwise(task, entrant, decode)

    def answers(self, task: Task, entering: Sequence[Entrant]) -> Iterator[tuple[Entrant, str]]:
        """Greedy answers as text."""
        ends = end_tokens(self.model, self.tokenizer)

        def decode(cache: Cache, first: Tensor, rows: int) -> list[list[int]]:
            return greedy(
                self.model,
                cache,
                int(first.argmax()),
                rows,
                max_new_tokens=task.max_new_tokens,
                end_tokens=ends,
            )

        for entrant, tokens in self.run(task, entering, decode):
            yield entrant, str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def capture(self, task: Task, window: int, *, accumulate: bool = False) -> Capture:
        """The capture of a task's prompt: its full run, from the store or made now.

        Raises
        ------
        CompressionError
            If the prompt is not longer than the window, or the model's numbers are not finite.
        """
        if len(task.prompt.input_ids) <= window:
            raise CompressionError(
                f"The prompt has {len(task.prompt.input_ids)} tokens, and must be longer than the window of {window}."
            )
        return find_capture(
            self.model, self.tokenizer, task.prompt, self.captures, window=window, accumulate=accumulate
        )

    def by_window(self, task: Task, entering: Sequence[Entrant]) -> Iterator[tuple[Capture, list[Entrant]]]:
        """A capture for each observation window of those who enter, all of whom compress, and whose it is.

        Raises
        ------
        CompressionError
            As :meth:`capture`, or if a question leaves no room beside it.
        DataError
            If a window is the prompt's question, and that is not known.
        """
        windows = {it: _window(it, task) for it in entering}
        for window in sorted(set(windows.values())):
            alike = [it for it in entering if windows[it] == window]
            needs = set().union(*(it.needs for it in alike))
            yield self.capture(task, window, accumulate="accumulated" in needs), alike

    def input_ids(self, task: Task) -> Tensor:
        """The prompt's tokens, int64 ``(1, length)`` on the model's device."""
        return torch.tensor([task.prompt.input_ids], device=self.model.device)

    def _run_together(
        self, task: Task, entering: Sequence[Entrant], decode: Decode[Result]
    ) -> Iterator[tuple[Entrant, Result]]:
        compressing = [it for it in entering if it.evicts(task.prompt)]
        windows = {it: _window(it, task) for it in compressing}
        needs = set().union(*(it.needs for it in compressing))
        input_ids = self.input_ids(task)
        prefill = prefill_prompt(
            self.model,
            input_ids,
            observed=max(windows.values(), default=1),
            accumulate="accumulated" in needs,
            word_starts=starts_of_words(self.tokenizer, input_ids[0]) if "words" in needs else None,
        )
        whole = [it for it in entering if it not in compressing]
        if whole:
            # One run, whoever asks: nothing is evicted for any of them.
            (result,) = decode(prefill.prompt_cache.compressed(self.model, None), prefill.log_probs, 1)
            yield from ((it, result) for it in whole)
        for size in sorted({it.size for it in compressing if it.size is not None}):
            alike = [it for it in compressing if it.size == size]
            chosen = torch.stack(
                [kept(it, prefill.observation(windows[it]), prefill.queries.keys()) for it in alike]
            )
            results = decode(
                prefill.prompt_cache.compressed(self.model, chosen), prefill.log_probs, len(alike)
            )
            yield from zip(alike, results, strict=True)

    def _run_stepwise(self, task: Task, entrant: Entrant, decode: Decode[Result]) -> Result:
        """Run what evicts at every step inside the runtime itself."""
        assert entrant.compression is not None
        query_length = _window(entrant, task) if entrant.compression.window == "query" else None
        cache = DynamicCache(config=decoder_of(self.model).config)
        with (
            torch.inference_mode(),
            compress(self.model, entrant.compression, query_length=query_length, tokenizer=self.tokenizer),
        ):
            first = next_token_log_probs(self.model, self.input_ids(task), cache)[0]
            (result,) = decode(cache, first, 1)
        return result


def _window(entrant: Entrant, task: Task) -> int:
    assert entrant.compression is not None
    return window_of(entrant.compression, task.prompt)


def kept(entrant: Entrant, observation: Observation, layers: Collection[int]) -> Tensor:
    """The positions that one who compresses keeps, ``(layers, kv_heads, size)``; see :func:`kept_by_layer`."""
    assert entrant.compression is not None
    return kept_by_layer(entrant.compression, observation, layers)
