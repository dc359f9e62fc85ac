"""Contestants: the methods of a comparison, named with their papers' values or taken from profiles."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.errors import ClusterprofError
from clusterprof.methods import default_method, method_names
from clusterprof.profile import Compression, Full, Profile
from clusterprof.text import one_line

if TYPE_CHECKING:
    from clusterprof.evaluation.tasks import Entrant, Task
    from clusterprof.methods import MethodConfig
    from clusterprof.profile import Window

FULL = "full"
DECODE_SUFFIX = "+decode"
# Characters of a file's name that a record has room for.
_SHOWN = 80


@dataclass(frozen=True)
class Contestant:
    """A method in a comparison.

    Attributes
    ----------
    label : str
        As tables and plots call it.
    origin : str
        Where its parameters are from.
    at_size : callable, optional
        The method at a size; None for the full cache.
    window : int or "query", optional
        A profile's own; None takes the run's.
    size : int, optional
        The only size it takes part at, a profile's; None for all.
    profile : Profile, optional
        The one it is from.
    labels : tuple of (str, number or str)
        What tells it from others of the same label.
    """

    label: str
    origin: str
    at_size: Callable[[int], MethodConfig] | None
    window: Window | None = None
    size: int | None = None
    # Profiles cannot be hashed, and what is of one is in the other fields.
    profile: Profile | None = field(default=None, compare=False)
    labels: tuple[tuple[str, int | float | str], ...] = ()

    def compression(self, size: int, window: Window) -> Compression:
        """What it does at a size; ``window`` is the run's."""
        if self.profile is not None:
            return self.profile.compression
        assert self.at_size is not None
        return Compression(size=size, window=self.window or window, method=self.at_size(size))


def contestants(names: Sequence[str]) -> list[Contestant]:
    """The contestants of these names, the full cache first.

    Parameters
    ----------
    names : sequence of str
        Methods, which get their papers' values ("+decode" behind one lets it evict while decoding, too), and
        profile files (with a slash, or ``.json`` at the end), each a method with its tuned values.

    Raises
    ------
    ClusterprofError
        If a name means nothing, or comes twice.
    ProfileError
        If a profile cannot be read.
    """
    paths = {name: Path(name) for name in names if "/" in name or name.endswith(".json")}
    found = [Contestant(FULL, "nothing is evicted", None)]
    found += [
        _profiled(paths[name], _short_name(paths[name], paths.values())) if name in paths else _named(name)
        for name in names
        if name != FULL
    ]
    labels = [contestant.label for contestant in found]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated is not None:
        raise ClusterprofError(f"{repeated} takes part twice; name every method and every profile once.")
    return found


def tuned_rivals(entered: Sequence[Contestant]) -> list[Contestant]:
    """Other methods as the tunes of these profiles found them, each at its profile's size, none twice."""
    known = {it.profile.compression for it in entered if it.profile is not None}
    found = []
    for contestant in entered:
        if contestant.profile is None:
            continue
        compression = contestant.profile.compression
        for baseline in contestant.profile.results.baselines:
            method = baseline.method
            if isinstance(method, Full) or method.name == compression.method.name:
                continue
            rival = compression.uniform(method)
            if method != default_method(method.name, compression.size) and rival not in known:
                known.add(rival)
                found.append(_rival(contestant, rival))
    return found


def _rival(contestant: Contestant, rival: Compression) -> Contestant:
    assert contestant.profile is not None
    name = contestant.label.removeprefix(f"{contestant.profile.compression.method.name} (")
    return _found(f"{rival.method.name} (beside {name}", f"found by the tune of {contestant.origin}", rival)


def _found(label: str, origin: str, compression: Compression, profile: Profile | None = None) -> Contestant:
    """What a tune found, which is for one size."""
    return Contestant(
        label,
        origin,
        lambda size: compression.method,
        window=compression.window,
        size=compression.size,
        profile=profile,
    )


def _named(name: str) -> Contestant:
    base, evicts = name.removesuffix(DECODE_SUFFIX), name.endswith(DECODE_SUFFIX)
    if base not in method_names():
        close = difflib.get_close_matches(base, method_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"the methods are {', '.join(method_names())}."
        raise ClusterprofError(f"There is no method {name!r}; {hint}")
    return Contestant(
        name, "its paper's values", lambda size: default_method(base, size, evict_while_decoding=evicts)
    )


def tuned_on(entering: Iterable[Entrant], tasks: Sequence[Task]) -> list[str]:
    """Say in a sentence for each profile how many of the prompts it was tuned on, if any."""
    sentences = []
    for contestant in dict.fromkeys(entrant.contestant for entrant in entering):
        if contestant.profile is None:
            continue
        data = contestant.profile.dataset
        ids = frozenset(data.sampled_ids)
        # A file has several names, and a file that was added to since still has its rows.
        seen = sum(
            task.row.id in ids and (task.content_hash == data.content_hash or task.dataset == data.name)
            for task in tasks
        )
        if seen:
            sentences.append(
                f"{contestant.label} was tuned on {seen:,} of these {len(tasks):,} prompts, so its results there are "
                "better than on others; `clusterprof compare` leaves them out."
            )
    return sentences


def _short_name(path: Path, named: Iterable[Path]) -> str:
    """A profile's name, with as many folders as it takes to tell it from the others."""
    parts = _parts(path)
    others = [other for other in map(_parts, named) if other != parts]
    depth = 1
    while any(other[-depth:] == parts[-depth:] for other in others):
        depth += 1
    return "/".join(parts[-depth:])


def _parts(path: Path) -> tuple[str, ...]:
    return path.absolute().with_suffix("").parts


def _profiled(path: Path, name: str) -> Contestant:
    profile = Profile.load(path)
    compression = profile.compression
    # What tells it from others may be at either end.
    shown = one_line(name)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]}...{shown[-_SHOWN // 2 :]}"
    return _found(
        f"{compression.method.name} ({shown})",
        f"profile {one_line(path.name, _SHOWN)}, tuned on {one_line(profile.dataset.name, _SHOWN)}",
        compression,
        profile,
    )
