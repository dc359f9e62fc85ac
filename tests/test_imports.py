import subprocess
import sys

import pytest

import clusterprof

COMMAND_LINE_ONLY = {"typer", "optuna", "datasets", "pyarrow", "matplotlib", "rich"}
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "sklearn"}


def loaded_by(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after the statement."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(finished.stdout.split())
    assert "clusterprof" in names
    return names


def test_package_shows_what_it_has_without_loading_it() -> None:
    assert dir(clusterprof) == ["Profile", "__version__", "compress"]


def test_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import clusterprof") & (COMMAND_LINE_ONLY | HEAVY | {"pydantic"})


@pytest.mark.parametrize("module", ["profile", "methods", "models", "data"])
def test_what_the_command_line_starts_with_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(f"import clusterprof.{module}") & (COMMAND_LINE_ONLY | HEAVY)


def test_runtime_loads_nothing_of_the_tuning_side() -> None:
    names = loaded_by("import clusterprof.runtime\nfrom clusterprof import Profile, compress")
    assert "torch" in names
    assert not names & COMMAND_LINE_ONLY


@pytest.mark.parametrize(
    "statement",
    [
        "import clusterprof.report.plots, clusterprof.benchmarking.settings",
        "from clusterprof.cli import main\nfrom contextlib import redirect_stdout, suppress\n"
        "with suppress(SystemExit), redirect_stdout(sys.stderr): main(['bench', '--help'])",
        "from clusterprof.cli import main\nfrom contextlib import redirect_stdout, suppress\n"
        "with suppress(SystemExit), redirect_stdout(sys.stderr): main(['--help'])",
    ],
)
def test_plotting_is_loaded_only_to_plot(statement: str) -> None:
    assert not loaded_by(statement) & ({"matplotlib"} | HEAVY)
