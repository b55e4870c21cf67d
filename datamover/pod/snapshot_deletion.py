"""The deletion of snapshots of deleted backups, in a pod: those whose tags say that they are of the cluster's backup.

Whatever a custom resource says, only what was made for the named transfers goes, by the cluster's own data movers, and
only if nothing in the cluster refers to it. Every step may be repeated. A dry run also reads the root directories of
the copies that justify the deletion.
Source: kopia 0.23.1, cli/command_snapshot_delete.go; Velero v1.18, pkg/persistence/object_store_layout.go.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

from core.errors import AgentError, ConfigError, KopiaError, RepositoryError, StorageOutageError
from core.models.base import format_time
from core.models.job_output import JobOutput
from core.models.names import BACKUP_TAG, CLUSTER_TAG, OBJECT_NAME
from core.models.storage import BackupStorageLocation
from core.mover_specs import DeleteSnapshots
from core.snapshot_contract import (
    CHECKED_LINE,
    DELETED_LINE,
    CheckedCopy,
    CopyToCheck,
    DeletedSnapshot,
    SnapshotDeletion,
    UnreadRepository,
)
from datamover.kopia.location_files import BackupFiles, open_output, read_directories
from datamover.kopia.references import ListedSnapshot
from datamover.kopia.repository import NotInitializedError, Repository
from datamover.kopia.snapshots import delete_snapshots
from datamover.pod.cluster import PodContext, ask_directory, open_access, resolve_storage
from datamover.pod.reporting import Termination, build_success
from datamover.pod.snapshot_report import SHOWN_UNREAD, build_unread, list_stored, read_named_snapshots
from datamover.storage.providers import FileStorage

_logger = logging.getLogger(__name__)

_BACKUPS: Final = "backups"
"""The folder of Velero's files about backups."""

_AT_ONCE: Final = 200
"""Snapshots of one call: kopia starts once, and its command line stays short."""

_ROUNDS: Final = 3
"""kopia ends a call at the first snapshot that is gone already, by another command."""


async def delete_transfers(spec: DeleteSnapshots, context: PodContext) -> Termination:
    """Write a line for each snapshot of these transfers, delete it unless it is a dry run; return the SnapshotDeletion.

    Each copy to check has a line too, unless its repository could not be read.

    Raises:
        RepositoryError: the location is read-only, or holds Velero's backups, or no repository could be read.
        StorageOutageError: the storage does not answer.
    """
    location = await _read_writable(spec, context)
    if strange := [one for one in spec.volume_namespaces if not OBJECT_NAME.fullmatch(one)]:
        raise ConfigError(f'not the name of a namespace: "{strange[0]}"')
    deleter = _Deleter(spec, context, location)
    return build_success(deleter.output.seal(await deleter.run()))


async def _read_writable(spec: DeleteSnapshots, context: PodContext) -> BackupStorageLocation:
    """Return the location. Raises RepositoryError if it is read-only."""
    location = await context.reader.location(spec.name)
    if location.read_only:
        raise RepositoryError(f"BackupStorageLocation {location.name} is read-only")
    return location


@dataclass
class _Deleter:
    """Deletes in the repositories of a location; `usable`: it holds no backups of Velero."""

    spec: DeleteSnapshots
    context: PodContext
    location: BackupStorageLocation
    output: JobOutput = field(default_factory=JobOutput)
    usable: bool = False

    async def run(self) -> SnapshotDeletion:
        await self._check_directory()
        namespaces = self.spec.volume_namespaces
        unread: list[UnreadRepository] = []
        for namespace in namespaces:
            try:
                await self._delete_in(namespace)
            except NotInitializedError:
                _logger.info("there is no repository in the folder %s: nothing to delete", namespace)
                for copy in self._checks_in(namespace):
                    self._write_check(copy, f"there is no repository in the folder {namespace}")
            except (StorageOutageError, _RefusedError):
                raise
            except AgentError as e:
                _logger.warning("cannot delete in the repository of namespace %s: %s", namespace, e)
                unread.append(build_unread(namespace, e, self.context.redactor))
        if len(unread) == len(namespaces):
            raise RepositoryError(f"nothing was deleted: {unread[0].message}")
        shown, now = unread[:SHOWN_UNREAD], self.context.clock.now()
        return SnapshotDeletion(unread=shown, unread_count=len(unread), now=now)

    async def _delete_in(self, namespace: str) -> None:
        with open_access(self.context) as access:
            repository = await access.resolve_namespace(self.location, namespace)
            wanted = {(one.backup, one.uid) for one in self.spec.transfers if one.volume_namespace == namespace}
            try:
                listed = await self._find(repository, wanted)
            except NotInitializedError:
                await repository.check_empty()
                raise
            if not (listed and self.usable):
                await repository.check_listing()
            found = [one for one in listed if self._is_of(one, wanted)]
            if not self.usable:
                # The first repository in a bucket that can be opened shows what else is in it.
                self._refuse(found=await BackupFiles(repository.kopia, repository.work_dir, namespace).exist())
            # As late as possible: a restore may just have been started. A check runs before the transfers are deleted.
            without = {one.uid for one in self.spec.transfers} if self.spec.dry_run else frozenset[str]()
            named = await read_named_snapshots(self.context.patient_client, self.context.namespace, without)
            deletable = [one for one in found if one.id not in named]
            if not self.spec.dry_run:
                if (await _read_writable(self.spec, self.context)).spec != self.location.spec:
                    raise RepositoryError(f"BackupStorageLocation {self.location.name} was changed meanwhile")
                await self._delete(repository, deletable, wanted)
            for one in found:
                self._write(one, namespace, named.get(one.id))
            by_id = {one.id: one for one in listed}
            for copy in self._checks_in(namespace):
                self._write_check(copy, await self._find_fault(repository, copy, by_id.get(copy.snapshot_id)))

    async def _find(self, repository: Repository, wanted: set[tuple[str, str]]) -> list[ListedSnapshot]:
        """Return the snapshots of the transfers, and the copies to check."""
        checks = {one.snapshot_id for one in self.spec.checks}
        with open_output(repository.work_dir) as file:
            read = await list_stored(repository, file, read_only=self.spec.dry_run)
            return [one for one in read() if self._is_of(one, wanted) or one.id in checks]

    def _is_of(self, one: ListedSnapshot, wanted: set[tuple[str, str]]) -> bool:
        """Return whether it has the tags of the cluster, and of one of the transfers."""
        return one.tag(CLUSTER_TAG) == self.spec.cluster and (one.tag(BACKUP_TAG), one.transfer_uid) in wanted

    def _checks_in(self, namespace: str) -> list[CopyToCheck]:
        return [one for one in self.spec.checks if one.volume_namespace == namespace]

    async def _find_fault(self, repository: Repository, copy: CopyToCheck, listed: ListedSnapshot | None) -> str | None:
        """Return why it is not known that the copy can be restored; None: its root directory was read."""
        snapshot = f"snapshot {copy.snapshot_id}"
        if listed is None:
            return f"{snapshot} is not in the repository"
        if listed.incomplete:
            return f"{snapshot} is incomplete"
        if (root := listed.root_directory) is None:
            return f"the root of {snapshot} is not a directory"
        try:
            with open_output(repository.work_dir) as file:
                answer = await repository.call(f"root directory of {snapshot}", "show", root, output_fd=file.fileno())
                # It may have millions of entries.
                if next(read_directories(answer, file), None) is None:
                    raise answer.error("kopia's output is not a directory")
        except StorageOutageError:
            raise
        except AgentError as e:
            _logger.warning("cannot read %s: %s", snapshot, e)
            return build_unread(copy.volume_namespace, e, self.context.redactor).message
        return None

    async def _check_directory(self) -> None:
        """Check a location that is a directory. Raises RepositoryError if it has Velero's files, or cannot be read."""
        storage = await resolve_storage(self.context, self.location)
        if isinstance(storage, FileStorage):
            self._refuse(found=_BACKUPS in await ask_directory(storage.list_folders))

    def _refuse(self, *, found: bool) -> None:
        if found:
            place = f"BackupStorageLocation {self.location.name}"
            raise _RefusedError(f'{place} has Velero\'s folder "{_BACKUPS}": nothing is deleted in it')
        self.usable = True

    async def _delete(
        self, repository: Repository, snapshots: list[ListedSnapshot], wanted: set[tuple[str, str]]
    ) -> None:
        left = {one.id for one in snapshots}
        for _ in range(_ROUNDS):
            if not left:
                return
            ordered = sorted(left)
            for first in range(0, len(ordered), _AT_ONCE):
                attempted = f"{repository.description}: delete snapshots"
                await delete_snapshots(repository, attempted, ordered[first : first + _AT_ONCE])
            left &= {one.id for one in await self._find(repository, wanted)}
        if left:
            raise KopiaError(f"{repository.description}: {len(left)} deleted snapshots are still listed")

    def _write(self, one: ListedSnapshot, namespace: str, reference: str | None) -> None:
        line = DeletedSnapshot(
            id=one.id,
            volume_namespace=namespace,
            backup=one.tag(BACKUP_TAG) or "",
            transfer_uid=one.transfer_uid or "",
            start=format_time(one.start_time),
            bytes=one.size_bytes,
            kept=f"{reference} names it" if reference else None,
        )
        self.output.write(DELETED_LINE, line)

    def _write_check(self, copy: CopyToCheck, fault: str | None) -> None:
        line = CheckedCopy(volume_namespace=copy.volume_namespace, snapshot_id=copy.snapshot_id, fault=fault)
        self.output.write(CHECKED_LINE, line)


class _RefusedError(RepositoryError):
    """Nothing may be deleted in the location, whatever the repository."""
