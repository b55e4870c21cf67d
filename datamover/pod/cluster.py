"""What a mover reads from the cluster: the location, its secrets, the repository's state and password.

Knows the objects and how a missing one is told. Does not know kopia.

What a mover finds in its pod, and the way from there to an open repository.

Knows where the pieces come from: the location and its secrets from the cluster, credentials
from files and environment, limits from the cgroup. Does not know what is moved.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from core.clock import Clock, Deadline
from core.errors import RepositoryError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import AlreadyExistsError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, SECRETS
from core.kube.retry import Retry
from core.kube.watch import watch_one
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET
from core.models.storage import (
    REPOSITORY_TYPE,
    BackupRepository,
    BackupStorageLocation,
    RepositoryKey,
    RepositoryPhase,
    SecretKey,
    repository_labels,
    repository_name,
)
from datamover.kopia.client_config import parse_cache_limit
from datamover.kopia.process import Kopia, kopia_environment
from datamover.kopia.repository import Repository, RepositoryPlace
from datamover.runtime.redact import Redactor
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import WorkFolder
from datamover.storage.credentials import CredentialsText
from datamover.storage.location import LocationSecrets, storage_of

__all__ = ["FORBIDDEN_SECONDS", "ClusterReader", "Surroundings", "build_repository", "open_location"]


def build_repository(namespace: str, volume_namespace: str, location: str) -> JsonDict:
    """Return a new BackupRepository, as the peer's mover creates it: its controller fills in the rest."""
    return {
        "apiVersion": BACKUP_REPOSITORIES.api_version,
        "kind": BACKUP_REPOSITORIES.kind,
        "metadata": {
            "name": repository_name(volume_namespace, location),
            "namespace": namespace,
            "labels": repository_labels(volume_namespace, location),
        },
        "spec": {
            "backupStorageLocation": location,
            "maintenanceFrequency": "0s",
            "repositoryType": REPOSITORY_TYPE,
            "volumeNamespace": volume_namespace,
        },
    }


class ClusterReader:
    """Reads objects of the agent's namespace."""

    def __init__(self, client: KubeClient, clock: Clock, namespace: str) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace

    async def location(self, name: str) -> BackupStorageLocation:
        """Return the BackupStorageLocation.

        Raises:
            RepositoryError: there is none of that name.
        """
        raw = await self._client.read(BACKUP_STORAGE_LOCATIONS, self._namespace, name)
        if raw is None:
            raise RepositoryError(f"BackupStorageLocation {self._namespace}/{name} does not exist")
        return BackupStorageLocation.parse(raw)

    async def repository(self, name: str) -> BackupRepository:
        """Return the BackupRepository of that name.

        Raises:
            RepositoryError: there is none.
        """
        raw = await self._client.read(BACKUP_REPOSITORIES, self._namespace, name)
        if raw is None:
            raise RepositoryError(f"BackupRepository {self._namespace}/{name} does not exist")
        return BackupRepository.parse(raw)

    async def location_secrets(self, location: BackupStorageLocation) -> LocationSecrets:
        """Return what the Secrets that the location names hold.

        Raises:
            RepositoryError: one of them, or its key, is not there.
        """
        credential: CredentialsText | None = None
        if named := location.spec.credential:
            value = await self._secret(named)
            credential = CredentialsText(value.decode(errors="replace"), f"Secret {self._namespace}/{named.name}")
        authority = location.spec.object_storage.ca_cert_ref
        ca_pem = await self._secret(authority) if authority else None
        return LocationSecrets(credential, ca_pem)

    async def password(self) -> str:
        """Return the password of all repositories, without white space around it.

        Raises:
            RepositoryError: its Secret is not there.
        """
        value = await self._secret(SecretKey(name=REPO_CREDENTIALS_SECRET, key=REPO_CREDENTIALS_KEY))
        return value.decode(errors="replace").strip()

    async def ensure_repository(
        self, volume_namespace: str, location: str, *, deadline: Deadline, on_wait: Callable[[str], Awaitable[None]]
    ) -> BackupRepository:
        """Return the Ready BackupRepository of the volumes of a namespace, made if there is none.

        `on_wait` is told what is waited for, if anything is, and what its controller says about it.

        Raises:
            RepositoryError: its controller could not make it ready; the message is the controller's.
                Or it is still not ready at the deadline.
        """
        told = ""
        while True:
            found = await self._find_repository(volume_namespace, location)
            shown = f"BackupRepository {self._namespace}/{found.name}"
            if found.phase is RepositoryPhase.READY:
                return found
            if found.phase is RepositoryPhase.NOT_READY:
                raise RepositoryError(
                    f"{shown} is not ready: {found.status.message or 'its controller told no reason'}"
                )
            if deadline.expired:
                raise RepositoryError(f"{shown} is still {found.phase}: no controller has made it ready in time")
            text = f"waiting for {shown}: {found.status.message or 'its controller has not made it ready yet'}"
            if text != told:
                await on_wait(text)
                told = text
            await self._wait_for_change(found, deadline)

    async def _wait_for_change(self, repository: BackupRepository, deadline: Deadline) -> None:
        """Return once the repository's phase or message is another one, it is gone, or the deadline has passed.

        Raises:
            KubeError: it cannot be watched.
        """
        name, known = repository.name, (repository.status.phase, repository.status.message)
        states = watch_one(self._client, BACKUP_REPOSITORIES, self._namespace, name=name, clock=self._clock)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_seconds), aclosing(states):
                async for raw in states:
                    if raw is None:
                        return
                    status = BackupRepository.parse(raw).status
                    if (status.phase, status.message) != known:
                        return

    async def _find_repository(self, volume_namespace: str, location: str) -> BackupRepository:
        """Return the one that labels or name find and whose spec fits, creating it where they find none.

        Raises:
            RepositoryError: what they find is for another namespace, location or type.
        """
        wanted = RepositoryKey(volume_namespace, location)
        selector = select_labels(repository_labels(volume_namespace, location))
        found = await self._client.list(Selection(BACKUP_REPOSITORIES, self._namespace, label_selector=selector))
        manifest = build_repository(self._namespace, volume_namespace, location)
        if not found:
            # Where the name exists, another data mover was first, it lacks the labels, or it is for something else.
            with suppress(AlreadyExistsError):
                return BackupRepository.parse(await self._client.create(BACKUP_REPOSITORIES, manifest))
        fitting = [BackupRepository.parse(raw) for raw in found if RepositoryKey.of(raw) == wanted]
        if fitting:
            return min(fitting, key=lambda repository: repository.name)
        name = manifest["metadata"]["name"]
        if found and await self._client.read(BACKUP_REPOSITORIES, self._namespace, name) is None:
            name = found[0]["metadata"]["name"]
        repository = await self.repository(name)
        repository.check_key(wanted)
        return repository

    async def _secret(self, wanted: SecretKey) -> bytes:
        shown = f"Secret {self._namespace}/{wanted.name}"
        raw = await self._client.read(SECRETS, self._namespace, wanted.name)
        if raw is None:
            raise RepositoryError(f"{shown} does not exist")
        encoded = (raw.get("data") or {}).get(wanted.key)
        if encoded is None:
            raise RepositoryError(f"{shown} has no key {wanted.key!r}")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as e:
            raise RepositoryError(f"{shown}: key {wanted.key!r} is not base64") from e


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
    limits: ResourceLimits
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
    redactor: Redactor,
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
    redactor.add(password, *reach.secrets(around.environment))
    own = {**reach.environment, "KOPIA_PASSWORD": password}
    kopia = Kopia(kopia_environment(around.environment, folder, own), redactor)
    shown = f"backup repository {repository.name} ({storage.description})"
    place = RepositoryPlace(shown, storage, reach)
    return Repository(kopia, place, folder, cache=parse_cache_limit(repository.spec.repository_config))
