import subprocess
import sys

import pytest

import clusterprof
from tests.cli.conftest import Run

COMMANDS = (
    *("tune", "apply", "bench", "eval", "compare", "report"),
    *("profiles", "datasets", "models", "captures", "doctor"),
)


def test_help_names_every_command(run: Run) -> None:
    finished = run("--help")
    assert finished.code == 0
    assert all(command in finished.out for command in COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version").out == f"clusterprof {clusterprof.__version__}\n"


@pytest.mark.parametrize("args", [["--version"], ["datasets", "ls", "--json"], ["no-such-command"]])
def test_as_a_module_it_does_the_same(run: Run, args: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "clusterprof", *args], capture_output=True, text=True)
    expected = run(*args)
    assert (done.returncode, done.stdout) == (expected.code, expected.out)


@pytest.mark.parametrize("args", [["tune"], ["no-such-command"], ["doctor", "--no-such-option"], []])
def test_wrong_usage_is_exit_code_2(run: Run, args: list[str]) -> None:
    assert run(*args).code == 2


def test_start_up_loads_nothing_heavy() -> None:
    code = "import clusterprof.cli, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "optuna", "datasets", "pyarrow", "pydantic", "numpy", "tokenizers"}
    assert not set(done.stdout.split()) & heavy


def test_an_error_is_one_line_and_exit_code_1(run: Run) -> None:
    finished = run("profiles", "show", "no\x1b[2Jwhere.json")
    assert finished.code == 1
    assert finished.out == ""
    assert finished.err.startswith("error: ")
    assert finished.err.count("\n") == 1
    assert "\x1b" not in finished.err


@pytest.mark.parametrize("where", ["option", "environment"])
def test_a_traceback_only_with_debug(run: Run, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "environment":
        monkeypatch.setenv("CLUSTERPROF_DEBUG", "1")
    finished = run(*["--debug"] * (where == "option"), "profiles", "show", "nowhere.json")
    assert finished.code == 1
    assert "Traceback" in finished.err
    assert finished.err.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_one_line_with_a_hint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("clusterprof.data.list_datasets", broken)
    finished = run("datasets", "ls")
    assert finished.code == 1
    assert finished.err.count("\n") == 1
    assert "RuntimeError: first line" in finished.err
    assert "--debug" in finished.err


def test_ctrl_c_outside_of_a_run_is_an_error_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    # As if it came while a command imports what it needs.
    monkeypatch.setattr("clusterprof.data.list_datasets", interrupted)
    finished = run("datasets", "ls")
    assert (finished.code, finished.out, finished.err) == (1, "", "error: Interrupted.\n")


def test_what_the_system_refuses_is_a_sentence(run: Run) -> None:
    finished = run("profiles", "ls", "x" * 300)
    assert (finished.code, finished.out) == (1, "")
    assert finished.err == f"error: Cannot use {'x' * 300}: File name too long.\n"


@pytest.mark.parametrize("command", ["datasets ls", "datasets ls --json", "--help"])
def test_a_full_disk_behind_stdout_is_a_sentence(command: str) -> None:
    program = f"{sys.executable} -c 'from clusterprof.cli import main; main()'"
    done = subprocess.run(["sh", "-c", f"{program} {command} >/dev/full"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: Reading or writing failed: No space left on device.\n"


def test_a_validation_error_never_shows_raw(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterprof.methods import SnapKV

    monkeypatch.setattr("clusterprof.data.list_datasets", lambda: SnapKV(kernel_size=4))
    finished = run("datasets", "ls")
    assert finished.code == 1
    assert "kernel_size must be odd" in finished.err
    assert "pydantic" not in finished.err


@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_reader_that_leaves_is_no_error(flag: str) -> None:
    program = f"{sys.executable} -c 'from clusterprof.cli import main; main()'"
    done = subprocess.run(
        ["sh", "-c", f"{program} datasets ls {flag} | true"], capture_output=True, text=True
    )
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr
