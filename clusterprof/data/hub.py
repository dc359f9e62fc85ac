"""The Hugging Face hub: whether it can be reached, LongBench's archive, and any dataset by its id."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from clusterprof.data.records import FIELDS, row_from_record
from clusterprof.data.rows import Dataset, make_dataset
from clusterprof.errors import DataError

LONGBENCH_REPO = "zai-org/LongBench"
REQUEST_TIMEOUT_S = 8.0
REACH_TIMEOUT_S = 12.0
# Test rows are what a workload is measured on; the first of these that a dataset has is taken.
SPLITS = ("test", "validation", "train")

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[^@\s]+))?(@(?P<split>\S+))?"
)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form ``org/name``, ``org/name:config``, each optionally with ``@split``."""
    return _HUB_ID.fullmatch(name) is not None


def download_longbench() -> Path:
    """Return LongBench's ``data.zip`` (114 MB) from the hub's cache, downloading it if it is not there.

    Raises
    ------
    DataError
        Within 30 s if the hub cannot be reached, naming the ways out.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(LONGBENCH_REPO, "data.zip", repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    reason = _why_unreachable(LONGBENCH_REPO)
    if reason is None:
        try:
            return Path(hf_hub_download(LONGBENCH_REPO, "data.zip", repo_type="dataset"))
        except Exception as error:  # the client's errors have no common base, and each means: not there
            reason = _reason(error)
    raise DataError(
        f"LongBench's data.zip cannot be downloaded from the Hugging Face hub ({reason}): pass --data-dir FOLDER "
        "with LongBench's JSONL files or data.zip, or connect to a network and try again."
    )


def load_hub_dataset(name: str) -> Dataset:
    """Read a dataset of the hub by its id.

    Parameters
    ----------
    name : str
        ``org/name``, ``org/name:config``, each optionally with ``@split``. Without a split the first of
        test, validation and train that is there.

    Raises
    ------
    DataError
        If the hub or the dataset cannot be reached, or a row lacks the fields of `row_from_record`.
    """
    match = _HUB_ID.fullmatch(name)
    assert match is not None, "callers ask is_hub_id first"
    repo, config, split = match["repo"], match["config"], match["split"]
    from huggingface_hub import is_offline_mode

    # Offline, `datasets` answers from its own cache without asking the hub.
    reason = None if is_offline_mode() else _why_unreachable(repo)
    if reason is not None:
        raise DataError(
            f"The dataset {repo} cannot be fetched from the Hugging Face hub ({reason}): connect to a network, set "
            "HF_HUB_OFFLINE=1 to use a copy downloaded before, or give a local file or a built-in dataset."
        )
    split, records = _fetch(repo, config, split)
    rows = (
        row_from_record(record, f"{name}, row {number}") for number, record in enumerate(records, start=1)
    )
    return make_dataset(name, f"hub {repo}" + (f", config {config}" if config else ""), split, rows)


def _fetch(repo: str, config: str | None, split: str | None) -> tuple[str, Any]:
    import datasets  # type: ignore[import-untyped]

    try:
        if split is None:
            names = datasets.get_dataset_split_names(repo, config)
            split = next((candidate for candidate in SPLITS if candidate in names), names[0])
        loaded = datasets.load_dataset(repo, config, split=split)
    except Exception as error:  # the library's errors have no common base, and each means: cannot be had
        raise DataError(f"The dataset {repo} cannot be loaded: {_reason(error)}.") from error
    columns = [column for column in loaded.column_names if column in FIELDS]
    if not columns:
        raise DataError(
            f"The dataset {repo} has the columns {', '.join(loaded.column_names)}, and none of "
            "'prompt', 'messages', or 'context' and 'question'."
        )
    return split, loaded.select_columns(columns)


def _why_unreachable(repo: str) -> str | None:
    """Ask the hub for a dataset once, within `REACH_TIMEOUT_S`; None if it answered.

    The client itself tries six times, which takes longer than anyone waits, and looking up a host name
    cannot be given a timeout: so one request, in a thread that is left behind if it hangs.
    """
    from huggingface_hub import HfApi

    outcome: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().dataset_info(repo, timeout=REQUEST_TIMEOUT_S)
            outcome.append(None)
        except Exception as error:  # whatever it is, it is the reason to show
            outcome.append(_reason(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACH_TIMEOUT_S)
    return outcome[0] if outcome else f"no answer within {REACH_TIMEOUT_S:.0f} s"


def _reason(error: Exception) -> str:
    """The error's text as the middle of a sentence: on one line, not too long, no full stop."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
