"""Files named on the command line: those to be written later, and prompts to be read now."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from clusterprof.errors import ClusterprofError, DataError, ProfileError


def check_writable(path: Path, what: str = "profile") -> None:
    """Make sure that a file can be written at ``path`` once there is something to write, creating nothing.

    Parameters
    ----------
    what : str
        What it is, for messages.

    Raises
    ------
    ClusterprofError
        If the path is a folder or a device, or its folder cannot be made or written.
    """
    problem = _why_unwritable(path)
    if problem is not None:
        error = ProfileError if what == "profile" else ClusterprofError
        raise error(f"cannot write the {what} {path}: {problem} with --output")


def _why_unwritable(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder; name a file in it"
    if path.exists() and not path.is_file():
        return "it is not a regular file; name one"
    return _why_unfillable(path.absolute().parent)


def _why_unfillable(folder: Path) -> str | None:
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder; name another"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}; name another"
    return None


def folder_to_fill(path: Path | None) -> Path | None:
    """Refuse before the work a folder that no file can be written into after it, as wrong usage."""
    problem = None if path is None else _why_unfillable(path.absolute())
    if problem is not None:
        raise typer.BadParameter(f"cannot write into {path}: {problem}.")
    return path


def plot_file(path: Path | None) -> Path | None:
    """Refuse before the work the name of a plot that cannot be written after it, as wrong usage."""
    if path is None:
        return None
    # Those of clusterprof.report.plots.
    if path.suffix.lower() not in (".svg", ".png"):
        raise typer.BadParameter(f"{path} must end with .svg or .png.")
    problem = _why_unwritable(path)
    if problem is None and path.exists() and not os.access(path, os.W_OK):
        problem = "no permission to write it; name another"
    if problem is not None:
        raise typer.BadParameter(f"{path} cannot be written: {problem}.")
    return path


def read_prompt(text: str | None, file: Path | None, dash: str | None) -> str:
    """Return the prompt from whichever one of three places was named.

    Parameters
    ----------
    text : str, optional
        The prompt itself.
    file : Path, optional
        A UTF-8 text file, or "-" for standard input.
    dash : str, optional
        "-" for standard input.

    Raises
    ------
    BadParameter
        If not exactly one is named, or the prompt is empty.
    DataError
        If it cannot be read, or is not UTF-8 text.
    """
    if sum(source is not None for source in (text, file, dash)) != 1:
        raise typer.BadParameter("give exactly one of --prompt TEXT, --prompt-file FILE or -")
    if dash not in (None, "-"):
        raise typer.BadParameter(f"the only argument can be - for standard input, not {dash!r}; see --prompt")
    if text is not None:
        check_encoding(text, "The text of --prompt is not UTF-8; put it into a file and use --prompt-file.")
    prompt = _read(file) if text is None else text
    if not prompt.strip():
        raise typer.BadParameter("the prompt is empty")
    return prompt


def _read(file: Path | None) -> str:
    if file is None or str(file) == "-":
        return _decoded(sys.stdin.buffer.read, "standard input", "prompt")
    return read_text(file, "prompt")


def read_text(file: Path, what: str) -> str:
    """Return the text of a UTF-8 file; ``what`` it is, for messages.

    Raises
    ------
    DataError
        If it cannot be read, or is not UTF-8 text.
    """
    return _decoded(file.read_bytes, str(file), what)


def _decoded(read: Callable[[], bytes], name: str, what: str) -> str:
    try:
        data = read()
    except OSError as error:
        raise DataError(
            f"The {what} cannot be read from {name}: {error.strerror}; check the path."
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"The {what} in {name} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error


def check_encoding(text: str, complaint: str) -> None:
    """Raise a DataError with this complaint if a text from the command line is not UTF-8."""
    # What a shell hands over in another encoding arrives as lone surrogates.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(complaint) from error
