"""Cost of a tune against samples, trials, prompt length and decoded tokens, one varied at a time.

    python -m benchmarks.tune_cost --file costs.jsonl [--plot costs.svg]

Each tune is a process of its own with an empty cache folder (`python -m benchmarks.tune --json`): its peak memory is
its own. Results go to the file as they come, and a second run goes on where the first one stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE = {"samples": 4, "trials": 20, "tokens": 2000, "decode-tokens": 64}
VARIED = {
    "samples": (2, 4, 8),
    "trials": (10, 20, 40),
    "tokens": (1000, 2000, 4000),
    "decode-tokens": (16, 64, 256),
}
NAMES = {
    "samples": "prompts",
    "trials": "trials of each search",
    "tokens": "prompt tokens",
    "decode-tokens": "decoded tokens",
}
PARTS = {"capture": "capture", "snapkv": "SnapKV's search", "clusterattn": "ClusterAttn's search"}


def main() -> None:
    parser = argparse.ArgumentParser(description="cost curves of a tune")
    parser.add_argument("--file", type=Path, required=True, help="results, JSON lines")
    parser.add_argument("--plot", type=Path, help="SVG or PNG")
    arguments = parser.parse_args()
    done = _read(arguments.file)
    with arguments.file.open("a") as file:
        for options in [{**BASE, name: value} for name, values in VARIED.items() for value in values]:
            if not any(record["options"] == options for record in done):
                done.append({"options": options, **_cost(options)})
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
    _print(done)
    if arguments.plot:
        _plot(done, arguments.plot)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _cost(options: dict[str, int]) -> dict[str, Any]:
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.tune", "--size", "256", "--json", *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    cost: dict[str, Any] = json.loads(output.splitlines()[-1])
    return cost


def _of(records: list[dict[str, Any]], varied: str) -> list[dict[str, Any]]:
    """Those in which everything else is as in the base, in order."""
    return [
        next(record for record in records if record["options"] == {**BASE, varied: value})
        for value in VARIED[varied]
    ]


def _print(records: list[dict[str, Any]]) -> None:
    print("| varied | | " + " | ".join(f"{part}, s" for part in PARTS.values()) + " | peak memory, GiB |")
    print("|---|---|---|---|---|---|")
    for varied, name in NAMES.items():
        for record in _of(records, varied):
            cells = [f"{record['seconds'][part]:.0f}" for part in PARTS]
            cells.append(f"{record['peak_bytes'] / 2**30:.2f}")
            print(f"| {name} | {record['options'][varied]:,} | {' | '.join(cells)} |")


def _plot(records: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(VARIED), sharex="col", sharey="row")
    for above, below, varied in zip(*panels, VARIED, strict=True):
        part = _of(records, varied)
        for name, label in PARTS.items():
            above.plot(VARIED[varied], [it["seconds"][name] for it in part], marker="o", label=label)
        below.plot(VARIED[varied], [it["peak_bytes"] / 2**30 for it in part], marker="o", color="C3")
        below.set_xlabel(NAMES[varied])
        for panel in (above, below):
            panel.set_xticks(VARIED[varied])
            panel.grid(alpha=0.3)
    for row in panels:
        # Of all panels of the row, and only now, as it ends the adapting to what is drawn.
        row[0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("seconds")
    panels[1][0].set_ylabel("peak memory, GiB")
    panels[0][0].legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
