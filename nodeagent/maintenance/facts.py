"""What a BackupRepository itself says about its maintenance: for the leader, and for commands that ask without one.

Pure.
"""

from datetime import datetime, timedelta
from typing import Final

from core.models.names import MAINTENANCE_ANNOTATION, REPOSITORY_CREATED_ANNOTATION, REPOSITORY_ID_ANNOTATION
from core.models.storage import (
    FULL_INTERVAL_KEY,
    FULL_INTERVAL_SECONDS,
    BackupRepository,
    RepositoryKey,
    RepositoryPhase,
)
from core.models.units import parse_duration
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import MaintenanceView

__all__ = ["frequency_of", "full_interval_of", "key_of", "record_of", "view_of", "was_ready"]

_DEFAULT_FREQUENCY: Final = timedelta(hours=1)


def record_of(repository: BackupRepository) -> MaintenanceRecord:
    """Return the record in the repository's annotation."""
    return MaintenanceRecord.parse(repository.metadata.annotations.get(MAINTENANCE_ANNOTATION))


def key_of(repository: BackupRepository) -> RepositoryKey:
    """Return the identity of the repository."""
    return RepositoryKey(repository.spec.volume_namespace, repository.spec.backup_storage_location)


def was_ready(repository: BackupRepository) -> bool:
    """Return whether the repository was Ready at some time."""
    meta, status = repository.metadata, repository.status
    ready = status.last_maintenance_time is not None or status.phase is RepositoryPhase.READY
    return ready or REPOSITORY_ID_ANNOTATION in meta.annotations


def frequency_of(repository: BackupRepository) -> timedelta:
    """Return how often maintenance may run; an hour if that is invalid or not positive."""
    try:
        frequency = parse_duration(repository.spec.maintenance_frequency)
    except ValueError:
        return _DEFAULT_FREQUENCY
    return frequency if frequency > timedelta() else _DEFAULT_FREQUENCY


def full_interval_of(repository: BackupRepository) -> timedelta | None:
    """Return the interval that a repository of ours gets; None: the one of any other is left as it is."""
    wanted = repository.spec.repository_config.get(FULL_INTERVAL_KEY, "")
    if repository.metadata.annotations.get(REPOSITORY_CREATED_ANNOTATION) != "true" or not wanted:
        return None
    seconds = FULL_INTERVAL_SECONDS.get(wanted)
    return timedelta(seconds=seconds) if seconds else None


def view_of(repository: BackupRepository, now: datetime) -> MaintenanceView:
    """Return the view of a decision, with what the repository says; the rest has its defaults."""
    meta, status = repository.metadata, repository.status
    return MaintenanceView(
        now=now,
        created_at=meta.creation_timestamp or now,
        frequency=frequency_of(repository),
        last_maintenance=status.last_maintenance_time,
        entries=tuple(status.recent_maintenance),
        record=record_of(repository),
        ready_once=was_ready(repository),
        new_full_interval=full_interval_of(repository),
    )
