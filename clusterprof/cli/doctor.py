"""`clusterprof doctor`: what this machine can do."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterprof.cli import _options as opt
from clusterprof.cli._shell import print_json

if TYPE_CHECKING:
    from clusterprof.cli._inventory import Inventory


def doctor(as_json: opt.Json = False) -> None:
    """Show what this machine can do: versions, devices, flash-attention, cache, built-in model."""
    from clusterprof.cli._inventory import take_inventory

    inventory = take_inventory()
    if as_json:
        print_json(asdict(inventory))
        return
    from rich.table import Table

    from clusterprof.report.console import result_console

    table = Table.grid(padding=(0, 2))
    for name, text in _facts(inventory):
        table.add_row(name, text)
    result_console().print(table)


def _facts(found: "Inventory") -> list[tuple[str, str]]:
    from clusterprof.report.numbers import size_text

    if found.cache is None:
        cache = "none: there is no home folder, so set CLUSTERPROF_CACHE to a folder"
    else:
        state = (
            size_text(found.cache_bytes)
            if found.cache_writable
            else "cannot be written; set CLUSTERPROF_CACHE"
        )
        cache = f"{found.cache} ({state})"
    return [
        ("clusterprof", f"{found.clusterprof}, Python {found.python}, {found.system}"),
        *((name, number or "not installed") for name, number in found.packages.items()),
        ("processor", f"{found.cpu_cores} cores"),
        ("accelerators", "; ".join(found.devices) or "none"),
        ("auto means", f"{found.dtype} on {found.device}, {found.attention} attention"),
        ("flash_attention_2", found.flash_attention),
        ("default model", found.default_model),
        (
            "built-in model",
            "ready" if found.builtin_model else "not here yet; fetch it with `clusterprof models pull`",
        ),
        ("cache folder", cache),
    ]
