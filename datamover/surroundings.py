"""What a mover finds in its pod, and the way from there to an open repository.

Knows where the pieces come from: the location and its secrets from the cluster, credentials
from files and environment, limits from the cgroup. Does not know what is moved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.models.storage import BackupRepository, BackupStorageLocation, RepositoryKey
from datamover.cluster import ClusterReader
from datamover.connection import parse_cache_limit
from datamover.kopia import Kopia, kopia_environment
from datamover.limits import Limits
from datamover.location import storage_of
from datamover.repository import Repository, RepositoryPlace
from datamover.scrub import Scrubber
from datamover.signals import StopSignal
from datamover.workfolder import WorkFolder

__all__ = ["FORBIDDEN_SECONDS", "Surroundings", "open_location"]

_PATIENT_SECONDS: Final = 300.0
_PATIENT_ATTEMPTS: Final = 100
"""An only API server is away for minutes while its machine is started anew."""

FORBIDDEN_SECONDS: Final = 20.0
"""Then it refuses for some seconds what a mover may do: nobody gives a mover another try for that."""


@dataclass(frozen=True)
class Surroundings:
    """What a mover finds around itself in its pod."""

    client: KubeClient
    clock: Clock
    namespace: str
    node: str
    environment: Mapping[str, str] = field(repr=False)
    limits: Limits
    stop: StopSignal
    termination_file: Path

    @property
    def reader(self) -> ClusterReader:
        """What reads the cluster before data moves, with patience: nobody tries again for this pod."""
        retry = Retry(
            self.clock,
            attempts=_PATIENT_ATTEMPTS,
            total_seconds=_PATIENT_SECONDS,
            forbidden_seconds=FORBIDDEN_SECONDS,
        )
        return ClusterReader(KubeClient(self.client.transport, retry), self.clock, self.namespace)

    def tuned(self, restore_workers: int = 0) -> Self:
        """Return the same for a kopia that restores by so many workers, or does anything else."""
        memory = self.limits.go_settings(self.environment, restore_workers=restore_workers)
        return replace(self, environment={**self.environment, **memory})


async def open_location(
    around: Surroundings,
    location: BackupStorageLocation,
    repository: BackupRepository,
    *,
    folder: WorkFolder,
    scrubber: Scrubber,
) -> Repository:
    """Return the kopia repository that `repository` stands for, not yet connected.

    Raises:
        RepositoryError: the location, its credentials or the password cannot be used, or the
            repository is for another location or of another type.
    """
    volume_namespace = repository.spec.volume_namespace
    repository.check_key(RepositoryKey(volume_namespace, location.name))
    reader = around.reader
    secrets = await reader.location_secrets(location)
    storage = storage_of(location, volume_namespace, secrets=secrets, environment=around.environment)
    password = await reader.password()
    reach = storage.reach(folder)
    scrubber.add(password, *reach.secrets(around.environment))
    own = {**reach.environment, "KOPIA_PASSWORD": password}
    kopia = Kopia(kopia_environment(around.environment, folder, own), scrubber)
    shown = f"backup repository {repository.name} ({storage.description})"
    place = RepositoryPlace(shown, storage, reach)
    return Repository(kopia, place, folder, cache=parse_cache_limit(repository.spec.repository_config))
