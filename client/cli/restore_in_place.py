"""The options of `nodeagent restore create --in-place`, the plan, and the question before anything is changed."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from client.cli.collection_commands import Creation
from client.cli.options import add_options, confirm, dry_run_option, yes_option
from client.cli.output import WARN, Cell, OutputFormat, Printer, Styled
from client.collections.models import Restore, RestoreTransfer
from client.restores.in_place import plan_in_place, start_in_place
from client.restores.in_place_preview import InPlaceReport, VolumeReport, prepare_in_place
from client.restores.manifests import RequestedRestore
from client.restores.sources import SavedVolume
from client.session import Session
from client.text import format_bytes
from core.errors import ConfigError
from core.models.transfer_settings import InPlace, PlannedEntries

_HEADERS: Final = ("PVC", "PV", "BACKUP", "SNAPSHOT BEFORE")
_PLAN_HEADERS: Final = ("PVC", "PLAN", "FILES", "SIZE", "DIRECTORIES", "FIRST NAMES")

_SHOWN_NAMES: Final = 3
"""A document has ten."""

_DEPENDENT: Final = ("incremental", "delete_extra_files", "no_snapshot", "dry_run")
_EXCLUDED: Final = ("namespace_mappings", "storage_class_mappings", "size", "storage_class")


@dataclass(frozen=True)
class InPlaceWish:
    """What the user asked for: `snapshots` of the volumes before, and to `ask` before anything is changed.

    With `dry_run`, it ends with the plan.
    """

    how: InPlace
    snapshots: bool
    ask: bool
    dry_run: bool


in_place_options: Final = add_options(
    click.option("--in-place", is_flag=True, help="into the volumes that the PVCs have, while no pod uses them"),
    click.option("--incremental", is_flag=True, help="with --in-place: do not write files that are equal"),
    click.option("--delete-extra-files", is_flag=True, help="with --in-place: files that the backup does not have"),
    click.option("--no-snapshot", is_flag=True, help="with --in-place: without a VolumeSnapshot for the way back"),
    dry_run_option,
    yes_option,
)


def parse_in_place(given: dict[str, Any], form: OutputFormat) -> InPlaceWish | None:
    """Return what the options ask for; None: new PVCs; ConfigError: they do not go together."""
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
    dry_run = given["dry_run"]
    ask = not (given["yes"] or dry_run)
    if ask and (form.for_programs or not sys.stdin.isatty()):
        raise ConfigError("--in-place asks a question, and there is no terminal or -o is set: --yes skips it")
    how = InPlace(incremental=given["incremental"], delete_extra_files=given["delete_extra_files"])
    return InPlaceWish(how, snapshots=not given["no_snapshot"], ask=ask, dry_run=dry_run)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


async def confirm_and_start(
    creation: Creation[RestoreTransfer, Restore],
    wish: InPlaceWish,
    *,
    tools: Session,
    request: RequestedRestore,
    volumes: Sequence[SavedVolume],
    again: str,
) -> bool | None:
    """Show what is written and deleted, ask, and start; return whether something was created, None: nothing is wanted.

    `again` is the command that continues it.

    Raises:
        RestoreError: a volume cannot be restored into; the message says in what state it is.
    """
    printer = creation.printer
    with ExitStack() as progress:
        show = progress.enter_context(printer.progress(f"checking the volumes of {request.name}"))
        plans = await plan_in_place(tools, request, volumes, snapshots=wish.snapshots)

        def decide(reports: Sequence[VolumeReport]) -> bool:
            progress.close()
            return _confirm(creation, wish, reports)

        if (plans or wish.dry_run) and not await prepare_in_place(replace(tools, on_progress=show), plans, decide):
            return None
    if plans:
        printer.note(f"restore {request.name}; if it is interrupted: {again}")
    creation.started = True
    return await start_in_place(tools, plans)


def _confirm(creation: Creation[RestoreTransfer, Restore], wish: InPlaceWish, reports: Sequence[VolumeReport]) -> bool:
    printer, form = creation.printer, creation.form
    if form.for_programs and wish.dry_run:
        printer.document(InPlaceReport(restore=creation.name, volumes=list(reports)).to_wire(), form)
    elif not form.for_programs:
        _print_reports(printer, wish, reports)
    for one in reports:
        if one.plan and one.plan.blocked:
            text = "files cannot replace what is in their place, so the restore will be Failed"
            hint = "" if wish.how.delete_extra_files else ": --delete-extra-files deletes directories in the way"
            printer.note(f"PVC {one.namespace}/{one.claim}: {one.plan.blocked.files} {text}{hint}")
    if wish.dry_run:
        return False
    if not wish.ask:
        return True
    return confirm(
        f"Restore into {len(reports)} existing volume{'s' if len(reports) > 1 else ''}?", "nothing was restored"
    )


def _print_reports(printer: Printer, wish: InPlaceWish, reports: Sequence[VolumeReport]) -> None:
    rows = [
        [
            f"{one.namespace}/{one.claim}",
            one.volume,
            format_bytes(one.total_bytes) if one.total_bytes else "",
            one.snapshot or "",
        ]
        for one in reports
    ]
    printer.table(_HEADERS, rows)
    if planned := [row for one in reports for row in _plan_rows(one, wish)]:
        printer.line()
        printer.table(_PLAN_HEADERS, planned)
    written = "files that differ" if wish.how.incremental else "all files of the backup"
    extra = "deleted" if wish.how.delete_extra_files else "kept"
    printer.note(f"{written} are written, and files that it does not have are {extra}")


def _plan_rows(one: VolumeReport, wish: InPlaceWish) -> list[list[Cell]]:
    name, found = f"{one.namespace}/{one.claim}", one.plan
    if one.device:
        return [[name, "write the whole device", "", format_bytes(one.total_bytes), "", ""]]
    if found is None:
        return []
    steps: list[tuple[Cell, PlannedEntries, bool]] = [
        ("write", found.to_write, True),
        ("set owner, mode or time", found.to_set, False),
        ("leave as they are", found.equal, False),
        (Styled("delete", WARN), found.to_delete, wish.how.delete_extra_files),
        ("keep, not in the backup", found.kept, False),
        (Styled("cannot be replaced", WARN), found.blocked, False),
    ]
    return [
        [
            name,
            step,
            str(entries.files),
            format_bytes(entries.bytes),
            str(entries.directories),
            ", ".join(entries.names[:_SHOWN_NAMES]) + (", …" if len(entries.names) > _SHOWN_NAMES else ""),
        ]
        for step, entries, always in steps
        if entries or always
    ]
