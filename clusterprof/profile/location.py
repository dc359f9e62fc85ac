"""Where a profile goes when nobody says where."""

import hashlib
import re
from pathlib import Path

_LONGEST = 80


def profile_path(model_id: str, dataset: str, size: int, method: str = "clusterattn") -> Path:
    """Default file of a profile, ``profiles/<model>/<dataset>-<size>.json``.

    Of another method than ClusterAttn it is ``<dataset>-<size>-<method>.json``.
    ``organisation/model`` becomes ``organisation--model``; of a folder only the last part is used. Names are
    cut down to portable characters, and to one path component, whatever they hold; a name that loses
    something by it gets a hash, so that two names never share a file.
    """
    suffix = "" if method == "clusterattn" else f"-{method}"
    return Path("profiles") / model_name(model_id) / f"{_component(dataset)}-{size}{suffix}.json"


def model_name(model_id: str) -> str:
    """A model's id as one path component; see :func:`profile_path`."""
    is_folder = re.match(r"[/\\.~]|[A-Za-z]:", model_id) is not None
    parts = [part for part in re.split(r"[/\\]+", model_id) if part]
    return _component(parts[-1] if parts and (is_folder or len(parts) > 2) else "--".join(parts))


def _component(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_LONGEST]
    if safe and safe == name:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{safe}-{digest}".lstrip("-")
