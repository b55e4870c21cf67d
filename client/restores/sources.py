"""Which volumes a restore has: from a backup in the cluster, or by the snapshots that a Job lists in a location."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from msgspec import field

from client.backups.plan import ClaimName
from client.collections.models import Backup, BackupVolume
from client.mover_jobs import IncompleteLogError, JobAnswer, JobError, find_subject, plan_job, run_job
from client.session import Session
from core.contract import parse_result
from core.errors import AgentError
from core.models.backups import SavedClaim
from core.models.base import WireModel
from core.models.verification import is_damaged
from core.mover_specs import ListSnapshots
from core.snapshot_contract import STORED_LINE, SnapshotListing, StoredSnapshot
from core.text import guess, hinted


class StoredList(WireModel):
    """The complete snapshots of volumes in a storage location, and notes about what could not be read."""

    location: str
    snapshots: list[StoredSnapshot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def list_location(
    tools: Session, location_name: str, *, volume_namespaces: Sequence[str] = (), timeout: timedelta
) -> StoredList:
    """Return the snapshots of the repositories of these namespaces, or of all in the location.

    They are in the order of cluster, backup, namespace and PVC, and of each PVC the newest first.

    Raises:
        NotFoundError: the location does not exist.
        JobError: the Job failed, cannot start, did not end in time, or has not the whole list in its log.
    """
    spec = ListSnapshots(volume_namespaces=tuple(volume_namespaces))
    manifest = await plan_job(tools, await find_subject(tools, "list", location_name), spec)
    return _read(location_name, await run_job(tools, manifest, "list", timeout))


def _read(location: str, answer: JobAnswer) -> StoredList:
    totals = parse_result(SnapshotListing, answer.message)
    try:
        found = answer.find(STORED_LINE)
    except IncompleteLogError as e:
        raise JobError(f"{e}: list one namespace at a time (-n)") from e
    notes = [f"the repository of namespace {one.volume_namespace}: {one.message}" for one in totals.unread]
    if (more := totals.unread_count - len(totals.unread)) > 0:
        notes.append(f"{more} more repositories could not be listed")
    found.sort(key=_start, reverse=True)
    found.sort(key=_group)
    return StoredList(location=location, snapshots=found, notes=notes)


def _group(one: StoredSnapshot) -> tuple[str, str, str, str]:
    claim = one.claim
    volume = (claim.namespace, claim.name) if claim else (one.volume_namespace, "")
    return one.cluster or "", one.backup or "", *volume


def _start(one: StoredSnapshot) -> str:
    return one.start or ""


class RestoreError(AgentError):
    """A volume cannot be restored."""


class UnsetRestoreError(RestoreError):
    """All data is restored, but a volume did not take the owner, mode or time of some files."""

    exit_code = 3


@dataclass(frozen=True)
class Source:
    """What is restored: a backup by its name, or one snapshot by its ID; of a backup, these PVCs or all of a namespace.

    `cluster` is the UID of the namespace `kube-system` of the cluster that made the backup; "": of any. Without
    `namespace` and `claims`, all PVCs are.
    """

    backup: str = ""
    snapshot: str = ""
    cluster: str = ""
    namespace: str = ""
    claims: tuple[ClaimName, ...] = ()

    def has(self, claim: ClaimName) -> bool:
        """Return whether it is about this PVC."""
        if self.claims:
            return claim in self.claims
        return self.namespace in {"", claim.namespace}

    def __str__(self) -> str:
        return f"snapshot {self.snapshot}" if self.snapshot else f"backup {self.backup}"


@dataclass(frozen=True)
class SavedVolume:
    """A volume in a bucket: its snapshot, the repository by its namespace and location, and the PVC as it was.

    Only the names of the PVC are known if it has no `size`. `size_bytes` is the size of its files; 0: not known.
    `by_block`: a device was stored, also of a PVC with a file system. `doubt` is what speaks against it; "": nothing.
    """

    snapshot_id: str
    repository: str
    location: str
    claim: SavedClaim
    size_bytes: int = 0
    by_block: bool = False
    doubt: str = ""

    @property
    def name(self) -> ClaimName:
        """The namespace and the name that the PVC had."""
        return ClaimName(self.claim.namespace, self.claim.name)


def choose_from_backups(backups: Sequence[Backup], source: Source) -> list[SavedVolume]:
    """Return the volumes of these backups, the newest of each PVC, in the order of their names.

    Raises:
        RestoreError: there are none, or a volume is not complete; the message names it.
    """
    if source.snapshot:
        volumes = [one for backup in backups for one in backup.volumes if one.snapshot_id == source.snapshot][:1]
        if not volumes:
            raise RestoreError(f"no backup in the cluster names {source}: --from-storage-location looks in the bucket")
    else:
        volumes = _find_backup(backups, source).newest
    by_claim = {ClaimName(one.namespace, one.claim): one for one in volumes}
    return [_of_transfer(by_claim[name]) for name in _choose(by_claim, source)]


def _find_backup(backups: Sequence[Backup], source: Source) -> Backup:
    named = [backup for backup in backups if backup.name == source.backup]
    if not named:
        hint = guess(source.backup, [backup.name for backup in backups])
        text = f" ({hint})" if hint else ": --from-storage-location looks for it in the bucket"
        raise RestoreError(f"there is no {source} in the cluster{text}")
    if len(named) > 1:
        raise RestoreError(f"{source} is Velero's, and also nodeagent's: restore its volumes by --from-snapshot")
    (backup,) = named
    if backup.missing and not source.claims:
        raise RestoreError(f"{source}: {backup.missing} of its volumes have no transfer: name the others by --pvc")
    if backup.unreadable and not source.claims:
        raise RestoreError(f"{source}: {backup.unreadable} of its transfers cannot be read: name the others by --pvc")
    return backup


def _of_transfer(one: BackupVolume) -> SavedVolume:
    if not one.stored:
        raise RestoreError(f"{one.state}: name the volumes to restore by --pvc")
    if ":" in one.claim:
        shown = f"{one.kind} {one.transfer} of {one.namespace}/{one.claim}"
        raise RestoreError(f"{shown}: the volume had no PVC: name the volumes to restore by --pvc")
    claim = one.saved or SavedClaim(namespace=one.namespace, name=one.claim)
    doubt = one.shrunk.text if one.shrunk and one.shrunk.acknowledged is None else ""
    if is_damaged(one.verification):
        doubt = "its last verification failed"
    return SavedVolume(one.snapshot_id, one.namespace, one.location, claim, one.total_bytes, one.by_block, doubt)


def choose_stored(stored: StoredList, source: Source) -> list[SavedVolume]:
    """Return the volumes of the source in a bucket, the newest of each PVC, in the order of their names.

    A backup of Velero is named by the UID of its Backup.

    Raises:
        RestoreError: there are none, several backups have the name, or a snapshot names no PVC of its namespace.
    """
    found = [one for one in stored.snapshots if _matches(one, source)]
    place = f"BackupStorageLocation {stored.location}"
    if not found:
        known = {one.id if source.snapshot else one.backup for one in stored.snapshots}
        raise RestoreError(
            hinted(f"there is no {source} in {place}", source.snapshot or source.backup, filter(None, known))
        )
    clusters = sorted({one.cluster or "" for one in found})
    if len(clusters) > 1:
        text = ", ".join(one or "none" for one in clusters)
        raise RestoreError(f"{source} in {place} is of several clusters: choose one by --cluster: {text}")
    newest: dict[ClaimName, StoredSnapshot] = {}
    by_claim = {}
    # The newest one counts: another attempt may have made one too.
    for one in sorted(found, key=_start):
        if (claim := _own_claim(one)) is None:
            if source.claims:
                continue
            raise RestoreError(
                f"snapshot {one.id} in {place} names no PVC of {one.volume_namespace}, the namespace of its "
                f"repository: its source is {one.source or 'unknown'}: name the others by --pvc, or -n"
            )
        volume = SavedVolume(one.id, one.volume_namespace, stored.location, claim, one.bytes, one.by_block)
        before = newest.get(volume.name)
        if before is not None and before.transfer_uid != one.transfer_uid:
            what = f"different transfers made the snapshots {_at(before)} and {_at(one)} of PVC {volume.name}"
            raise _several_runs(source, place, what)
        newest[volume.name], by_claim[volume.name] = one, volume
    if not source.snapshot:
        _check_counts(list(newest.values()), source, place)
    missing = max(one.backup_volumes or 0 for one in found) - len(by_claim)
    if missing > 0 and not (source.claims or source.namespace or source.snapshot):
        raise RestoreError(f"{source}: {missing} of its volumes are not in {place}: name the others by --pvc, or -n")
    return [by_claim[name] for name in _choose(by_claim, source)]


def _own_claim(one: StoredSnapshot) -> SavedClaim | None:
    """Return the PVC of a snapshot, if it is of the namespace of its repository.

    A writer to one repository could name a PVC of another namespace otherwise.
    """
    return one.claim if one.claim is not None and one.claim.namespace == one.volume_namespace else None


def _check_counts(found: Sequence[StoredSnapshot], source: Source, place: str) -> None:
    """Check that these snapshots, one of each PVC, can be of one backup, by how many volumes they say it has."""
    by_count = {one.backup_volumes: one for one in found if one.backup_volumes}
    if len(by_count) > 1:
        text = " and ".join(f"{_at(one)} of {count} volumes" for count, one in sorted(by_count.items()))
        raise _several_runs(source, place, f"there are {text}")
    if by_count and len(found) > (count := max(by_count)):
        first, last = min(found, key=_start), max(found, key=_start)
        what = f"{len(found)} PVCs instead of {count} have one, from {_at(first)} to {_at(last)}"
        raise _several_runs(source, place, what)


def _several_runs(source: Source, place: str, what: str) -> RestoreError:
    text = f"the snapshots of {source} in {place} are of several backups of that name"
    return RestoreError(f"{text}: {what}: choose each volume by --from-snapshot")


def _at(one: StoredSnapshot) -> str:
    return f"{one.id} of {one.start or 'an unknown time'}"


def _matches(one: StoredSnapshot, source: Source) -> bool:
    if source.cluster and one.cluster != source.cluster:
        return False
    if source.snapshot:
        return one.id == source.snapshot
    # Both are empty of a snapshot that is of no backup.
    return bool(source.backup) and source.backup in {one.backup, one.backup_uid}


def _choose(known: Collection[ClaimName], source: Source) -> list[ClaimName]:
    for name in source.claims:
        if name not in known:
            raise RestoreError(hinted(f"{source} has no PVC {name}", str(name), map(str, known)))
    chosen = sorted(name for name in known if source.has(name))
    if not chosen:
        raise RestoreError(
            f"{source} has no volume" + (f" of namespace {source.namespace}" if source.namespace else "")
        )
    return chosen
