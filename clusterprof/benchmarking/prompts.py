"""Prompts to measure with: text that comes with Python, in pieces of the right length."""

from itertools import cycle
from typing import TYPE_CHECKING

import torch

from clusterprof.data.builtin.prose import documentation_lines

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def bench_prompts(tokenizer: "PreTrainedTokenizerBase", rows: int, length: int) -> "Tensor":
    """Return so many prompts of exactly so many tokens, int64 ``(rows, length)``.

    Consecutive pieces of Python's documentation, from its start again after its end. What they say does not
    matter to speed; that they are text does to models that send different tokens to different experts.
    """
    tokens: list[int] = []
    topics = cycle(documentation_lines())
    while len(tokens) < rows * length:
        tokens += tokenizer("\n".join(next(topics)), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(tokens[: rows * length]).view(rows, length)
