"""Settings of a context: what it compresses to, when tokens leave the cache, and what goes together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from clusterprof.errors import CompressionError
from clusterprof.profile import Compression
from clusterprof.runtime.cache import CompressedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LaterTurns = Literal["append", "compress"]


@dataclass(frozen=True)
class Eviction:
    """What to compress to, and when.

    Attributes
    ----------
    query_lengths : tuple of int, optional
        With a window that is the prompt's question: its length in each row, or one for all.
    decode_budget : int, optional
        Most tokens per head after the prompt; None never evicts those.
    later_turns : str
        "append" leaves a compressed cache alone when a conversation goes on; "compress" compresses all of it to
        ``size`` again, observed by the new turn.
    tokenizer : PreTrainedTokenizerBase, optional
        Tells the words of a prompt, for methods that need them.

    Raises
    ------
    CompressionError
        If the settings contradict each other.
    """

    compression: Compression
    query_lengths: tuple[int, ...] | None
    decode_budget: int | None
    later_turns: LaterTurns
    tokenizer: "PreTrainedTokenizerBase | None"

    def __post_init__(self) -> None:
        size, window = self.compression.size, self.compression.window
        for name, numbers in (("query_length", self.query_lengths), ("decode_budget", (self.decode_budget,))):
            if numbers not in (None, (None,)) and any(type(number) is not int for number in numbers):
                given = ", ".join(map(repr, numbers or ()))
                raise CompressionError(f"{name} is {given}; it must be a whole number of tokens.")
        if window == "query" and self.query_lengths is None:
            raise CompressionError(
                "The profile's observation window is the prompt's question; say how many tokens it has, up to the "
                "end of the prompt: compress(model, profile, query_length=...)."
            )
        if window != "query" and self.query_lengths is not None:
            raise CompressionError(
                f"The profile's observation window is the last {window} tokens; query_length is for a profile that "
                'was tuned with window "query".'
            )
        lengths = self.query_lengths
        if lengths is not None and not (lengths and all(0 < length < size for length in lengths)):
            raise CompressionError(
                f"query_length is {', '.join(map(str, lengths)) or 'empty'}; each must be at least 1 and below the "
                f"profile's size of {size}."
            )
        least = 2 * self.longest_window + 2
        if self.decode_budget is not None and self.decode_budget < least:
            raise CompressionError(
                f"decode_budget is {self.decode_budget}; with an observation window of {least // 2 - 1} it must be "
                f"at least {least}."
            )
        if self.later_turns not in ("append", "compress"):
            raise CompressionError(f'later_turns is {self.later_turns!r}; it must be "append" or "compress".')
        self._check_method()

    def _check_method(self) -> None:
        name = self.compression.method.name
        if self.while_decoding and self.decode_budget is not None:
            raise CompressionError(
                f"The method {name} evicts while decoding and so bounds the cache already; leave decode_budget out."
            )
        if not self.needs_words:
            return
        if self.tokenizer is None:
            raise CompressionError(
                f"The method {name} keeps whole words, which only a tokenizer knows; say "
                "compress(model, profile, tokenizer=tokenizer)."
            )
        if self.decode_budget is not None or self.later_turns == "compress":
            raise CompressionError(
                f"The method {name} needs the words of all that it chooses from, and knows those of a first prompt "
                'only; leave decode_budget and later_turns="compress" out.'
            )

    @property
    def needs_words(self) -> bool:
        """Whether the method must know where words begin."""
        return "words" in self.compression.method.needs

    @property
    def while_decoding(self) -> bool:
        """Whether the method holds the cache at ``size`` tokens per head at every decode step, too."""
        return bool(getattr(self.compression.method, "evict_while_decoding", False))

    @property
    def evicts_decoded(self) -> str | None:
        """The setting by which decoded tokens are evicted, as the user knows it, if there is one."""
        if self.decode_budget is not None:
            return "decode_budget"
        return "evict_while_decoding" if self.while_decoding else None

    def needs_sums(self, layer: CompressedLayer) -> bool:
        """Whether the attention that the tokens of a layer receive must be summed up from here on."""
        evicts_later = self.evicts_decoded is not None or self.later_turns == "compress"
        return "accumulated" in self.compression.method.needs and (
            evicts_later or layer.evicted_of_prompt == 0
        )

    @property
    def longest_window(self) -> int:
        """Of all rows, in tokens."""
        return max(self.query_lengths or self.windows(1))

    def check_prompts(self, count: int) -> None:
        """Raise a CompressionError if the query lengths are not those of so many prompts."""
        given = 1 if self.query_lengths is None else len(self.query_lengths)
        if given not in (1, count):
            raise CompressionError(
                f"query_length has {given} values for {count} prompts; give one per prompt, or one for all."
            )

    def windows(self, batch: int) -> list[int]:
        """Length of each row's observation window, in tokens."""
        if self.compression.window != "query":
            return [self.compression.window] * batch
        assert self.query_lengths is not None
        # One prompt may have become several rows, beams or returned sequences, side by side.
        return [length for length in self.query_lengths for _ in range(batch // len(self.query_lengths))]
