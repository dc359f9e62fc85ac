"""The cache folder: where it is, and how a folder that takes long to build gets into it whole."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.errors import ClusterprofError

if TYPE_CHECKING:
    from filelock import FileLock

CACHE_VARIABLE = "CLUSTERPROF_CACHE"
_MARKER = "clusterprof.json"


def cache_path() -> Path:
    """Return where the cache folder is, whether or not it exists.

    The environment variable ``CLUSTERPROF_CACHE`` names it; otherwise it is the user's cache folder.

    Raises
    ------
    ClusterprofError
        If neither the variable nor a home folder says where it is.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    from platformdirs import user_cache_path

    path = None
    with suppress(RuntimeError):
        path = user_cache_path("clusterprof", appauthor=False)
    # Older platformdirs hand the "~" of a home folder they cannot find back as it is.
    if path is None or not path.is_absolute():
        raise ClusterprofError(
            f"There is no home folder to keep the cache in; set {CACHE_VARIABLE} to a folder that can be written."
        )
    return path


def cache_dir() -> Path:
    """Return the cache folder, made if need be.

    Raises
    ------
    ClusterprofError
        If it cannot be made or written.
    """
    path = cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unwritable(path, "no permission to write there")
    return path


def build_folder(name: str, fingerprint: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`, built first unless a whole one with this fingerprint is there.

    The folder appears under its name only when `build` has ended, by a rename. Of several processes
    one builds and the others wait for it. What a killed one left behind is removed.

    Parameters
    ----------
    name
        The folder's name inside the cache folder.
    fingerprint
        What it was built from, and how; a folder with another one is built anew.
    build
        Called with an empty folder to fill.

    Raises
    ------
    ClusterprofError
        If the cache folder cannot be written, or `build` ends in an `OSError` such as a full disk.
    """
    folder = cache_path() / name
    # Before anything is written, so that a shared, read-only cache can be used.
    if _is_whole(folder, fingerprint):
        return folder
    cache = cache_dir()
    try:
        with _locked(cache / f"{name}.lock", name):
            if not _is_whole(folder, fingerprint):
                _build_and_rename(folder, fingerprint, build)
    except OSError as error:
        raise _unwritable(cache, error.strerror or str(error)) from error
    return folder


def _build_and_rename(folder: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    # One fixed name is enough: only the holder of the lock gets here.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        build(partial)
        marker = {"fingerprint": fingerprint, "files": {p.name: p.stat().st_size for p in partial.iterdir()}}
        (partial / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path, fingerprint: str) -> bool:
    """Whether the folder is what `fingerprint` says, with no file missing or cut short."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return bool(
            marker["fingerprint"] == fingerprint
            and all((folder / name).stat().st_size == size for name, size in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, name: str) -> Iterator["FileLock"]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        from rich.console import Console

        Console(stderr=True).print(f"Waiting for another process that is preparing {name}.", highlight=False)
        lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def _unwritable(path: Path, reason: str) -> ClusterprofError:
    return ClusterprofError(
        f"The cache folder {path} cannot be written ({reason}); make room there, "
        f"or set {CACHE_VARIABLE} to another folder."
    )
