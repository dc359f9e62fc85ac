"""Storage: where Optuna keeps studies, and why it cannot be opened, told without its password."""

import re
from urllib.parse import parse_qsl, unquote

import optuna

from clusterprof.errors import ClusterprofError
from clusterprof.profile.fields import without_credentials
from clusterprof.text import one_line

_LONGEST_REASON = 300


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open the storage at a URL.

    Raises
    ------
    ClusterprofError
        If it cannot be opened.
    """
    connect_args = {"timeout": 60} if url.startswith("sqlite") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": connect_args})
    except Exception as error:  # whatever the database driver raises
        raise unusable(url, error) from error


def unusable(url: str, error: Exception) -> ClusterprofError:
    """What to say of an error that came from a storage or its driver."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    # It may quote the URL, or what the driver took for a part of it.
    for secret in sorted(_secrets(url), key=len, reverse=True):
        reason = reason.replace(secret, "***")
    # What is no URL may have a password anywhere.
    shown = one_line(without_credentials(url)) if "://" in url else "of --storage"
    return ClusterprofError(
        f"The study storage {shown} cannot be opened ({one_line(reason.removesuffix('.'), _LONGEST_REASON)}); give "
        "--storage a URL such as sqlite:///study.db, with the database's driver installed."
    )


def _secrets(url: str) -> set[str]:
    """Whatever a URL says besides its scheme, user, host and path, whole and in parts, as written and as meant."""
    scheme, _, rest = url.partition("://")
    if not rest:
        return {scheme} - {""}
    address, _, query = rest.partition("?")
    # Without a host an @ belongs to the path.
    password = "" if address.startswith("/") else address.rpartition("@")[0].partition(":")[2]
    parts = {password, *re.split("[:@/]", password), query, *(value for _, value in parse_qsl(query))}
    return (parts | {unquote(part) for part in parts}) - {""}
