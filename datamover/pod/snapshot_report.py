"""Reports about snapshots, in a pod: all of a storage location, and the ones of a repository that nothing refers to.

Repository, cluster and bucket are read in this order, so that what is stored meanwhile counts as a reference. Nothing
is changed. The rules are in `datamover.kopia.references`.
Source: Velero v1.18, pkg/apis/velero/v1 and v2alpha1, pkg/repository/config/config.go (a repository is in the folder
`kopia/<namespace>`), pkg/uploader/types.go (source paths); tests/recordings/velero-1.18.2 (CRDs, kopia-snapshots.json);
kopia 0.23.1, cli/command_snapshot_list.go and command_snapshot_delete.go.
"""

import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Final

from core.contract import MoverVerb, VolumeMode
from core.errors import AgentError, ConfigError, ContractError, DataPathError, RepositoryError, StorageOutageError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, NotFoundError
from core.kube.resources import BACKUPS, Resource
from core.kube.types import UncheckedObject
from core.models import names
from core.models.backups import SavedClaim
from core.models.base import format_time
from core.models.job_output import JobOutput
from core.models.phases import FINAL_PHASES, Attempts, Phase
from core.models.storage import BackupStorageLocation, RepositoryKey
from core.models.units import parse_count
from core.mover_specs import ListSnapshots, ReportSnapshots
from core.redact import Redactor
from core.snapshot_contract import (
    REPORTED_LINE,
    STORED_LINE,
    ReportedSnapshot,
    SnapshotListing,
    SnapshotReport,
    SnapshotTotal,
    SnapshotVerdict,
    StoredSnapshot,
    UnreadRepository,
)
from datamover.kinds import TRANSFER_KINDS, MoverKind
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.location_files import BackupFiles, open_output, read_elements
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.references import CompletedTransfer, Judgment, ListedSnapshot, References, judge, needs_bucket
from datamover.kopia.repository import NotInitializedError, Repository
from datamover.pod.cluster import PodContext, open_access
from datamover.pod.reporting import Termination, build_success

_logger = logging.getLogger(__name__)

_DELETING: Final = "Deleting"
"""The phase of a Backup."""


async def read_cluster_references(client: KubeClient, namespace: str) -> References:
    """Return what the transfers and Backups of `namespace` refer to; what cannot be read is in `unread`.

    A backup refers to its snapshot as long as its resource exists, a restore until it has ended.
    """
    snapshot_ids: dict[str, str] = {}
    completed: dict[str, CompletedTransfer] = {}
    uids: set[str] = set()
    try:
        async for kind, raw, found in _list_named(client, namespace):
            snapshot_ids[found] = name = f"{kind.resource.kind} {namespace}/{raw['metadata']['name']}"
            if kind.verb is MoverVerb.BACKUP and raw["status"].get("phase") == Phase.COMPLETED:
                number = (Attempts.from_annotations(raw["metadata"].get("annotations") or {}) or Attempts()).number
                completed[raw["metadata"]["uid"]] = CompletedTransfer(name, number)
        async for raw in _list(client, BACKUPS, namespace):
            uids.add(raw["metadata"]["uid"])
    except NotFoundError as e:
        return References(snapshot_ids, completed, unread=f"a resource of Velero is not defined in this cluster: {e}")
    except (KubeError, ContractError) as e:
        return References(snapshot_ids, completed, unread=str(e))
    return References(snapshot_ids, completed, frozenset(uids))


async def read_named_snapshots(
    client: KubeClient, namespace: str, without: Collection[str] = frozenset()
) -> dict[str, str]:
    """Return the snapshots that transfers of `namespace` refer to, by ID, with a transfer's name; not those `without`.

    Raises:
        ContractError: a transfer is malformed: what it refers to is not known.
        KubeError: they cannot be listed.
    """
    return {
        found: f"{kind.resource.kind} {namespace}/{raw['metadata']['name']}"
        async for kind, raw, found in _list_named(client, namespace)
        if raw["metadata"]["uid"] not in without
    }


async def read_backup_snapshots(client: KubeClient, namespace: str, key: RepositoryKey) -> set[str]:
    """Return the IDs of the snapshots in a repository that completed backups of `namespace` refer to.

    Snapshots of a Backup that is being deleted do not count: a Velero server deletes them before its transfers.
    Source: Velero v1.18, pkg/controller/backup_deletion_controller.go. A malformed transfer hides no other one. Raises
    KubeError if they cannot be listed.
    """
    found: dict[str, set[str]] = {}
    for kind in (one for one in TRANSFER_KINDS.values() if one.verb is MoverVerb.BACKUP):
        async for page in client.pages(Selection(kind.resource, namespace)):
            named = ((_completed_snapshot(kind, raw, key), raw) for raw in page.items)
            found |= {snapshot: _backups_of(raw) for snapshot, raw in named if snapshot}
    deleting = await _list_deleting(client, namespace)
    return {snapshot for snapshot, backups in found.items() if not deleting & backups}


async def _list_deleting(client: KubeClient, namespace: str) -> set[str]:
    """Return the names of the Backups that are being deleted; none if they cannot be listed."""
    try:
        return {
            raw["metadata"]["name"]
            async for raw in _list(client, BACKUPS, namespace)
            if raw["metadata"].get("deletionTimestamp") or (raw.get("status") or {}).get("phase") == _DELETING
        }
    except (KubeError, ContractError) as e:
        _logger.warning("a backup that is being deleted counts as one that is kept: %s", e)
        return set()


def _backups_of(raw: UncheckedObject) -> set[str]:
    meta = raw["metadata"]
    owners = {one["name"] for one in meta.get("ownerReferences") or [] if one.get("kind") == BACKUPS.kind}
    return owners | {name for name in [(meta.get("labels") or {}).get(names.VELERO_BACKUP_LABEL)] if name}


def _completed_snapshot(kind: MoverKind, raw: UncheckedObject, key: RepositoryKey) -> str | None:
    """Return the snapshot of a completed backup in that repository; None: it is none."""
    try:
        cr = kind.model.parse(raw)
    except ContractError as e:
        _logger.warning("its snapshot is not verified: %s", e)
        return None
    place = RepositoryKey(cr.repository_namespace, cr.spec.backup_storage_location)
    return cr.status.snapshot_id if cr.phase is Phase.COMPLETED and place == key and not cr.deleting else None


async def _list_named(client: KubeClient, namespace: str) -> AsyncIterator[tuple[MoverKind, UncheckedObject, str]]:
    """Yield all transfers that refer to a snapshot, with its ID."""
    for kind in TRANSFER_KINDS.values():
        async for raw in _list(client, kind.resource, namespace):
            if found := _named_snapshot(raw, kind.verb):
                yield kind, raw, found


async def _list(
    client: KubeClient, resource: Resource[UncheckedObject], namespace: str
) -> AsyncIterator[UncheckedObject]:
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise ContractError(f"a {resource.kind} in namespace {namespace} is malformed")
        for raw in page.items:
            yield raw


def _named_snapshot(raw: UncheckedObject, verb: MoverVerb) -> str | None:
    """Return the ID of the kopia snapshot that the transfer refers to; None if it does not."""
    status, spec = raw.get("status") or {}, raw.get("spec") or {}
    try:
        found = status.get("snapshotID") if verb is MoverVerb.BACKUP else spec.get("snapshotID")
        ended = verb is MoverVerb.RESTORE and status.get("phase") in FINAL_PHASES
    except (AttributeError, TypeError) as e:
        raise _malformed(raw) from e
    if not isinstance(found or "", str):
        raise _malformed(raw)
    return None if ended else found or None


def _malformed(raw: UncheckedObject) -> ContractError:
    return ContractError(f"{raw['kind']} {raw['metadata']['name']} is malformed")


async def list_stored(
    repository: Repository, file: IO[bytes], *, read_only: bool = True
) -> Callable[[], Iterator[ListedSnapshot]]:
    """Let kopia list all snapshots of a repository to `file`, incomplete ones too, and return what reads them there.

    Raises:
        DataPathError: the repository cannot be opened, or its snapshots cannot be listed.
    """

    async def read() -> KopiaAnswer:
        attempted = f"{repository.description}: list snapshots"
        arguments = ("snapshot", "list", "--all", "--incomplete", "--json")
        return (await repository.call(attempted, *arguments, output_fd=file.fileno())).check()

    answer = await repository.open(read, read_only=read_only)
    return partial(read_elements, answer, file, ListedSnapshot)


_REASON_LIMIT: Final = 500


async def report_snapshots(spec: ReportSnapshots, context: PodContext) -> Termination:
    """Return the SnapshotReport of a BackupRepository's repository. Raises AgentError if it cannot be listed."""
    wanted, location = await context.reader.place(spec.name)
    with open_access(context) as access:
        repository = await access.resolve(location, wanted)
        reporter = SnapshotReporter(access.context, repository, wanted.spec.volume_namespace)
        return build_success(reporter.output.seal(await reporter.run()))


@dataclass(frozen=True)
class SnapshotReporter:
    """Reports the snapshots of a repository, for the volumes of one namespace, to `output`."""

    context: PodContext
    repository: Repository
    volume_namespace: str
    output: JobOutput = field(default_factory=JobOutput)

    async def run(self) -> SnapshotReport:
        """Write a line for each snapshot that is not referenced, and return the totals; raises DataPathError."""
        with open_output(self.repository.work_dir) as file:
            read = await list_stored(self.repository, file)
            references = await read_cluster_references(self.context.patient_client, self.context.namespace)
            doubtful = (one for one in read() if needs_bucket(one, references))
            wanted = frozenset(name for one in doubtful for name in (one.id, one.backup_uid) if name)
            bucket_read = False
            if wanted:
                bucket_read, references = await self._read_bucket(wanted, references)
            now = self.context.clock.now()
            totals = self._write((one, judge(one, references, now)) for one in read())
        unread = references.unread if wanted else None
        return SnapshotReport(**totals, bucket_read=bucket_read, unread=unread)

    async def _read_bucket(self, wanted: frozenset[str], references: References) -> tuple[bool, References]:
        """Return whether all files were read, and the references, the bucket's too, or why there are none."""
        files = BackupFiles(self.repository.kopia, self.repository.work_dir, self.volume_namespace)
        try:
            return True, replace(references, in_bucket=await files.find_named(wanted))
        except DataPathError as e:
            text = summarize(str(e))
            _logger.warning("cannot read the files of all backups: %s", text)
            unread = "; ".join(filter(None, (references.unread, f"cannot read the files of all backups: {text}")))
            return False, replace(references, unread=unread)

    def _write(self, judged: Iterable[tuple[ListedSnapshot, Judgment]]) -> dict[str, SnapshotTotal]:
        """Write the lines, and return the total of each verdict."""
        counts: Counter[SnapshotVerdict] = Counter()
        sizes: Counter[SnapshotVerdict] = Counter()
        for snapshot, (verdict, reason) in judged:
            counts[verdict] += 1
            sizes[verdict] += snapshot.size_bytes
            if verdict is not SnapshotVerdict.REFERENCED:
                unreferenced = verdict is SnapshotVerdict.UNREFERENCED
                line = ReportedSnapshot(
                    id=snapshot.id,
                    verdict=verdict,
                    reason=reason[:_REASON_LIMIT],
                    source=snapshot.shown_source,
                    start=format_time(snapshot.start_time),
                    bytes=snapshot.size_bytes,
                    command=f"kopia snapshot delete {snapshot.id} --delete" if unreferenced else None,
                )
                self.output.write(REPORTED_LINE, line)
        return {str(verdict): SnapshotTotal(count=counts[verdict], bytes=sizes[verdict]) for verdict in counts}


SHOWN_UNREAD: Final = 3
_UNREAD_CHARACTERS: Final = 1000
"""So many messages and names are shorter than the limit of a termination message."""

_SOURCES: Final = (
    re.compile(
        rf"{names.DATA_UPLOAD_REQUESTER}/(?P<uploader>kopia|{names.BLOCK_DATA_MOVER})/(?P<namespace>[^/]+)/(?P<claim>[^/]+)"
    ),
    # Its last part is the name of the PVC if the volume has one, else the volume's in its pod.
    re.compile(rf"{names.POD_VOLUME_REQUESTER}/kopia/(?P<namespace>[^/]+)/[^/]+/(?P<claim>[^/]+)"),
)


async def list_snapshots(spec: ListSnapshots, context: PodContext) -> Termination:
    """Write a line for each complete snapshot in the location, and return the SnapshotListing.

    Raises:
        AgentError: the location cannot be listed, or no repository in it can be.
    """
    location = await context.reader.location(spec.name)
    lister = _Lister(context, location)
    namespaces = spec.volume_namespaces or await lister.find_namespaces()
    if strange := [name for name in namespaces if not names.OBJECT_NAME.fullmatch(name)]:
        raise ConfigError(f'--volume-namespace: not the name of a namespace: "{strange[0]}"')
    return build_success(lister.output.seal(await lister.run(namespaces, named=bool(spec.volume_namespaces))))


@dataclass(frozen=True)
class _Lister:
    """Lists the repositories of a location to `output`."""

    context: PodContext
    location: BackupStorageLocation
    output: JobOutput = field(default_factory=JobOutput)

    async def find_namespaces(self) -> Sequence[str]:
        with open_access(self.context) as access:
            found = await access.list_volume_namespaces(self.location)
        if found is None:
            raise RepositoryError(
                f"BackupStorageLocation {self.location.name}: its folders cannot be listed in a storage of the "
                f"provider {self.location.spec.provider}: name a namespace (-n)"
            )
        return [name for name in found if names.OBJECT_NAME.fullmatch(name)]

    async def run(self, volume_namespaces: Sequence[str], *, named: bool) -> SnapshotListing:
        """List these repositories; `named`: by the user, so that some may not exist."""
        listed, unread = 0, list[UnreadRepository]()
        for name in volume_namespaces:
            try:
                await self._list(name)
                listed += 1
            except NotInitializedError as e:
                _logger.info("there is no repository in the folder %s", name)
                # The folder exists: its repository may have lost its format.
                if not named:
                    unread.append(build_unread(name, e, self.context.redactor))
            except StorageOutageError:
                raise
            except AgentError as e:
                _logger.warning("cannot list the repository of namespace %s: %s", name, e)
                unread.append(build_unread(name, e, self.context.redactor))
        if unread and not listed:
            raise RepositoryError(f"none of {len(unread)} repositories can be listed: {unread[0].message}")
        return SnapshotListing(unread=unread[:SHOWN_UNREAD], unread_count=len(unread))

    async def _list(self, volume_namespace: str) -> None:
        """Write the lines of one repository."""
        with open_access(self.context) as access, open_output(access.work_dir) as file:
            repository = await access.resolve_namespace(self.location, volume_namespace)
            read = await list_stored(repository, file)
            for one in read():
                # An incomplete one of a device has the tags of its backup.
                if not one.incomplete:
                    self.output.write(STORED_LINE, describe_stored(one, volume_namespace))


def describe_stored(one: ListedSnapshot, volume_namespace: str) -> StoredSnapshot:
    """Return what the tags and the source of a snapshot in the repository of `volume_namespace` say.

    A PVC of another namespace counts as none: who may write to one repository could name one of anybody else.
    """
    tagged = SavedClaim.from_annotations({SavedClaim.annotation: one.tag(names.CLAIM_TAG) or ""})
    saved, named = (
        claim if claim is not None and claim.namespace == volume_namespace else None
        for claim in (tagged, _claim_of(one.shown_source))
    )
    return StoredSnapshot(
        id=one.id,
        volume_namespace=volume_namespace,
        source=one.shown_source,
        requester=one.tag(names.SNAPSHOT_REQUESTER_TAG),
        start=format_time(one.start_time),
        bytes=one.size_bytes,
        cluster=one.tag(names.CLUSTER_TAG),
        backup=one.tag(names.BACKUP_TAG),
        backup_volumes=parse_count(one.tag(names.BACKUP_VOLUMES_TAG) or ""),
        backup_uid=one.backup_uid,
        transfer_uid=one.transfer_uid,
        claim=saved or named,
        described=saved is not None,
    )


def _claim_of(source: str) -> SavedClaim | None:
    """Return the PVC that the source of a snapshot names, of its spec only the volume mode; None: it names none."""
    identity, _, path = source.partition(":")
    if identity != IDENTITY:
        return None
    found: Mapping[str, str] = next((match.groupdict() for one in _SOURCES if (match := one.fullmatch(path))), {})
    if not found or not all(names.OBJECT_NAME.fullmatch(name) for name in found.values()):
        return None
    # Whether it had a file system is not known: the device itself is right in any case.
    mode = VolumeMode.BLOCK if found.get("uploader") == names.BLOCK_DATA_MOVER else VolumeMode.FILESYSTEM
    return SavedClaim(namespace=found["namespace"], name=found["claim"], volume_mode=str(mode))


def summarize(text: str) -> str:
    """Return the cause of an error, its first line, and the last one, which has kopia's most specific words."""
    lines = text.splitlines() or [""]
    return ": ".join(dict.fromkeys((lines[0], lines[-1])))


def build_unread(volume_namespace: str, error: AgentError, redactor: Redactor) -> UnreadRepository:
    """Return the repository with the cause."""
    text = summarize(redactor.redact(str(error)))
    return UnreadRepository(volume_namespace=volume_namespace, message=text[:_UNREAD_CHARACTERS])
