"""Profiles as tables: several in a list, one in full."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.report.numbers import duration_text, parameters_text, window_text
from clusterprof.text import one_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from clusterprof.methods import Full, MethodConfig
    from clusterprof.profile import Profile, Range


def profiles_table(profiles: Mapping[Path, "Profile"]) -> "Table":
    """Return one row per profile: what it is for and what it holds."""
    from rich.table import Table

    table = Table()
    for heading in ("profile", "model", "dataset", "size", "window", "method", "objective"):
        table.add_column(heading, overflow="fold")
    for path, profile in profiles.items():
        tuning = profile.results.tuning
        table.add_row(
            one_line(str(path)),
            _short(profile.model.id),
            _short(profile.dataset.name),
            str(profile.compression.size),
            "question" if profile.compression.window == "query" else str(profile.compression.window),
            _method_text(profile.compression.method),
            f"{tuning.objective} {tuning.value:.4f}",
        )
    return table


def _short(name: str) -> str:
    """Of an absolute path its last part; a hub id is short already."""
    return Path(name).name if Path(name).is_absolute() else name


def _method_text(method: "MethodConfig") -> str:
    return f"{method.name}: {_parameters(method)}".removesuffix(": ")


def _parameters(method: "MethodConfig | Full") -> str:
    # What is switched off goes without saying.
    return parameters_text({name: value for name, value in method.model_dump().items() if value is not False})


def _space_text(space: "Mapping[str, Range]") -> str:
    parts = []
    for name, values in space.items():
        numbers = isinstance(values[0], int | float)
        parts.append(f"{name} {(' to ' if numbers else ' or ').join(map(str, values))}")
    return ", ".join(parts) or "no parameters"


def profile_summary(profile: "Profile") -> "Group":
    """Return what a person wants to know of a profile: what for, what, how good, how it came about."""
    from rich.console import Group
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(profile):
        facts.add_row(name, text)
    results = Table("method", "parameters", "cosine", "cosine_padded", "output", "KL", "agreement", "loss")
    for baseline in profile.results.baselines:
        scores = baseline.metrics.model_dump().values()
        results.add_row(
            baseline.method.name, _parameters(baseline.method), *(f"{score:.4f}" for score in scores)
        )
    return Group(facts, "", "Other methods on the same samples:", results)


def _facts(profile: "Profile") -> list[tuple[str, str]]:
    model, data, search = profile.model, profile.dataset, profile.search
    compression, tuning, environment = profile.compression, profile.results.tuning, profile.environment
    interval = ""
    if tuning.interval_95:
        interval = f" (95 % interval {tuning.interval_95[0]:.4f} to {tuning.interval_95[1]:.4f})"
    facts = [
        (
            "model",
            f"{model.id or 'not named'} ({model.architecture}, {model.num_hidden_layers} layers, "
            f"{model.num_attention_heads} query and {model.num_key_value_heads} KV heads)",
        ),
        (
            "data",
            f"{data.name} from {data.source}, {len(data.sampled_ids)} of {data.rows} rows, seed {data.seed}; "
            f"{data.prompts_cut} prompts cut, {data.prompts_fitting} set aside",
        ),
        (
            "compression",
            f"{compression.size} tokens per head, the prompt's {window_text(compression.window)} included",
        ),
        ("method", _method_text(compression.method)),
        ("result", f"{tuning.objective} {tuning.value:.4f} on {tuning.samples} samples{interval}"),
        (
            "search",
            f"{_space_text(search.space)}; {search.trials} trials ({search.sampler}, seed {search.seed}), "
            f"the last run took {duration_text(search.duration_s)}, study {search.study}",
        ),
        (
            "made with",
            f"clusterprof {environment.clusterprof}, torch {environment.torch}, transformers "
            f"{environment.transformers}, {environment.dtype} on {environment.device}, "
            f"{environment.attention_backend} attention, {environment.created:%Y-%m-%d %H:%M} UTC",
        ),
    ]
    if search.dropped_samples:
        dropped = "; ".join(f"{sample.id} ({sample.reason})" for sample in search.dropped_samples)
        facts.append(("left out", dropped))
    return facts
