"""Datasets by name: the built-in generators, LongBench's tasks, local files and the hub."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.data.builtin import GENERATORS, generate_dataset
from clusterprof.data.files import SUFFIXES, load_file
from clusterprof.data.hub import LONGBENCH_REPO, is_hub_id, load_hub_dataset
from clusterprof.data.longbench import load_longbench
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.data.prompts import check_rendering
from clusterprof.data.rows import Dataset
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TOKENS = 2000


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset that has a name here: what its rows are, and where they come from."""

    name: str
    description: str
    source: str


def list_datasets() -> list[DatasetInfo]:
    """Return the named datasets: the built-in generators, then LongBench's tasks."""
    built_in = [DatasetInfo(g.name, g.description, "built in, generated") for g in GENERATORS.values()]
    source = f"LongBench: hub {LONGBENCH_REPO}, or --data-dir"
    return built_in + [DatasetInfo(task.name, task.description, source) for task in LONGBENCH_TASKS.values()]


def load_dataset(
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    templates: Path | None = None,
) -> Dataset:
    """Load a dataset, checking every row of it, the chat template included.

    Parameters
    ----------
    name : str
        A name of `list_datasets`, the path of a local file, or a hub id ``org/name[:config][@split]``.
    tokenizer : PreTrainedTokenizerBase or None
        The generators measure their prompts with it. Without one, to have rows checked before a model is
        loaded, other rows are not rendered with its chat template.
    tokens : int, optional
        Prompt length of a generator's rows, 2000 if not given; for nothing but generators.
    seed : int
        Seed of a generator.
    data_dir, templates : Path, optional
        Where LongBench's files are, and other wording for its tasks; for nothing but LongBench's tasks.

    Raises
    ------
    DataError
        If the name means nothing, an option does not belong to it, or its rows cannot be used.
    """
    if tokens is not None and name not in GENERATORS:
        raise DataError(
            f"--tokens sets the length of generated prompts ({', '.join(GENERATORS)}); {name} has its own lengths."
        )
    for option, value in (("--data-dir", data_dir), ("--templates", templates)):
        if value is not None and name not in LONGBENCH_TASKS:
            raise DataError(
                f"{option} is for LongBench's tasks ({', '.join(LONGBENCH_TASKS)}), not for {name}."
            )
    if name in GENERATORS:
        if tokenizer is None:
            raise DataError(f"The generator {name} measures its prompts with a tokenizer; pass one.")
        return generate_dataset(name, tokenizer, DEFAULT_TOKENS if tokens is None else tokens, seed)
    dataset = _load(name, data_dir, templates)
    if tokenizer is not None:
        check_rendering(dataset.rows, tokenizer)
    return dataset


def _load(name: str, data_dir: Path | None, templates: Path | None) -> Dataset:
    if name in LONGBENCH_TASKS:
        return load_longbench(name, data_dir, templates)
    path = _path(name)
    if path.suffix.lower() in SUFFIXES or _exists(path):
        return load_file(path, name)
    if is_hub_id(name):
        return load_hub_dataset(name)
    known = [*GENERATORS, *LONGBENCH_TASKS]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the named ones are {', '.join(known)}."
    raise DataError(
        f"There is no dataset {name!r}: neither a name, nor a local {'/'.join(SUFFIXES)} file, nor a hub id "
        f"org/name; {hint}"
    )


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for instance a name too long for a path
        return False
