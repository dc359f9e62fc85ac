"""Numbers and lists as people read them: sizes, durations, counts, windows, hyperparameters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from clusterprof.profile import LayerOverride, Window

# What to do where few prompts are held out.
HOLD_OUT_MORE = "give more data, or raise --holdout, which tuning on fewer (--samples) leaves more rows for."


def size_text(size: float) -> str:
    """Return a number of bytes with a decimal unit, such as "41.8 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration as "12 s", "3:05" or "1:02:03"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(count: int, noun: str) -> str:
    """Return "1 prompt" or "3 prompts"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def window_text(window: "Window") -> str:
    """Return which part of a prompt is the observation window: "last 32 tokens" or "question"."""
    return "question" if window == "query" else f"last {window} tokens"


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """Return a method's hyperparameters, its name left out, such as "num_block 8, theta 0.002"."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in parameters.items()
        if name != "name"
    )


def overrides_text(overrides: "Sequence[LayerOverride]", method: "BaseModel") -> list[str]:
    """Return what a method has otherwise in some layers, such as "layers 0 to 7: theta 0.01"."""
    # A hand-written one may change nothing.
    return [
        f"{override.where}: {parameters_text(override.changes(method)) or 'the same'}"
        for override in overrides
    ]
