"""What is on this machine: packages, devices, models and the cache folder."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import clusterprof
from clusterprof.cache import cache_path
from clusterprof.errors import ClusterprofError, ModelError

_PACKAGES = ("torch", "transformers", "optuna", "datasets", "safetensors", "pydantic", "flash-attn")


@dataclass(frozen=True)
class KnownModel:
    """A model by the name that ``--model`` takes; ``bytes`` is None while it is not on this machine."""

    name: str
    bytes: int | None
    default: bool


@dataclass(frozen=True)
class Inventory:
    """What `doctor` tells.

    Attributes
    ----------
    packages : dict of str to str or None
        Versions; None for what is not installed.
    devices : list of str
        Accelerators that torch sees.
    device, dtype, attention : str
        What ``auto`` stands for here; the dtype is that of a bfloat16 checkpoint.
    flash_attention : str
        "yes", or why not.
    builtin_model : bool
        Whether the built-in model is in the cache folder.
    cache : str or None
        The folder; None without a home folder and without ``CLUSTERPROF_CACHE``.
    """

    clusterprof: str
    python: str
    system: str
    packages: dict[str, str | None]
    cpu_cores: int
    devices: list[str]
    device: str
    dtype: str
    attention: str
    flash_attention: str
    default_model: str
    builtin_model: bool
    cache: str | None
    cache_writable: bool
    cache_bytes: int


def take_inventory() -> Inventory:
    """Look at this machine; nothing is written, and nothing is asked of the network."""
    from transformers import PreTrainedConfig

    from clusterprof.models import choose_attention, default_model
    from clusterprof.models.choices import choose_device, choose_dtype, flash_attention_available

    device = choose_device("auto")
    dtype = choose_dtype("auto", device=device, config=PreTrainedConfig(dtype="bfloat16"))
    flash = flash_attention_available()
    try:
        choose_attention("flash_attention_2", device=device, dtype=dtype, flash_available=flash)
        flash_text = "yes"
    except ModelError as error:
        flash_text = f"no: {error}"
    folder = _cache_folder()
    return Inventory(
        clusterprof=clusterprof.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        cpu_cores=os.cpu_count() or 1,
        devices=_devices(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=choose_attention("auto", device=device, dtype=dtype, flash_available=flash),
        flash_attention=flash_text,
        default_model=default_model(),
        builtin_model=_builtin_bytes() is not None,
        cache=None if folder is None else str(folder),
        cache_writable=folder is not None and _writable(folder),
        cache_bytes=0 if folder is None else _bytes_below(folder),
    )


def known_models() -> list[KnownModel]:
    """Return the built-in model, the default one, and whatever models the hub's cache holds."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from clusterprof.models import BUILTIN_NAME, default_model

    default = default_model()
    sizes: dict[str, int | None] = {default: None}
    sizes[BUILTIN_NAME] = _builtin_bytes()
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    sizes.update(sorted((repo.repo_id, repo.size_on_disk) for repo in repos if repo.repo_type == "model"))
    return [KnownModel(name, size, name == default) for name, size in sizes.items()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _cache_folder() -> Path | None:
    try:
        return cache_path()
    except ClusterprofError:
        return None


def _writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # A run that is under way may have moved it in the meantime.
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:
                continue
    return total


def _builtin_bytes() -> int | None:
    from clusterprof.models import built_folder

    built = None if _cache_folder() is None else built_folder()
    return None if built is None else _bytes_below(built)
