"""What a data mover reads from the cluster and its pod, up to a kopia repository to connect to.

After a reboot of the node, the mover may start before the kubelet has mounted the volume again: it would back up an
empty directory, or restore into one.
Source: Kubernetes v1.34, the plugin names in pkg/volume/*; proc_pid_mountinfo(5).
"""

import asyncio
import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from core.clock import Clock, Deadline
from core.contract import SNAPSHOT_METADATA_TOKEN, TrackedSnapshot
from core.errors import AgentError, ConfigError, DataPathError, RepositoryError, StorageOutageError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import AlreadyExistsError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, SECRETS, Resource
from core.kube.transport import Retry
from core.kube.types import ObjectT
from core.kube.watch import watch_one
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET, REPOSITORY_ID_ANNOTATION
from core.models.storage import (
    BackupRepository,
    BackupStorageLocation,
    RepositoryKey,
    RepositoryPhase,
    SecretKey,
    build_backup_repository,
    repository_labels,
)
from core.models.transfer_settings import BandwidthLimits
from core.redact import Redactor
from datamover.data_path.parents import BlockChanges
from datamover.kopia.client_config import CacheLimit, parse_cache_limit
from datamover.kopia.location_files import LocationFiles
from datamover.kopia.process import Kopia
from datamover.kopia.repository import NotInitializedError, Repository, RepositoryAddress, build_kopia
from datamover.kopia.stalls import read_stall_limits
from datamover.kopia.storage_calls import WaitReporter, Waits
from datamover.runtime.cancellation import call_in_thread
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import WorkDir, open_work_dir
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import TEXT, CredentialsText, FileStorage, Storage

_T = TypeVar("_T")

MOUNTS: Final = Path("/proc/self/mountinfo")

_ROOT, _POINT = 3, 4
"""The fields of a line: the root of the mount within its file system, and the mount point."""

_NOT_MOUNTED: Final = re.compile(
    r"/pods/[^/]+/volumes/kubernetes\.io~(?:csi|local-volume|nfs|iscsi|fc|cephfs|rbd)/[^/]+(?:/mount)?(?://deleted)?$"
)
"""The root of a mount that is a mount point of the kubelet: these plugins mount every volume, with its own root. An
`emptyDir` is a plain directory, and a flexVolume driver decides for itself."""


def check_mounted(volume: Path, mounts: Path = MOUNTS) -> None:
    """Check that `volume`, a mount point of this process, is not a kubelet's own directory, without touching it.

    Raises:
        DataPathError: it is one.
    """
    lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    # If one point has several mounts, the last one is visible.
    roots = [fields[_ROOT] for line in lines if len(fields := line.split()) > _POINT and fields[_POINT] == str(volume)]
    if roots and _NOT_MOUNTED.search(roots[-1]):
        raise DataPathError(f"volume of the workload pod is not mounted on the node: {roots[-1]} is a plain directory")


_NO_PASSWORD: Final = "-"  # noqa: S105 - no password
"""kopia asks for a password before it finds that there is no repository. Too short to be redacted from a message."""

_SPACES: Final = "".join(one for one in map(chr, range(0x3001)) if one.isspace() and one not in "\x1c\x1d\x1e\x1f")
"""What kopia removes around a password. Source: Go 1.26, strings.TrimSpace."""

_CONTROLLER: Final = "its controller (the Velero server, even with 0 replicas of its Deployment; else the leader)"

_REESTABLISHED: Final = "re-establish on BSL change, create or delete"
"""What a Velero server says of a repository that is NotReady since its location was edited; it then opens it again.

Source: Velero v1.18, invalidateBackupReposForBSL in pkg/controller/backup_repository_controller.go.
"""

_REREAD: Final = timedelta(seconds=1)
"""The least time between two reads of a BackupRepository that is not Ready, after the first two."""

FORBIDDEN_SECONDS: Final = 20.0
"""After its start it answers 403 for some seconds until RBAC is loaded; a mover pod is not retried as a whole."""


@dataclass(frozen=True)
class ClusterReader:
    """Reads objects of the agent's namespace."""

    client: KubeClient
    clock: Clock
    namespace: str

    async def location(self, name: str) -> BackupStorageLocation:
        """Return the BackupStorageLocation. Raises RepositoryError if it does not exist."""
        return BackupStorageLocation.parse(await self._read(BACKUP_STORAGE_LOCATIONS, name))

    async def repository(self, name: str) -> BackupRepository:
        """Return the BackupRepository. Raises RepositoryError if it does not exist."""
        return BackupRepository.parse(await self._read(BACKUP_REPOSITORIES, name))

    async def place(self, name: str) -> tuple[BackupRepository, BackupStorageLocation]:
        """Return the BackupRepository, and its location. Raises RepositoryError if one does not exist."""
        found = await self.repository(name)
        return found, await self.location(found.spec.backup_storage_location)

    async def location_secrets(self, location: BackupStorageLocation) -> LocationSecrets:
        """Return the contents of the Secrets that the location references. Raises RepositoryError without one."""
        credential: CredentialsText | None = None
        if named := location.spec.credential:
            value = await self._secret(named)
            credential = CredentialsText(value.decode(TEXT, errors="replace"), f"Secret {self.namespace}/{named.name}")
        authority = location.spec.object_storage.ca_cert_ref
        ca_pem = await self._secret(authority) if authority else None
        return LocationSecrets(credential, ca_pem)

    async def password(self) -> str:
        """Return the password of all repositories, stripped. Raises RepositoryError without one."""
        value = await self._secret(SecretKey(name=REPO_CREDENTIALS_SECRET, key=REPO_CREDENTIALS_KEY))
        if b"\0" in value:
            raise RepositoryError(f"Secret {self.namespace}/{REPO_CREDENTIALS_SECRET}: the password has a zero byte")
        # It may be random bytes, which the environment of kopia then has.
        return os.fsdecode(value).strip(_SPACES)

    async def ensure_repository(
        self, volume_namespace: str, location: str, *, deadline: Deadline, reporter: WaitReporter
    ) -> BackupRepository:
        """Return the Ready BackupRepository for the volumes of a namespace; create it if there is none.

        `reporter` gets each new message of one that is not Ready yet, and the end of the wait.

        Raises:
            RepositoryError: its controller could not make it Ready, and says why, or did not before the deadline.
        """
        reported, next_read = "", Deadline.after(self.clock, timedelta())
        while True:
            found = await self._find_repository(volume_namespace, location)
            name = f"BackupRepository {self.namespace}/{found.name}"
            if found.phase is RepositoryPhase.READY:
                if reported:
                    await reporter.ready(f"{name} is ready")
                return found
            if found.phase is RepositoryPhase.NOT_READY and found.status.message != _REESTABLISHED:
                raise RepositoryError(f"{name} is not ready: {found.status.message or 'its controller gave no reason'}")
            if deadline.expired:
                why = found.status.message or f"{_CONTROLLER} did not make it ready in time"
                raise RepositoryError(f"{name} is still {found.phase}: {why}")
            text = f"waiting for {name}: {found.status.message or f'{_CONTROLLER} has not made it ready yet'}"
            if text != reported:
                await reporter.waiting(text)
                reported = text
            await self._wait_for_change(found, deadline)
            # A status that changes all the time, or that list and watch show differently, must not load the API server.
            await self.clock.sleep(next_read.remaining_seconds)
            next_read = Deadline.after(self.clock, _REREAD)

    async def _wait_for_change(self, repository: BackupRepository, deadline: Deadline) -> None:
        """Return when the repository's phase or message has changed, it was deleted, or the deadline has passed."""
        name, known = repository.name, (repository.status.phase, repository.status.message)
        states = watch_one(self.client, BACKUP_REPOSITORIES, self.namespace, name=name, clock=self.clock)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_seconds), aclosing(states):
                async for raw in states:
                    if raw is None:
                        return
                    status = BackupRepository.parse(raw).status
                    if (status.phase, status.message) != known:
                        return

    async def _find_repository(self, volume_namespace: str, location: str) -> BackupRepository:
        """Return the BackupRepository that labels or name select and whose spec matches; create it if there is none."""
        wanted = RepositoryKey(volume_namespace, location)
        selector = select_labels(repository_labels(volume_namespace, location))
        found = await self.client.list(Selection(BACKUP_REPOSITORIES, self.namespace, label_selector=selector))
        manifest = build_backup_repository(self.namespace, wanted)
        if not found:
            # If the name exists, another mover created it meanwhile, it lacks the labels, or its spec differs.
            with suppress(AlreadyExistsError):
                return BackupRepository.parse(await self.client.create(BACKUP_REPOSITORIES, manifest))
        if matching := [BackupRepository.parse(raw) for raw in found if RepositoryKey.of(raw) == wanted]:
            return min(matching, key=lambda repository: repository.name)
        name = manifest["metadata"]["name"]
        if found and await self.client.read(BACKUP_REPOSITORIES, self.namespace, name) is None:
            name = found[0]["metadata"]["name"]
        repository = await self.repository(name)
        repository.check_key(wanted)
        return repository

    async def _read(self, resource: Resource[ObjectT], name: str) -> ObjectT:
        if (raw := await self.client.read(resource, self.namespace, name)) is None:
            raise RepositoryError(f"{resource.kind} {self.namespace}/{name} does not exist")
        return raw

    async def _secret(self, wanted: SecretKey) -> bytes:
        shown = f"Secret {self.namespace}/{wanted.name}"
        encoded = ((await self._read(SECRETS, wanted.name)).get("data") or {}).get(wanted.key)
        if encoded is None:
            raise RepositoryError(f'{shown} has no key "{wanted.key}"')
        try:
            return base64.b64decode(encoded, validate=True)
        except ValueError as e:
            raise RepositoryError(f'{shown}: key "{wanted.key}" is not base64') from e


@dataclass(frozen=True)
class PodContext:
    """What a data mover uses of its pod; `token` is the file with its token for `SnapshotMetadata`."""

    client: KubeClient
    clock: Clock
    namespace: str
    node: str
    environment: Mapping[str, str] = field(repr=False)
    limits: ResourceLimits
    stop: StopSignal
    termination_file: Path
    mounts: Path = MOUNTS
    token: Path = Path(SNAPSHOT_METADATA_TOKEN)
    redactor: Redactor = field(default_factory=Redactor, repr=False)

    @property
    def patient_client(self) -> KubeClient:
        """The client to use before data moves; it retries for minutes, since a mover pod is not retried as a whole."""
        return KubeClient(self.client.transport, Retry(self.clock, forbidden_seconds=FORBIDDEN_SECONDS).patient)

    @property
    def reader(self) -> ClusterReader:
        """The reader to use before data moves."""
        return ClusterReader(self.patient_client, self.clock, self.namespace)

    def with_go_settings(self, restore_workers: int = 0) -> Self:
        """Return a copy with settings of the Go runtime for a restore with so many workers, or for a backup (0)."""
        settings = self.limits.go_settings(self.environment, restore_workers=restore_workers)
        return replace(self, environment={**self.environment, **settings})


_ANSWER_SECONDS: Final = 300
"""How long a storage may take to say what has changed, or what a directory has: less than a data path may stall."""


def build_changes(context: PodContext, tracked: TrackedSnapshot | None) -> BlockChanges | None:
    """Return how the storage knows the device of a backup by block; None: it does not.

    The token is read at the last moment, since the kubelet renews it; without one, the storage refuses to answer.
    """
    if tracked is None or (service := tracked.metadata) is None:
        return None if tracked is None else BlockChanges(tracked.change_id, tracked.volume_id)

    def query() -> JsonDict:
        token = context.token.read_text().strip() if context.token.exists() else ""
        context.redactor.add(token)
        return {
            "address": service.address,
            "ca": base64.b64decode(service.ca_cert).decode(errors="replace"),
            "token": token,
            "namespace": context.namespace,
            "snapshot": tracked.snapshot_id,
            "timeout_seconds": _ANSWER_SECONDS,
        }

    return BlockChanges(tracked.change_id, tracked.volume_id, query)


async def _build_storage(context: PodContext, location: BackupStorageLocation, volume_namespace: str) -> Storage:
    secrets = await context.reader.location_secrets(location)
    return build_storage(location, volume_namespace, secrets=secrets, environment=context.environment)


async def resolve_storage(context: PodContext, location: BackupStorageLocation) -> Storage:
    """Return a path in the location's storage without a repository. Raises RepositoryError if it cannot be used."""
    return (await _build_storage(context, location, "")).for_probe()


@dataclass(frozen=True)
class RepositoryAccess:
    """What one repository is opened with: kopia's environment and files, how to wait, limits for a file system."""

    context: PodContext
    work_dir: WorkDir
    waits: Waits
    throttle: BandwidthLimits | None = None

    async def resolve(
        self, location: BackupStorageLocation, wanted: BackupRepository, *, recorded: bool = False
    ) -> Repository:
        """Return the kopia repository of the BackupRepository, not yet connected; if one was `recorded`, only that one.

        Raises:
            RepositoryError: the location, its credentials or the password cannot be used, or the
                BackupRepository is for another location or of another type.
        """
        volume_namespace = wanted.spec.volume_namespace
        wanted.check_key(RepositoryKey(volume_namespace, location.name))
        limit = parse_cache_limit(wanted.spec.repository_config)
        unique_id = wanted.metadata.annotations.get(REPOSITORY_ID_ANNOTATION) if recorded else None
        name = f"backup repository {wanted.name}"
        return await self.resolve_namespace(location, volume_namespace, name=name, cache=limit, unique_id=unique_id)

    async def resolve_namespace(
        self,
        location: BackupStorageLocation,
        volume_namespace: str,
        *,
        name: str | None = None,
        cache: CacheLimit | None = None,
        unique_id: str | None = None,
    ) -> Repository:
        """Return the kopia repository for the volumes of a namespace, not yet connected; raises as `resolve`.

        `name` is for messages; None: it has the namespace. It must have `unique_id`; None: any.
        """
        storage = await _build_storage(self.context, location, volume_namespace)
        storage, kopia = await self._give_access(storage, await self.context.reader.password())
        # Nothing else can limit what kopia writes to a file system.
        throttle = self.throttle if isinstance(storage, FileStorage) else None
        described = f"{name or f'repository of namespace {volume_namespace}'} ({storage.description})"
        address = RepositoryAddress(described, storage, throttle, unique_id)
        limit = (cache or CacheLimit()).at_most(self.work_dir.cache_limit_mib)
        waits = replace(self.waits, find_change=partial(self._find_change, location))
        return Repository(kopia, address, self.work_dir, cache=limit, waits=waits)

    async def _find_change(self, location: BackupStorageLocation) -> str | None:
        """Return that the location leads to another storage than when it was read; None: it does not, or is unread."""
        reader, old = replace(self.context.reader, client=self.context.client), location.spec
        with suppress(AgentError):
            new = (await reader.location(location.name)).spec
            if (new.provider, new.config, new.object_storage) != (old.provider, old.config, old.object_storage):
                return f"BackupStorageLocation {location.name} was changed meanwhile"
        return None

    async def check_storage(self, storage: Storage) -> None:
        """Return if the storage answers and accepts the credentials; nothing is written to it.

        Connecting to a path without a repository shows what connecting to one would, up to its password.

        Raises:
            RepositoryError: it does not; the message names the cause.
        """
        if isinstance(storage, FileStorage):
            # kopia would write a file of its own to it.
            await ask_directory(storage.check_root)
            return
        storage, kopia = await self._give_access(storage, _NO_PASSWORD)
        address = RepositoryAddress(storage.description, storage)
        repository = Repository(kopia, address, self.work_dir, waits=self.waits)
        with suppress(NotInitializedError):
            await repository.connect(read_only=True)

    async def list_volume_namespaces(self, location: BackupStorageLocation) -> list[str] | None:
        """Return the folders in which the location's repositories are, by their namespaces; None: they are unknown.

        Raises:
            RepositoryError: the location or its credentials cannot be used.
            DataPathError: the storage does not answer.
        """
        storage = await _build_storage(self.context, location, "")
        if isinstance(storage, FileStorage):
            await ask_directory(storage.check_root)
            return await ask_directory(storage.list_folders)
        storage, kopia = await self._give_access(storage, _NO_PASSWORD)
        if (config := storage.config()) is None:
            return None
        files = LocationFiles(kopia, self.work_dir, f"list {storage.description}")
        await files.prepare(config)
        return await files.list_folders()

    async def _give_access(self, storage: Storage, password: str) -> tuple[Storage, Kopia]:
        """Return the storage with all credentials, and kopia with access to it; secrets are redacted from now on."""
        context = self.context
        storage = await storage.with_fetched_credentials(context.clock, context.redactor)
        return storage, build_kopia(storage, self.work_dir, context.environment, password, context.redactor)


async def ask_directory(ask: Callable[[], _T]) -> _T:
    """Return what `ask` returns in a thread, which is abandoned if a file system does not answer.

    Raises:
        StorageOutageError: it does not.
        RepositoryError: `ask` has raised a ConfigError.
    """
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await call_in_thread(ask, name="directory")
    except TimeoutError as e:
        raise StorageOutageError(f"the location's directory did not answer for {_ANSWER_SECONDS} s") from e
    except ConfigError as e:
        raise RepositoryError(str(e)) from e


@contextmanager
def open_access(context: PodContext, reporter: WaitReporter | None = None) -> Iterator[RepositoryAccess]:
    """Yield what one repository is opened with; its directory is removed at the end.

    Each needs its own: kopia would find the format of another one in its cache. `reporter`: None logs waits.

    Raises:
        ConfigError: no directory is writable, or a limit in the environment is invalid.
    """
    with open_work_dir(context.environment) as work_dir:
        settings = context.limits.maintenance_settings(context.environment)
        environment = {**context.environment, **settings, "TMPDIR": str(work_dir.path)}
        waits = Waits(context.clock, read_stall_limits(environment), reporter or WaitReporter())
        yield RepositoryAccess(replace(context, environment=environment), work_dir, waits)
