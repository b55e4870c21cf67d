"""A backup of `nodeagent backup create`, as its commands see it."""

from typing import Final

from client.backups.manifests import Method
from client.collections.models import Backup, BackupOrigin, BackupPhase, BackupVolume
from core.models.phases import Phase

DATA_VOLUME: Final = BackupVolume(
    namespace="app",
    claim="data",
    method=Method.CSI_SNAPSHOT,
    kind="DataUpload",
    transfer="night-1",
    phase=Phase.COMPLETED,
    snapshot_id="s1",
    location="",
)


def build_backup(
    *volumes: BackupVolume,
    phase: BackupPhase = BackupPhase.COMPLETED,
    expected: int | None = None,
    missing: int = 0,
    unreadable: int = 0,
) -> Backup:
    """Return the backup `night` of these volumes."""
    return Backup(
        name="night",
        origin=BackupOrigin.NODEAGENT,
        phase=phase,
        locations=["default"],
        created=None,
        completed=None,
        expires=None,
        ttl="",
        keep="",
        expected=expected,
        missing=missing,
        unreadable=unreadable,
        bytes_done=sum(one.bytes_done for one in volumes),
        total_bytes=sum(one.total_bytes for one in volumes),
        volumes=list(volumes),
    )
