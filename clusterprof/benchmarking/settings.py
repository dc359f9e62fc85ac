"""What a benchmark is asked for, and who is told what it does."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class BenchSettings:
    """What to measure.

    Attributes
    ----------
    tokens, batch_sizes : tuple of int
        Prompt lengths, and rows to decode at once, both ascending.
    new_tokens : int
        Decode steps that are timed, after one that is not.
    repeats : int
        How often everything is timed; the median counts.
    prefill_batch : bool
        Read every row of a batch. Otherwise one row is read and repeated: a prefill costs by far the most, and
        decoding takes as long over equal rows as over different ones.
    """

    tokens: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    new_tokens: int = 32
    repeats: int = 3
    prefill_batch: bool = False

    @property
    def positions(self) -> int:
        """Tokens that the longest prompt and what is decoded after it have together."""
        return self.tokens[-1] + 1 + self.new_tokens

    @property
    def rows(self) -> int:
        """Most prompts that are read at once."""
        return self.batch_sizes[-1] if self.prefill_batch else 1

    @property
    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each prefill of a prompt length: its rows, and the batch sizes that are decoded from it."""
        if self.prefill_batch:
            return [(batch, (batch,)) for batch in self.batch_sizes]
        return [(1, self.batch_sizes)]


class BenchListener(Protocol):
    """Told what a benchmark is doing, to show it."""

    def begin(self, measurements: int) -> None:
        """The benchmark starts; it has so many parts."""

    def measuring(self, what: str) -> None:
        """The next part starts."""

    def end(self) -> None:
        """All parts are done."""
