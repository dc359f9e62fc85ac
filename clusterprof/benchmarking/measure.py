"""Measure: runs every cache on every prompt length and batch size, in turns, and keeps the numbers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.benchmarking.forwards import Prefilled, decode, prefill
from clusterprof.benchmarking.memory import peak_bytes
from clusterprof.benchmarking.preallocated import preallocate
from clusterprof.benchmarking.settings import BenchListener, BenchSettings
from clusterprof.benchmarking.subjects import Subject
from clusterprof.benchmarking.timing import timed
from clusterprof.errors import CompressionError, spares_the_run
from clusterprof.runtime import cache_bytes, compress

OUT_OF_MEMORY = "out of memory"
_WARM_UP_TOKENS = 8


@dataclass
class Samples:
    """What one measurement gave so far.

    Attributes
    ----------
    seconds : list of float
        One number per repetition.
    peak_bytes : int, optional
        Of a prefill.
    kv_bytes_start, kv_bytes_end : int, optional
        Of the cache, before and after.
    error : str, optional
        Why something is missing.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    kv_bytes_start: int | None = None
    kv_bytes_end: int | None = None
    error: str | None = None


@dataclass
class Measurements:
    """Everything that was measured, by (prompt length, rows, name of the subject).

    Attributes
    ----------
    interrupted : bool
        Ctrl-C ended it early; what was measured until then is there.
    """

    prefills: dict[tuple[int, int, str], Samples] = field(default_factory=lambda: defaultdict(Samples))
    decodes: dict[tuple[int, int, str], Samples] = field(default_factory=lambda: defaultdict(Samples))
    interrupted: bool = False


def measure(
    model: PreTrainedModel,
    prompts: Tensor,
    subjects: Sequence[Subject],
    settings: BenchSettings,
    listener: BenchListener,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Measurements:
    """Measure all subjects at all prompt lengths and batch sizes.

    At each length every subject first runs once for its peak memory, which also warms up for that length. Then
    all are timed in turns, so that a machine that becomes slower or faster does so for all of them.

    Parameters
    ----------
    prompts : Tensor
        int64 ``(settings.rows, longest prompt)`` on the model's device, no padding. What the tokens say does not
        matter to speed or memory.
    tokenizer : PreTrainedTokenizerBase, optional
        For methods that need to know where words begin.

    Raises
    ------
    CompressionError
        If the model cannot be compressed.
    """
    found = Measurements()
    listener.begin(_parts(subjects, settings))
    try:
        decode(model, prefill(model, prompts[:1, :_WARM_UP_TOKENS]), 1)
        for tokens in settings.tokens:
            for rows, batch_sizes in settings.groups:
                prompt = prompts[:rows, :tokens]
                bench = _Bench(model, tokenizer, prompt, batch_sizes, settings.new_tokens, listener, found)
                for subject in subjects:
                    bench.prefill_memory(subject)
                for _ in range(settings.repeats):
                    bench.time_all(subjects)
        listener.end()
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _parts(subjects: Sequence[Subject], settings: BenchSettings) -> int:
    prefills = sum(not subject.preallocated for subject in subjects)
    decodes = len(settings.tokens) * settings.repeats * len(subjects) * len(settings.batch_sizes)
    return len(settings.tokens) * len(settings.groups) * prefills * (1 + settings.repeats) + decodes


@dataclass(frozen=True)
class _Bench:
    """The measurements on one prompt, ``(rows, length)``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    prompt: Tensor
    batch_sizes: tuple[int, ...]
    new_tokens: int
    listener: BenchListener
    found: Measurements

    def prefill_memory(self, subject: Subject) -> None:
        """Peak memory of a prefill, and the size of its cache."""
        if subject.preallocated:
            return
        samples = self._prefill_samples(subject)
        self._tell(subject, "prefill's memory")
        with self._running(subject), _sparing(samples):
            peak, prefilled = peak_bytes(lambda: prefill(self.model, self.prompt), self.model.device)
            samples.peak_bytes, samples.kv_bytes_end = peak, cache_bytes(prefilled.cache)

    def time_all(self, subjects: Sequence[Subject]) -> None:
        """Every subject once: its prefill, then decoding at each batch size."""
        prefilled: Prefilled | None = None
        for subject in subjects:
            with self._running(subject):
                # The preallocated full cache comes right after the full one, and takes over what that has read.
                if not subject.preallocated:
                    # Not two caches at a time.
                    prefilled = None
                    prefilled = self._time_prefill(subject)
                for batch in self.batch_sizes:
                    self._time_decode(subject, prefilled, batch)

    def _time_prefill(self, subject: Subject) -> Prefilled | None:
        samples = self._prefill_samples(subject)
        self._tell(subject, "prefill")
        if samples.error is None:
            with _sparing(samples):
                seconds, prefilled = timed(lambda: prefill(self.model, self.prompt), self.model.device)
                samples.seconds.append(seconds)
                return prefilled
        return None

    def _time_decode(self, subject: Subject, prefilled: Prefilled | None, batch: int) -> None:
        rows, tokens = self.prompt.shape
        samples = self.found.decodes[tokens, batch, subject.name]
        self._tell(subject, f"decoding at batch {batch}")
        if prefilled is None:
            samples.error = OUT_OF_MEMORY
        if prefilled is None or samples.error is not None:
            return
        with _sparing(samples):
            started = prefilled.repeated(batch // rows)
            if subject.preallocated:
                preallocate(started.cache, self.new_tokens + 1)
            samples.kv_bytes_start = cache_bytes(started.cache)
            warm = decode(self.model, started, 1)
            seconds, _ = timed(lambda: decode(self.model, warm, self.new_tokens), self.model.device)
            samples.seconds.append(seconds)
            samples.kv_bytes_end = cache_bytes(started.cache)

    def _running(self, subject: Subject) -> AbstractContextManager[None]:
        if subject.compression is None:
            return nullcontext()
        return compress(self.model, subject.compression, tokenizer=self.tokenizer)

    def _prefill_samples(self, subject: Subject) -> Samples:
        rows, tokens = self.prompt.shape
        return self.found.prefills[tokens, rows, subject.name]

    def _tell(self, subject: Subject, what: str) -> None:
        self.listener.measuring(f"{self.prompt.shape[1]:,} tokens, {subject.label}: {what}")


@contextmanager
def _sparing(samples: Samples) -> Iterator[None]:
    """Too little memory is a result like any other: it ends one measurement, not the run."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CompressionError) or not spares_the_run(error):
            raise
        samples.error = OUT_OF_MEMORY
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
