"""Groups of records that may be compared, and what their methods and labels are."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterprof.errors import DataError
from clusterprof.evaluation.contestants import FULL
from clusterprof.methods import method_names
from clusterprof.text import one_line

if TYPE_CHECKING:
    from clusterprof.evaluation.records import Record
    from clusterprof.profile import Window

SNAPKV = "snapkv"
ABLATION = "ablation"
Value = int | float | str
# What an ablation varies in a method.
VARIED = ("num_block", "theta", "n")
# Labels that say what was done to a prompt, not which prompt it was.
_NOT_OF_THE_PROMPT = (*VARIED, "fits", "cut")
# A run that was continued on another day is the same run.
_OF_THE_DAY = ("created",)
_SHOWN = 60

PromptKey = tuple[Value, ...]


@dataclass(frozen=True)
class Group:
    """Results that may be compared with one another: one benchmark, on one model, run in one way."""

    bench: str
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def prompts(self) -> int:
        """How many there are."""
        return len({prompt_key(record) for record in self.records})

    @property
    def conditions(self) -> dict[str, str]:
        """Environment and settings as texts, by name: what tells a group from others of its benchmark."""
        return {**self.environment, **{name: str(value) for name, value in self.settings.items()}}


def differing(groups: Iterable[Group]) -> list[str]:
    """Return the names of the conditions in which groups differ, the model first."""
    conditions = [group.conditions for group in groups]
    names = dict.fromkeys(("model", *(name for each in conditions for name in each)))
    return [name for name in names if len({each.get(name) for each in conditions}) > 1]


def comparable(records: Iterable[Record]) -> list[Group]:
    """Put records into groups within which comparing is fair, in the order in which they first come.

    Records with the same key count once. What ran on another model, device, backend or version, or with other
    settings of the benchmark, is in a group of its own. Profiles whose files differ in their sizes only become one
    method, "snapkv (needle-128)" at size 128 and so on becoming "snapkv (needle)"; a method with several observation
    windows becomes several, and so does one with several sets of parameters at a size, such as a profile that was
    tuned again.

    Raises
    ------
    DataError
        If a group has two results of a method for the same prompt, so that neither can be believed.
    """
    by_key = {record.key: record for record in records}
    groups: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[Record]] = defaultdict(list)
    for record in by_key.values():
        environment = {name: value for name, value in record.environment.items() if name not in _OF_THE_DAY}
        settings = json.dumps(record.settings, sort_keys=True)
        groups[record.bench, settings, tuple(sorted(environment.items()))].append(record)
    return [_group(members) for members in groups.values()]


def _group(records: Sequence[Record]) -> Group:
    renamed = _named_alike(records)
    seen = set()
    for record in renamed:
        varied = tuple(label_of(record, name) for name in VARIED) if record.bench == ABLATION else ()
        one = (record.method, record.size, varied, prompt_key(record))
        if one in seen:
            size = "" if record.size is None else f" at size {record.size}"
            raise DataError(
                f"There are two different {record.bench} results of {record.method}{size} for the prompt "
                f"{one_line(record.prompt, _SHOWN)} of {record.dataset}; report one run at a time."
            )
        seen.add(one)
    return Group(records[0].bench, records[0].environment, records[0].settings, tuple(renamed))


def _named_alike(records: Sequence[Record]) -> list[Record]:
    names = {id(record): _without_size(record) for record in records}
    # Two profiles of one method at one size keep their own names.
    originals: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for record in records:
        originals[names[id(record)], record.size].add(record.method)
    shared = {name for (name, _), methods in originals.items() if len(methods) > 1}
    names = {
        id(record): record.method if names[id(record)] in shared else names[id(record)] for record in records
    }
    windows: dict[str, set[Window | None]] = defaultdict(set)
    for record in records:
        windows[names[id(record)]].add(record.window)
    for record in records:
        name = names[id(record)]
        if len(windows[name]) > 1:
            names[id(record)] = f"{name}, window {record.window}"
    # Each set of parameters that a name stands for at a size, once.
    variants: dict[tuple[str, int | None], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        there, own = variants[names[id(record)], record.size], _fixed_parameters(record)
        there += [own] if own not in there else []
    for record in records:
        name = names[id(record)]
        told_apart = _told_apart(_fixed_parameters(record), variants[name, record.size])
        names[id(record)] = ", ".join(filter(None, (name, told_apart)))
    return [record.model_copy(update={"method": names[id(record)]}) for record in records]


def _fixed_parameters(record: Record) -> dict[str, Any]:
    """A record's parameters, less what its benchmark varies."""
    varied = VARIED if record.bench == ABLATION else ()
    return {name: value for name, value in record.parameters.items() if name not in varied}


def _told_apart(own: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> str:
    """The parameters in which variants differ, with as many digits as tell them apart."""
    names = dict.fromkeys(name for variant in variants for name in variant)
    differing = [name for name in names if any(it.get(name) != own.get(name) for it in variants)]

    def text(variant: Mapping[str, Any], *, rounded: bool) -> str:
        return ", ".join(
            f"{name} {value:.3g}" if rounded and isinstance(value, float) else f"{name} {value}"
            for name in differing
            if (value := variant.get(name)) is not None
        )

    texts = {text(variant, rounded=True) for variant in variants}
    return text(own, rounded=len(texts) == len(variants))


def _without_size(record: Record) -> str:
    """The name, less what a profile's file is by default called by: "snapkv (needle-128-snapkv)" at size 128."""
    ends = rf"-{record.size}(-{re.escape(base_method(record))})?\)$"
    return re.sub(ends, ")", record.method)


@dataclass(frozen=True)
class Setting:
    """What a method was run with, and at which sizes; the fields as in a record."""

    method: str
    sizes: tuple[int, ...]
    parameters: Mapping[str, Any]
    window: Window | None
    origin: str


def settings_of(records: Sequence[Record]) -> list[Setting]:
    """Return each method's settings once, in the order of the methods and sizes."""
    sizes: dict[tuple[str, str, Window | None, str], set[int]] = defaultdict(set)
    for record in records:
        key = record.method, json.dumps(record.parameters), record.window, record.origin
        sizes[key] |= {record.size} if record.size is not None else set()
    order = methods_in(records)
    return [
        Setting(method, tuple(sorted(used)), json.loads(parameters), window, origin)
        for (method, parameters, window, origin), used in sorted(
            sizes.items(), key=lambda item: (order.index(item[0][0]), min(item[1], default=0))
        )
    ]


def prompt_key(record: Record) -> PromptKey:
    """Return what two records have in common exactly if they are of the same prompt."""
    labels = (
        f"{name}={value}" for name, value in sorted(record.labels.items()) if name not in _NOT_OF_THE_PROMPT
    )
    return (record.asked or "", record.dataset, record.prompt, record.prompt_tokens, *labels)


def prompts_with(label: str, records: Iterable[Record]) -> int:
    """Count the prompts that have a label, such as "cut"."""
    return len({prompt_key(record) for record in records if label in record.labels})


def label_of(record: Record, name: str) -> Value:
    """Return what a record is grouped by: one of its labels, its "dataset", what is varied, or an empty text."""
    if name in record.labels:
        return record.labels[name]
    if name == "dataset":
        return record.dataset
    if name == "tokens":
        return record.prompt_tokens
    value = record.parameters.get(name) if name in VARIED else None
    return value if isinstance(value, int | float | str) else ""


def ordered(values: Iterable[Value]) -> list[Value]:
    """Return each value once, numbers first and sorted, then texts in the order in which they come."""
    once = dict.fromkeys(values)
    numbers = sorted(value for value in once if not isinstance(value, str))
    return [*numbers, *(value for value in once if isinstance(value, str))]


def methods_in(records: Iterable[Record]) -> list[str]:
    """Return the methods that records are of: the full cache, then as the methods are listed, profiles last."""
    listed = (FULL, *method_names())
    bases = {record.method: base_method(record) for record in records}

    def rank(method: str) -> tuple[int, bool, str]:
        base = bases[method]
        return listed.index(base) if base in listed else len(listed), method != base, method

    return sorted(bases, key=rank)


def references(records: Sequence[Record]) -> list[str]:
    """Return what every method is held against: the full cache, and SnapKV with its paper's and with tuned values."""
    bases = {record.method: base_method(record) for record in records}
    return [method for method in methods_in(records) if bases[method] in (FULL, SNAPKV)]


def base_method(record: Record) -> str:
    """Return the method a record is of, whatever it is called there: "snapkv" for a profile of SnapKV."""
    return str(record.parameters.get("name", record.method))
