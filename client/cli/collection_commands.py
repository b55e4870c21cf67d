"""What commands about backups and about restores do alike: complete names, get, describe, cancel, create and wait."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import click

from client.cli.collection_pages import live_rows, print_group, print_groups, print_volumes
from client.cli.options import command_for, complete_names
from client.cli.output import OutputFormat, Printer
from client.collections.collection import Backups, Collection, Found, Restores
from client.collections.models import Backup, BackupTransfer, Restore, RestoreTransfer, Volume
from client.text import format_bytes
from core.clock import SystemClock
from core.models.base import format_time
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = [
    "Creation",
    "complete_backups",
    "complete_restores",
    "get_groups",
    "print_canceled",
    "show_group",
]

_Transfer = TypeVar("_Transfer", BackupTransfer, RestoreTransfer)
_Group = TypeVar("_Group", bound=Backup | Restore)


def _completion(
    kind: type[Collection[_Transfer, _Group]],
) -> Callable[[click.Context, click.Parameter, str], Sequence[str]]:
    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> Sequence[str]:
        """Return the names for the shell; none, if the cluster does not answer."""

        async def read(cluster: Connection) -> list[str]:
            return [one.name for one in (await kind(cluster.client, cluster.namespace).list_all()).groups]

        return complete_names(context, incomplete, read)

    return complete


complete_backups: Final = _completion(Backups)
complete_restores: Final = _completion(Restores)


async def get_groups(
    kind: type[Collection[_Transfer, _Group]],
    names: Sequence[str],
    *,
    form: OutputFormat,
    access: ClusterAccess,
    volume_namespace: str = "",
) -> None:
    """Print a row for each group of these names, or for all; with `volume_namespace`, only those with volumes of it."""
    printer = Printer()
    async with connect(access) as cluster:
        collection = kind(cluster.client, cluster.namespace)
        found = await collection.find(names)
    groups = [
        one
        for one in found.groups
        if not volume_namespace or any(volume.namespace == volume_namespace for volume in one.volumes)
    ]

    def print_page() -> None:
        if groups:
            print_groups(printer, groups, SystemClock().now(), wide=form is OutputFormat.WIDE)
        else:
            printer.note(f"there is no {kind.word} in namespace {access.namespace}")

    printer.answer(collection.document(Found(groups, found.notes)), form, print_page, found.notes)


async def show_group(
    kind: type[Collection[_Transfer, _Group]], name: str, *, form: OutputFormat, access: ClusterAccess
) -> None:
    """Print everything about one group."""
    printer = Printer()
    async with connect(access) as cluster:
        one, notes = await kind(cluster.client, cluster.namespace).find_one(name)
    printer.answer(one, form, lambda: print_group(printer, one, SystemClock().now()), notes)


def print_canceled(
    printer: Printer, word: str, name: str, *, canceled: Sequence[Volume], access: ClusterAccess
) -> None:
    """Print the volumes whose transfers have got a cancel request."""
    if not canceled:
        printer.note(f"{word} {name} has ended already: nothing to cancel")
        return
    print_volumes(printer, canceled)
    command = command_for(access, f"nodeagent {word} describe {name}")
    printer.note(f"cancel requested: {command} shows how it ends")


@dataclass
class Creation(Generic[_Transfer, _Group]):
    """One run of a command that creates a group; `started` is set once something of it exists.

    With `waiting_pods`, each volume has a pod that waits for its data.
    """

    kind: type[Collection[_Transfer, _Group]]
    name: str
    form: OutputFormat
    access: ClusterAccess
    printer: Printer
    wait: bool
    waiting_pods: bool = False
    started: bool = False

    def run(self, create: Coroutine[Any, Any, None]) -> None:
        """Run the command; an interruption ends no transfer, and a note says so."""
        try:
            asyncio.run(create)
        except KeyboardInterrupt:
            if self.started:
                pods = " and deletes its pods, also once it has ended" if self.waiting_pods else ""
                shown, ended = self._command("describe"), self._command("cancel")
                self.printer.note(f"the {self.kind.word} goes on: {shown} shows it, {ended} ends it{pods}")
            raise

    async def follow(self, cluster: Connection) -> _Group:
        """Return the group, if the user asked to wait once all its transfers have ended."""
        collection = self.kind(cluster.client, cluster.namespace)
        if not self.wait:
            return await collection.get_own(self.name)
        with self.printer.live() as show:
            return await collection.wait(self.name, SystemClock(), lambda volumes: show(live_rows(volumes)))

    def print(self, group: _Group, *, created: bool) -> None:
        """Print the group; without `created`, all of it existed before."""
        printer, word = self.printer, self.kind.word
        if not created:
            since = f" since {format_time(group.created)}" if group.created else ""
            printer.note(f"{word} {self.name} exists{since}: nothing was created")
        if self.form.for_programs:
            printer.document(group.to_wire(), self.form)
        elif self.wait:
            size = format_bytes(group.total_bytes)
            printer.line(f"{word} {self.name} is {group.phase}: {group.counted} volumes, {size}")
        else:
            print_volumes(printer, group.volumes)
            pods = f", {self._command('cancel')} deletes its pods once it has ended" if self.waiting_pods else ""
            start = f"the {word} was started: " if created else ""
            printer.note(f"{start}{self._command('describe')} shows it{pods}")

    def _command(self, verb: str) -> str:
        return command_for(self.access, f"nodeagent {self.kind.word} {verb} {self.name}")
