"""Profiles as tables: several in a list, one in full."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.report.numbers import (
    counted,
    duration_text,
    listed,
    overrides_text,
    parameters_text,
    window_text,
)
from clusterprof.statistics import FEWEST_TO_TELL

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from clusterprof.methods import Full, MethodConfig
    from clusterprof.profile import Difference, LayerOverride, Metrics, Profile, Range, Results, Score


def profile_lines(path: Path, profile: "Profile") -> list[str]:
    """Return a profile's file, what it is for and what it holds, a line each; the file's can be copied."""
    window = (
        "the question" if profile.compression.window == "query" else f"{profile.compression.window} tokens"
    )
    return [
        str(path),
        f"  {_short(profile.dataset.name)} on {_short(profile.model.id)}, {profile.compression.size:,} tokens per "
        f"head, window {window}",
        f"  {outcome(profile)}",
    ]


def _short(name: str) -> str:
    """Of an absolute path its last part; a hub id is short already."""
    return Path(name).name if Path(name).is_absolute() else name


def _method_text(method: "MethodConfig | Full", overrides: "Sequence[LayerOverride]") -> str:
    # What is switched off goes without saying.
    shown = {name: value for name, value in method.model_dump().items() if value is not False}
    text = f"{method.name}: {parameters_text(shown)}".removesuffix(": ")
    return "; ".join([text, *overrides_text(overrides, method)])


def _space_text(space: "Mapping[str, Range]") -> str:
    parts = []
    for name, values in space.items():
        numbers = isinstance(values[0], int | float)
        parts.append(f"{name} {(' to ' if numbers else ' or ').join(map(str, values))}")
    return ", ".join(parts) or "no parameters"


def outcome(profile: "Profile") -> str:
    """What a profile's tune found, in a line: the values, what they are worth, and since when."""
    judged = profile.results.judged
    which = "held-out" if profile.results.held_out else "tuning"
    return (
        f"{_method_text(profile.compression.method, profile.compression.overrides)}; {judged.objective} "
        f"{judged.value:.4f} on {counted(judged.samples, f'{which} sample')}; {profile.environment.created:%Y-%m-%d}"
    )


def profile_summary(profile: "Profile") -> "Group":
    """Return what a person wants to know of a profile: what for, what, how good, how it came about."""
    from rich.console import Group
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(profile):
        facts.add_row(name, text)
    return Group(
        facts, "", _results_title(profile.results), _results_table(profile), *_same_tokens(profile.results)
    )


def _same_tokens(results: "Results") -> list[str]:
    """A sentence if the profile's method keeps what another one keeps: equal to the last digit."""
    same = [
        _method_text(baseline.method, baseline.overrides)
        for baseline in results.baselines
        if baseline.metrics == results.metrics
        and baseline.difference is not None
        and baseline.difference.interval_95 == (0, 0)
    ]
    return [f"On these samples it keeps the same tokens as {listed(same)}."] if same else []


def _results_title(results: "Results") -> str:
    which = "held-out" if results.held_out else "tuning"
    few = ", too few to show a difference" if results.judged.samples < FEWEST_TO_TELL else ""
    return f"On the {counted(results.judged.samples, f'{which} sample')}{few}:"


def _results_table(profile: "Profile") -> "Table":
    """The profile's method and the others, and by how much it is ahead of each in its objective."""
    from rich.table import Table

    table = Table("method")
    for heading in ("cosine", "KL", "agree", "loss"):
        table.add_column(heading, justify="right")
    table.add_column(f"{profile.results.tuning.objective}, tuned minus it", justify="right")

    def add(method: str, metrics: "Metrics", difference: str) -> None:
        scores = (metrics.cosine, metrics.kl, metrics.agreement, metrics.loss)
        table.add_row(method, *(f"{score:.4f}" for score in scores), difference)

    add("tuned", profile.results.metrics, "")
    for baseline in profile.results.baselines:
        method = _method_text(baseline.method, baseline.overrides)
        add(method, baseline.metrics, _difference_text(baseline.difference))
    return table


def _difference_text(difference: "Difference | None") -> str:
    if difference is None:
        return ""
    text = f"{difference.value:+.4f}"
    if difference.interval_95:
        # Below it, so that the table fits in 80 columns.
        text += f"\n{difference.interval_95[0]:+.4f} to {difference.interval_95[1]:+.4f}"
    return text


def _score_text(score: "Score") -> str:
    interval = ""
    if score.interval_95:
        interval = f" (95 % interval {score.interval_95[0]:.4f} to {score.interval_95[1]:.4f})"
    return f"{score.objective} {score.value:.4f} on {counted(score.samples, 'sample')}{interval}"


def _facts(profile: "Profile") -> list[tuple[str, str]]:
    model, data, search = profile.model, profile.dataset, profile.search
    compression, results, environment = profile.compression, profile.results, profile.environment
    facts = [
        (
            "model",
            f"{model.id or 'not named'} ({model.architecture}, {model.num_hidden_layers} layers, "
            f"{model.num_attention_heads} query and {model.num_key_value_heads} KV heads)",
        ),
        (
            "data",
            f"{data.name} from {data.source}, {len(data.sampled_ids)} of {counted(data.rows, 'row')} and "
            f"{len(data.held_out_ids)} held out, seed {data.seed}; of those to tune on {data.prompts_cut} cut to the "
            f"model's context, {data.prompts_fitting} set aside, not longer than the size",
        ),
        (
            "compression",
            f"{compression.size} tokens per head, the prompt's {window_text(compression.window)} included",
        ),
        ("method", _method_text(compression.method, compression.overrides)),
        ("tuning", _score_text(results.tuning)),
        ("held out", "nothing" if results.held_out is None else _score_text(results.held_out)),
        (
            "search",
            f"{_space_text(search.space)}; {counted(search.trials, 'trial')} ({search.sampler}, seed {search.seed}), "
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
