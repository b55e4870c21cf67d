"""The snapshots in a storage location, in a pod: of all repositories in it, also where the cluster knows none of them.

Reads the location and changes nothing; a repository that cannot be opened is named, and the others are listed. Each
snapshot is a line of the output.
Source: Velero v1.18, pkg/repository/config/config.go (a repository is in the folder `kopia/<namespace>`),
pkg/uploader/types.go (source paths), as recorded in tests/recordings/velero-1.18.2/kopia-snapshots.json.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Final

from core.contract import VolumeMode
from core.errors import AgentError, ConfigError, RepositoryError, StorageOutageError
from core.models.base import format_time
from core.models.job_output import JobOutput
from core.models.names import BLOCK_DATA_MOVER, DATA_UPLOAD_REQUESTER, OBJECT_NAME, POD_VOLUME_REQUESTER
from core.models.saved_claim import SavedClaim
from core.models.storage import BackupStorageLocation
from core.mover_specs import ListSnapshots
from core.redact import Redactor
from core.snapshot_contract import (
    STORED_LINE,
    SnapshotListing,
    StoredSnapshot,
    UnreadRepository,
)
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.long_lists import open_output, read_elements
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.references import ListedSnapshot
from datamover.kopia.repository import NotInitializedError
from datamover.pod.cluster import PodContext, list_volume_namespaces
from datamover.pod.reporting import Termination, build_success
from datamover.pod.repository_access import open_access

__all__ = ["SHOWN_UNREAD", "build_unread", "describe_stored", "list_snapshots"]

_logger = logging.getLogger(__name__)

SHOWN_UNREAD: Final = 3
"""So many messages and names are shorter than the limit of a termination message."""

_SOURCES: Final = (
    re.compile(
        rf"{DATA_UPLOAD_REQUESTER}/(?P<uploader>kopia|{BLOCK_DATA_MOVER})/(?P<namespace>[^/]+)/(?P<claim>[^/]+)"
    ),
    # Its last part is the name of the PVC if the volume has one, else the volume's in its pod.
    re.compile(rf"{POD_VOLUME_REQUESTER}/kopia/(?P<namespace>[^/]+)/[^/]+/(?P<claim>[^/]+)"),
)


async def list_snapshots(spec: ListSnapshots, context: PodContext) -> Termination:
    """Write a line for each complete snapshot in the location, and return the SnapshotListing.

    Raises:
        AgentError: the location cannot be listed, or no repository in it can be.
    """
    location = await context.reader.location(spec.name)
    output = JobOutput()
    lister = _Lister(context, location, output)
    names = spec.volume_namespaces or await lister.find_namespaces()
    if strange := [name for name in names if not OBJECT_NAME.fullmatch(name)]:
        raise ConfigError(f'--volume-namespace: not the name of a namespace: "{strange[0]}"')
    return build_success(output.seal(await lister.run(names)))


class _Lister:
    """Lists the repositories of a location to `output`."""

    def __init__(self, context: PodContext, location: BackupStorageLocation, output: JobOutput) -> None:
        self._context = context
        self._location = location
        self._output = output

    async def find_namespaces(self) -> Sequence[str]:
        with open_access(self._context) as access:
            found = await list_volume_namespaces(access.context, self._location, access.tools)
        if found is None:
            raise RepositoryError(
                f"BackupStorageLocation {self._location.name}: its folders cannot be listed in a storage of the "
                f"provider {self._location.spec.provider}: name a namespace (-n)"
            )
        return [name for name in found if OBJECT_NAME.fullmatch(name)]

    async def run(self, volume_namespaces: Sequence[str]) -> SnapshotListing:
        counts: list[int] = []
        unread: list[UnreadRepository] = []
        for name in volume_namespaces:
            try:
                counts.append(await self._list(name))
            except NotInitializedError:
                _logger.info("there is no repository in the folder %s", name)
            except StorageOutageError:
                raise
            except AgentError as e:
                _logger.warning("cannot list the repository of namespace %s: %s", name, e)
                unread.append(build_unread(name, e, self._context.redactor))
        if unread and not counts:
            raise RepositoryError(f"none of {len(unread)} repositories can be listed: {unread[0].message}")
        return SnapshotListing(
            repositories=len(counts),
            snapshots=sum(counts),
            unread=unread[:SHOWN_UNREAD],
            unread_count=len(unread),
        )

    async def _list(self, volume_namespace: str) -> int:
        """Write the lines of one repository, and return how many there are."""
        with open_access(self._context) as access, open_output(access.work_dir) as file:
            repository = await access.resolve_namespace(self._location, volume_namespace)

            async def read() -> KopiaAnswer:
                attempted = f"{repository.description}: list snapshots"
                answer = await repository.call(
                    attempted, "snapshot", "list", "--all", "--json", output_fd=file.fileno()
                )
                return answer.check()

            answer = await repository.open(read, read_only=True)
            count = 0
            for one in read_elements(answer, file, ListedSnapshot):
                self._output.write(STORED_LINE, describe_stored(one, volume_namespace))
                count += 1
            return count


def describe_stored(one: ListedSnapshot, volume_namespace: str) -> StoredSnapshot:
    """Return what the tags and the source of a snapshot in the repository of `volume_namespace` say.

    A PVC of another namespace counts as none: who may write to one repository could name one of anybody else.
    """
    saved, named = (
        claim if claim is not None and claim.namespace == volume_namespace else None
        for claim in (one.claim, _claim_of(one.shown_source))
    )
    return StoredSnapshot(
        id=one.id,
        volume_namespace=volume_namespace,
        source=one.shown_source,
        requester=one.requester,
        start=format_time(one.start_time),
        bytes=one.size_bytes,
        cluster=one.cluster,
        backup=one.backup_name,
        backup_volumes=one.backup_volumes,
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
    if not found or not all(OBJECT_NAME.fullmatch(name) for name in found.values()):
        return None
    # Only into such a volume can it be restored.
    mode = VolumeMode.BLOCK if found.get("uploader") == BLOCK_DATA_MOVER else VolumeMode.FILESYSTEM
    return SavedClaim(namespace=found["namespace"], name=found["claim"], volume_mode=str(mode))


def build_unread(volume_namespace: str, error: AgentError, redactor: Redactor) -> UnreadRepository:
    """Return the repository with the cause."""
    lines = redactor.redact(str(error)).splitlines() or [""]
    return UnreadRepository(volume_namespace=volume_namespace, message=lines[0])
