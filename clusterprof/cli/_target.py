"""The target of a tune: its options, and what may be written in them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.errors import ClusterprofError

if TYPE_CHECKING:
    from clusterprof.profiling.target import Target

_PANEL = "Target"


def _target(text: str) -> "Target":
    from clusterprof.profiling.target import Target

    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not an objective and a number; write it as agreement=0.95."
        ) from None
    try:
        return Target(name.strip(), number)  # type: ignore[arg-type]
    except ClusterprofError as error:
        raise typer.BadParameter(str(error)) from None


def _share(value: float | None) -> float | None:
    from clusterprof.profiling.target import SHARES

    least, most = SHARES
    # Written this way round, NaN is out of range too.
    if value is not None and not least <= value <= most:
        raise typer.BadParameter(f"{value} is not in the range {least}<=x<={most}.")
    return value


@dataclass(frozen=True)
class TargetOptions:
    """What quality is asked for, and of how many prompts."""

    targets: Annotated[
        # Of a single option the last of two would hold, and --size asks to be given several times.
        list[Any] | None,  # of Target, and typer knows no such type
        typer.Option(
            "--target",
            parser=_target,
            metavar="NAME=VALUE",
            help="Look for the smallest size that held-out prompts show to be good enough: any --objective and its "
            "least value (log_kl, kl and loss: largest), such as agreement=0.95 or kl=0.05. Sizes are tuned from the "
            "largest down to the first that fails; exit code 3 if none is good enough.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    target_share: Annotated[
        float | None,
        typer.Option(
            callback=_share,
            metavar="SHARE",
            help="How many of all prompts have to meet the target, at 95 % confidence.",
            show_default="0.8",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def chosen(self) -> "Target | None":
        """Return the target with its share, if there is one."""
        targets: list[Target] = self.targets or []
        if len(targets) > 1:
            raise typer.BadParameter("only one can be given.", param_hint="--target")
        target = targets[0] if targets else None
        if self.target_share is None:
            return target
        if target is None:
            raise typer.BadParameter(
                "there is no --target that it could belong to.", param_hint="--target-share"
            )
        return replace(target, share=self.target_share)
