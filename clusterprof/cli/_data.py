"""Rows of a dataset named on the command line, checked before a model is loaded where that is possible."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from clusterprof.data import Dataset


def load_rows(
    name: str,
    tokens: int | None,
    seed: int,
    data_dir: Path | None,
    templates: Path | None,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> "Dataset | None":
    """The rows, or None for a generator (asked for rightly) without a tokenizer to measure its prompts with."""
    from clusterprof.data import load_dataset
    from clusterprof.data.builtin import GENERATORS

    if tokenizer is None and name in GENERATORS and data_dir is None and templates is None:
        return None
    return load_dataset(
        name, tokenizer=tokenizer, tokens=tokens, seed=seed, data_dir=data_dir, templates=templates
    )
