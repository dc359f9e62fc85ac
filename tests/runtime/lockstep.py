"""Runs the runtime and its slow reference over the same tokens, and compares them after every forward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.runtime.cache import CompressedLayer, stored
from tests.reference.naive_eviction import NaiveRow
from tests.runtime.subjects import forward, pad_left, random_stream

SMALL = Compression(size=20, window=4, method=ClusterAttn(num_block=2, theta=0.02))
_STREAM = random_stream(2000)


def prompts(*lengths: int) -> list[Tensor]:
    """Different prompts, ``(1, length)`` each."""
    return [_STREAM[None, 100 * row : 100 * row + length] for row, length in enumerate(lengths)]


def new_tokens(rows: int, count: int, seed: int = 1) -> Tensor:
    """Tokens to feed, ``(rows, count)``."""
    return random_stream(rows * count, seed=seed).view(rows, count)


class Lockstep:
    """A conversation of several rows that starts with these prompts, ``(1, length)`` each.

    The model should be in float64 as the reference is: then what differs by more than 1e-5 is no rounding.
    """

    def __init__(
        self, model: PreTrainedModel, compression: Compression, prompts: Sequence[Tensor], **options: Any
    ) -> None:
        self.model, self.compression, self.options = model, compression, options
        self.prompts = prompts
        self.batch, self.mask = pad_left(prompts)
        self.rows = naive_rows(model, compression, [p.shape[1] for p in prompts], **options)
        self.cache: Cache = DynamicCache(config=model.config)

    def compressing(self) -> AbstractContextManager[None]:
        return compress(self.model, self.compression, **self.options)

    def prompt(self) -> None:
        """Prefill the prompts."""
        logits = self._forward(self.batch, self.mask)
        for row, naive in enumerate(self.rows):
            self._same(logits[row, -self.prompts[row].shape[1] :], naive.turn(self.prompts[row][0]))
        self._same_contents()

    def turn(self, tokens: Tensor) -> None:
        """Prefill a later turn, ``(rows, tokens)``."""
        logits = self._more(tokens)
        self._same(logits, torch.stack([naive.turn(row) for naive, row in self._by_row(tokens)]))
        self._same_contents()

    def decode(self, tokens: Tensor) -> None:
        """Feed ``(rows, steps)`` one by one."""
        for token in torch.split(tokens, 1, dim=1):
            before = self.rows[0].stored
            logits = self._more(token)[:, 0]
            self._same(logits, torch.stack([naive.decode(int(row)) for naive, row in self._by_row(token)]))
            if self.rows[0].stored < before:
                self._same_contents()
        self._same_contents()

    def feed_outside(self, tokens: Tensor) -> None:
        """Feed ``(rows, tokens)`` at once, with no context open."""
        logits = self._more(tokens)
        self._same(logits, torch.stack([naive.feed_outside(row) for naive, row in self._by_row(tokens)]))

    def take_back(self, count: int) -> None:
        """Crop the last tokens of every row."""
        self.cache.crop(-count)
        self.mask = self.mask[:, :-count]
        for naive in self.rows:
            naive.take_back(count)

    def _by_row(self, tokens: Tensor) -> list[tuple[NaiveRow, Tensor]]:
        return list(zip(self.rows, tokens, strict=True))

    def _more(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)
        return self._forward(tokens, self.mask)

    def _forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        with torch.no_grad():
            output = forward(
                self.model, tokens, attention_mask=mask, position_ids=positions, cache=self.cache
            )
        logits: Tensor = output.logits
        return logits

    def _same(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)

    def _same_contents(self) -> None:
        for row, naive in enumerate(self.rows):
            assert_holds(self.cache, row, naive)


def naive_rows(
    model: PreTrainedModel,
    compression: Compression,
    lengths: Sequence[int],
    *,
    query_length: int | Sequence[int] | None = None,
    **options: Any,
) -> list[NaiveRow]:
    """The reference of each row of a batch of prompts of these lengths."""
    if isinstance(query_length, int):
        query_length = [query_length] * len(lengths)
    window = compression.window
    windows = query_length if window == "query" else [window] * len(lengths)
    assert windows is not None
    return [
        NaiveRow(
            model,
            compression.method,
            compression.size,
            windows[row],
            padding=max(lengths) - length,
            methods={
                layer: override.method for override in compression.overrides for layer in override.layers
            },
            **options,
        )
        for row, length in enumerate(lengths)
    ]


def assert_holds(cache: Cache, row: int, naive: NaiveRow) -> None:
    """Every compressed layer holds exactly the tokens of the reference, in its order, after its padding."""
    assert [isinstance(layer, CompressedLayer) for layer in cache.layers] == [
        layer in naive.compressible for layer in range(len(cache.layers))
    ]
    for index in naive.compressible:
        keys, values = stored(cache.layers[index])  # type: ignore[arg-type]
        for head, slots in enumerate(naive.slots[index]):
            assert keys.shape[2] == len(slots)
            tokens = [position for position in slots if position >= 0]
            all_keys, all_values = naive.contents(index, head)
            found = keys[row, head, -len(tokens) :].double()
            # The rotation by its position tells the key of a token from that of its repetition.
            assert torch.cdist(found, all_keys).argmin(dim=-1).tolist() == tokens
            torch.testing.assert_close(found, all_keys[tokens], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                values[row, head, -len(tokens) :].double(), all_values[tokens], atol=1e-5, rtol=1e-5
            )


def logits_along(naive: NaiveRow, prompt: Tensor, answer: Tensor) -> Tensor:
    """What the reference says before every token of an answer ``(tokens,)``, ``(tokens, vocabulary)``.

    The answer's last token is not fed.
    """
    logits = [naive.turn(prompt[0])[-1]]
    logits += [naive.decode(token) for token in answer[:-1].tolist()]
    return torch.stack(logits)
