"""kvpress's own environment: it needs an older transformers than clusterprof."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import benchmarks
from clusterprof.errors import ClusterprofError

_CONSTRAINTS = Path(__file__).with_name("constraints.txt")
_PINS = dict(
    line.split("==") for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line
)
KVPRESS, TRANSFORMERS = _PINS["kvpress"], _PINS["transformers"]
_MARKER = "built-with.txt"
_ROOT = Path(benchmarks.__file__).parent.parent


def build(folder: Path) -> Path:
    """Return the Python of the environment in `folder`, which is built there first unless it is whole.

    Raises
    ------
    ClusterprofError
        If the folder holds something else, or the packages cannot be installed.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker, constraints = folder / _MARKER, _CONSTRAINTS.read_text(encoding="utf-8")
    if marker.is_file() and marker.read_text(encoding="utf-8") == constraints:
        return python
    if folder.exists() and any(folder.iterdir()):
        if not marker.is_file():
            raise ClusterprofError(
                f"{folder} holds something else; name an empty or a new folder with --environment."
            )
        shutil.rmtree(folder)
    print(f"Building kvpress's environment in {folder}, once (about 80 s, 1.4 GB).", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    # Before anything else, so that what a killed build leaves behind is known as ours.
    marker.touch()
    _run([sys.executable, "-m", "venv", str(folder)])
    install = ["install", "--quiet", "--disable-pip-version-check", "-c", str(_CONSTRAINTS)]
    _run([str(python), "-m", "pip", *install, f"kvpress=={KVPRESS}"])
    marker.write_text(constraints, encoding="utf-8")
    return python


def run_worker(python: Path, task: Path, runs: Path) -> None:
    """Let kvpress's side do `task` and write what it measured to `runs`."""
    _run([str(python), "-m", "benchmarks.kvpress.worker", str(task), str(runs)])


def _run(command: list[str]) -> None:
    # Packages of this environment must not reach into that one, and the model is in a local folder.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, check=False)
    if done.returncode != 0:
        raise ClusterprofError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}; its output is above."
        )
