"""What goes to a measuring process and what comes back, as JSON; needs the standard library only."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

PLAIN, SNAPKV = "full cache", "SnapKV"


@dataclass(frozen=True)
class Task:
    """The same for both sides.

    Attributes
    ----------
    model : str
        Folder of the model.
    prompts : list of list of int
        Token ids, each prompt longer than ``size``.
    size : int
        Prompt tokens kept per KV head, the window included.
    window, kernel_size : int
        Of SnapKV: queries that observe, and tokens averaged around each position.
    decode_tokens : int
        Decode steps after the prefill.
    threads : int
        CPU threads of torch.
    """

    model: str
    prompts: list[list[int]]
    size: int
    window: int
    kernel_size: int
    decode_tokens: int
    threads: int

    def compression_ratio(self, length: int) -> float:
        """What makes kvpress keep exactly ``size`` of ``length`` tokens.

        kvpress keeps ``int(length * (1 - ratio))``: half a token more than ``size`` keeps rounding off it.
        """
        return 1 - (self.size + 0.5) / length


@dataclass(frozen=True)
class Run:
    """One prompt, prefilled and decoded once.

    Attributes
    ----------
    prefill_s, decode_s : float
        Seconds of the prefill, and of all decode steps together.
    tokens : list of int
        Greedy continuation: one token of the prefill, then one of each step.
    kept : list of list of list of int
        Sorted positions by layer and KV head; empty for the full cache.
    """

    prefill_s: float
    decode_s: float
    tokens: list[int]
    kept: list[list[list[int]]]


# By name of what compressed, PLAIN among them.
PromptRuns = dict[str, Run]


def write_task(path: Path, task: Task) -> None:
    path.write_text(json.dumps(asdict(task)), encoding="utf-8")


def read_task(path: Path) -> Task:
    return Task(**json.loads(path.read_text(encoding="utf-8")))


def write_runs(path: Path, runs: list[PromptRuns]) -> None:
    text = json.dumps([{name: asdict(run) for name, run in prompt.items()} for prompt in runs])
    path.write_text(text, encoding="utf-8")


def read_runs(path: Path) -> list[PromptRuns]:
    prompts = json.loads(path.read_text(encoding="utf-8"))
    return [{name: Run(**run) for name, run in prompt.items()} for prompt in prompts]
