"""The options of `nodeagent restore create --in-place`, and the question before anything is changed."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from client.cli.options import confirm, yes_option
from client.cli.output import OutputFormat, Printer
from client.restores.in_place import InPlaceRestore
from client.text import format_bytes
from core.errors import ConfigError
from core.models.in_place import InPlace

__all__ = ["InPlaceWish", "confirm_in_place", "in_place_options", "parse_in_place"]

_HEADERS: Final = ("PVC", "PV", "BACKUP", "SNAPSHOT BEFORE")

_DEPENDENT: Final = ("incremental", "delete_extra_files", "no_snapshot")
_EXCLUDED: Final = ("namespace_mappings", "storage_class_mappings", "size", "storage_class")


@dataclass(frozen=True)
class InPlaceWish:
    """What the user asked for: `snapshots` of the volumes before, and to `ask` before anything is changed."""

    how: InPlace
    snapshots: bool
    ask: bool


def in_place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with the options."""
    options = (
        click.option("--in-place", is_flag=True, help="into the volumes that the PVCs have, while no pod uses them"),
        click.option("--incremental", is_flag=True, help="with --in-place: do not write files that are equal"),
        click.option("--delete-extra-files", is_flag=True, help="with --in-place: files that the backup does not have"),
        click.option("--no-snapshot", is_flag=True, help="with --in-place: without a VolumeSnapshot for the way back"),
        yes_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def parse_in_place(given: dict[str, Any], form: OutputFormat) -> InPlaceWish | None:
    """Return what the options ask for; None: new PVCs.

    Raises:
        ConfigError: they do not go together.
    """
    if not given["in_place"]:
        for name in _DEPENDENT:
            if given[name]:
                raise ConfigError(f"{_flag(name)} goes with --in-place")
        return None
    for name in _EXCLUDED:
        if given[name]:
            raise ConfigError(f"--in-place excludes {_flag(name)}: the PVCs exist")
    if given["method"] != "data-download":
        raise ConfigError("--in-place excludes --method")
    ask = not given["yes"]
    if ask and (form.for_programs or not sys.stdin.isatty()):
        raise ConfigError("--in-place asks a question, and there is no terminal or -o is set: --yes skips it")
    how = InPlace(incremental=given["incremental"], delete_extra_files=given["delete_extra_files"])
    return InPlaceWish(how, snapshots=not given["no_snapshot"], ask=ask)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def confirm_in_place(
    printer: Printer, wish: InPlaceWish, plans: Sequence[InPlaceRestore], *, form: OutputFormat
) -> bool:
    """Show which volumes are written to, and return whether the user wants that."""
    if not form.for_programs:
        rows = [
            [
                str(plan.one.target),
                plan.one.existing,
                format_bytes(plan.one.volume.size_bytes) if plan.one.volume.size_bytes else "",
                plan.snapshot_name,
            ]
            for plan in plans
        ]
        printer.table(_HEADERS, rows)
        printer.note(_describe(wish))
    if not wish.ask:
        return True
    return confirm(f"Restore into {len(plans)} existing volume{'s' if len(plans) > 1 else ''}?", "nothing was restored")


def _describe(wish: InPlaceWish) -> str:
    written = "files that differ" if wish.how.incremental else "all files of the backup"
    extra = "deleted" if wish.how.delete_extra_files else "kept"
    return f"{written} are written, and files that it does not have are {extra}"
