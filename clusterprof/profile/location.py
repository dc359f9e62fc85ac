"""Where a profile goes when nobody says where."""

import hashlib
import re
from pathlib import Path

_LONGEST = 80


def profile_path(model_id: str, dataset: str, size: int) -> Path:
    """Default file of a profile, ``profiles/<model>/<dataset>-<size>.json``.

    ``organisation/model`` becomes ``organisation--model``; of a folder only the last part is used. Names are
    cut down to portable characters, and to one path component, whatever they hold; a name that loses
    something by it gets a hash, so that two names never share a file.
    """
    is_folder = re.match(r"[/\\.~]|[A-Za-z]:", model_id) is not None
    parts = [part for part in re.split(r"[/\\]+", model_id) if part]
    name = parts[-1] if parts and (is_folder or len(parts) > 2) else "--".join(parts)
    return Path("profiles") / _component(name) / f"{_component(dataset)}-{size}.json"


def _component(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_LONGEST]
    if safe and safe == name:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{safe}-{digest}".lstrip("-")
