"""Owns what a conversation keeps in its cache and what the model then says, one row and one head at a time.

The cache is lists of positions. The model runs in float64 over a full, plain cache, and its attention is replaced
by sums over the positions that are in the lists; padding takes slots in them and is never run.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel

from clusterprof.methods import Method, Observation
from clusterprof.runtime.transformers_names import CACHE


class NaiveRow:
    """One row of a batch.

    Attributes
    ----------
    methods
        By layer, where it is not ``method``.
    slots
        By layer and KV head: the positions that are stored, ascending, counted from the row's first token on;
        padding has those below zero.
    length
        Tokens seen so far, without padding.
    prompt_slots
        How many slots the prompt took when its turn was over.
    prompt_end
        The position after the prompt's last token.
    received
        By layer and KV head: what each token, evicted or not, was paid by all queries so far, as a mean over the
        query heads of the group.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        size: int,
        window: int,
        *,
        padding: int = 0,
        decode_budget: int | None = None,
        later_turns: Literal["append", "compress"] = "append",
        methods: Mapping[int, Method] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_attn_implementation("naive_eviction")
        self.cache: Cache = DynamicCache()
        self.method, self.methods, self.size, self.window = method, methods or {}, size, window
        self.decode_budget, self.later_turns = decode_budget, later_turns
        config = model.config
        self.heads, kv_heads, layers = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_hidden_layers,
        )
        self.group = self.heads // kv_heads
        self.slots = [[list(range(-padding, 0)) for _ in range(kv_heads)] for _ in range(layers)]
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        self.compressible = [layer for layer in range(layers) if kinds[layer] == "full_attention"]
        # By layer and query head: for each of the latest queries, what it paid to each position.
        self.attention: list[list[list[dict[int, float]]]] = [[[] for _ in range(self.heads)] for _ in kinds]
        self.received: list[list[dict[int, float]]] = [[{} for _ in range(kv_heads)] for _ in kinds]
        self.length = self.prompt_slots = self.prompt_end = 0
        self.compressed = False

    @property
    def stored(self) -> int:
        """Slots per head in use, padding included."""
        lengths = {len(slots) for layer in self.compressible for slots in self.slots[layer]}
        (length,) = lengths
        return length

    def turn(self, tokens: Tensor) -> Tensor:
        """Prefill ``(tokens,)`` of the prompt or of a later turn; logits ``(tokens, vocabulary)``."""
        logits = self._forward(tokens)
        if self.stored > self.size and (not self.compressed or self.later_turns == "compress"):
            self._compress(observers=min(self.window, len(tokens)))
            self.compressed = True
            self.prompt_slots, self.prompt_end = self.size, self.length
        elif self.prompt_slots == 0:
            self.prompt_slots, self.prompt_end = self.stored, self.length
        else:
            self._hold_budget()
            self._hold_size()
        return logits

    def decode(self, token: int) -> Tensor:
        """Feed one token; logits ``(vocabulary,)``."""
        logits = self._forward(torch.tensor([token]))
        self._hold_budget()
        self._hold_size()
        return logits[0]

    def feed_outside(self, tokens: Tensor) -> Tensor:
        """Feed tokens that nothing observes and that evict nothing; logits ``(tokens, vocabulary)``."""
        logits = self._forward(tokens)
        self._forget_queries()
        return logits

    def take_back(self, count: int) -> None:
        """Crop the last tokens, none of which evicted anything; what they looked at is forgotten."""
        self.length -= count
        self.cache.crop(-count)
        for layer in self.slots:
            for slots in layer:
                del slots[-count:]
        self._forget_queries()

    def contents(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every token so far, the evicted ones too, ``(length, head_dim)`` each."""
        stored: Any = self.cache.layers[layer]
        return stored.keys[0, head], stored.values[0, head]

    def _forward(self, tokens: Tensor) -> Tensor:
        new = range(self.length, self.length + len(tokens))
        for layer in self.slots:
            for slots in layer:
                slots.extend(new)
        self.length = new.stop
        options: dict[str, Any] = {CACHE: self.cache, "position_ids": torch.tensor([list(new)]), "row": self}
        with torch.no_grad():
            logits: Tensor = self.model(tokens[None], **options).logits
        return logits[0]

    def _forget_queries(self) -> None:
        for layer in self.attention:
            for queries in layer:
                queries.clear()

    def attend(
        self, layer: int, head: int, query: Tensor, keys: Tensor, values: Tensor, seen: list[int]
    ) -> Tensor:
        """Attention of one query ``(head_dim,)`` over the seen positions, remembered for the importance."""
        weights = (keys[seen] @ query).softmax(dim=-1)
        queries = self.attention[layer][head]
        queries.append(dict(zip(seen, weights.tolist(), strict=True)))
        received = self.received[layer][head // self.group]
        for position, weight in queries[-1].items():
            received[position] = received.get(position, 0.0) + weight / self.group
        del queries[: -self.window]
        return weights @ values[seen]

    def _importance(self, layer: int, kv_head: int, position: int, observers: int) -> float:
        """Mean attention that the last queries of a head's group pay to a position."""
        group = range(kv_head * self.group, (kv_head + 1) * self.group)
        paid = [query[position] for head in group for query in self.attention[layer][head][-observers:]]
        return sum(paid) / len(paid)

    def _select(
        self, layer: int, head: int, positions: Sequence[int], budget: int, observers: int
    ) -> list[int]:
        importance = [self._importance(layer, head, position, observers) for position in positions]
        return self._chosen(layer, head, positions, importance, budget, self.window)

    def _chosen(
        self,
        layer: int,
        head: int,
        positions: Sequence[int],
        importance: list[float],
        budget: int,
        window: int,
    ) -> list[int]:
        received = torch.tensor([[[self.received[layer][head][position] for position in positions]]])
        observation = Observation(torch.tensor([[importance]]), window=window, accumulated=received)
        (chosen,) = self.methods.get(layer, self.method).select(observation, budget)[0].tolist()
        return [positions[index] for index in chosen]

    def _compress(self, observers: int) -> None:
        """Shrink everything to ``size`` slots; what is left of a row that fits is padding."""
        for layer in self.compressible:
            for head, slots in enumerate(self.slots[layer]):
                tokens = [position for position in slots if position >= 0]
                if len(tokens) <= self.size:
                    self.slots[layer][head] = slots[len(slots) - self.size :]
                    continue
                before, window = tokens[: -self.window], tokens[-self.window :]
                budget = self.size - self.window
                self.slots[layer][head] = self._select(layer, head, before, budget, observers) + window

    def _hold_budget(self) -> None:
        """Shrink what is stored behind the prompt's slots to half the budget, once it is over it."""
        if self.decode_budget is None or self.stored - self.prompt_slots <= self.decode_budget:
            return
        for layer in self.compressible:
            for head, slots in enumerate(self.slots[layer]):
                excess = len(slots) - self.prompt_slots - self.decode_budget // 2
                while excess > 0 and slots[0] < 0:
                    del slots[0]
                    excess -= 1
                prompt = [position for position in slots if position < self.prompt_end]
                generated = [position for position in slots if position >= self.prompt_end]
                before, window = generated[: -self.window], generated[-self.window :]
                chosen = self._select(layer, head, before, len(before) - excess, self.window)
                self.slots[layer][head] = prompt + chosen + window

    def _hold_size(self) -> None:
        """Where the method evicts while decoding: padding goes, then what it does not choose of all that is left."""
        if not getattr(self.method, "evict_while_decoding", False):
            return
        for layer in self.compressible:
            for head, slots in enumerate(self.slots[layer]):
                while len(slots) > self.size and slots[0] < 0:
                    del slots[0]
                if len(slots) > self.size:
                    unknown = [0.0] * len(slots)
                    self.slots[layer][head] = self._chosen(layer, head, slots, unknown, self.size, window=0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    row: NaiveRow,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer: Any = module.layer_idx
    output = torch.empty_like(query)
    first = key.shape[2] - query.shape[2]
    for head in range(row.heads):
        kv_head = head // row.group
        for index in range(query.shape[2]):
            position = first + index
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = [slot for slot in row.slots[layer][kv_head] if oldest <= slot <= position]
            output[0, head, index] = row.attend(
                layer, head, query[0, head, index] * scaling, key[0, kv_head], value[0, kv_head], seen
            )
    return output.transpose(1, 2), None


AttentionInterface.register("naive_eviction", _attention)
