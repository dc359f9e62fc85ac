"""`clusterprof profiles`: list, show and validate profiles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._shell import FAILED, print_json
from clusterprof.errors import DataError, ProfileError

if TYPE_CHECKING:
    from clusterprof.profile import Profile

profiles = typer.Typer(no_args_is_help=True, help="List, show and validate profiles.")


@profiles.command("ls")
def list_profiles(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where to look, folders inside it included.", show_default="profiles"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the profiles in a folder."""
    from clusterprof.profile import Profile
    from clusterprof.report.console import message_console, result_console, say
    from clusterprof.report.profiles import profile_lines

    where = folder or Path("profiles")
    if not where.is_dir():
        if where.exists():
            raise DataError(f"{where} is not a folder; see `clusterprof profiles show` for a single profile.")
        if folder is not None:
            raise DataError(f"There is no folder {where}; check the path.")
    found: dict[Path, Profile] = {}
    for path in sorted(where.rglob("*.json")):
        try:
            found[path] = Profile.load(path)
        except ProfileError as error:
            say(message_console(), f"left out: {error}", style="yellow")
    # Sizes as numbers, not as names of files.
    found = dict(
        sorted(found.items(), key=lambda it: (it[0].parent, it[1].dataset.name, it[1].compression.size))
    )
    if as_json:
        print_json([_entry(path, profile) for path, profile in found.items()])
    elif found:
        for path, profile in found.items():
            for line in profile_lines(path, profile):
                say(result_console(), line)
    else:
        say(
            message_console(),
            f"There are no profiles in {where}; make one with `clusterprof tune`.",
        )


def _entry(path: Path, profile: "Profile") -> dict[str, Any]:
    return {
        "profile": str(path),
        "model": profile.model.id,
        "dataset": profile.dataset.name,
        "size": profile.compression.size,
        "window": profile.compression.window,
        "method": profile.compression.method.model_dump(),
        "overrides": [override.model_dump() for override in profile.compression.overrides],
        "objective": profile.results.judged.objective,
        "value": profile.results.judged.value,
        "judged_on": "held out" if profile.results.held_out else "tuning",
    }


@profiles.command("show")
def show_profile(
    profile: Annotated[Path, typer.Argument(help="The profile's file.")], as_json: opt.Json = False
) -> None:
    """Show what a profile holds."""
    from clusterprof.profile import Profile
    from clusterprof.report.console import result_console
    from clusterprof.report.profiles import profile_summary

    loaded = Profile.load(profile)
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        result_console().print(profile_summary(loaded))


@profiles.command("validate")
def validate_profiles(
    paths: Annotated[list[Path], typer.Argument(metavar="PROFILE...", help="The profiles' files.")],
) -> None:
    """Check profiles, a line each; exit code 1 if one is not valid."""
    from clusterprof.profile import Profile
    from clusterprof.text import one_line

    invalid = 0
    for path in paths:
        try:
            Profile.load(path)
        except ProfileError as error:
            invalid += 1
            typer.echo(f"invalid: {error}")
        else:
            typer.echo(f"valid: {one_line(str(path))}")
    if invalid:
        raise typer.Exit(FAILED)
