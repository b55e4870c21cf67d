"""The controller of BackupRepositories and of their password's Secret, for namespaces without a Velero server."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from core.clock import Deadline
from core.contract import InitResult, parse_result
from core.errors import AgentError, ContractError, RepositoryError
from core.kube.client import Selection, select_labels
from core.kube.errors import AlreadyExistsError, ForbiddenError, InvalidError, KubeError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS, SECRETS
from core.kube.types import Pod, RepositoryObject
from core.kube.velero_server import VeleroServerCheck
from core.logs import fields
from core.models import names
from core.models.base import JsonDict, format_time
from core.models.storage import (
    REPOSITORY_TYPE,
    BackupRepository,
    BackupStorageLocation,
    BlockHash,
    RepositoryKey,
    RepositoryPhase,
    build_backup_repository,
    repository_labels,
    repository_name,
)
from core.models.units import format_duration
from core.redact import redact
from exposer.model import Pending
from exposer.ownership import diagnose_rejection
from nodeagent.leader.context import Cluster
from nodeagent.leader.repositories.init_pod import INIT_POD_SELECTOR, InitPods, InitState, read_init_pod, start_init_pod
from nodeagent.leader.repositories.inputs import CHECK_SECONDS, LocationInputs, RepositoryRetries
from nodeagent.maintenance.rules import DEFAULT_FREQUENCY
from nodeagent.metrics import REPOSITORY_READY
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.settings import RepositoryControllerMode
from nodeagent.runtime.workqueue import ObjectSteps, Requeue, WorkQueue, run_restarting

_log = logging.getLogger(__name__)

_NO_FREQUENCY: Final = frozenset({"", "0", "0s"})

_EARLY: Final = timedelta(minutes=10)
"""After a repository was created for a transfer that was just accepted: as long as its mover would wait."""

_WORKING_SECONDS: Final = 10.0
_SERVER_SECONDS: Final = 60.0
_WORKERS: Final = 8


class _Identity(NamedTuple):
    """What is kept of a BackupRepository, and whether it was ever Ready; the rest is read when needed."""

    name: str
    uid: str
    key: RepositoryKey
    opened: bool


def _identify(raw: RepositoryObject) -> _Identity:
    opened = "lastMaintenanceTime" in (raw.get("status") or {})
    return _Identity(raw["metadata"]["name"], raw["metadata"]["uid"], RepositoryKey.of(raw), opened)


@dataclass(eq=False)
class RepositoryController:
    """Makes BackupRepositories Ready while this agent is the leader.

    Those in the namespace of `server`, if `mode` allows, by `pods` of this controller alone.

    Attributes:
        new_settings: returns what repositories that are created now get as `repositoryConfig`.
        block_hash: returns the hash of a repository that is created now; None: kopia's default.
        frequency: how often repositories without a `maintenanceFrequency` are maintained; not positive: every hour.
    """

    cluster: Cluster
    pods: InitPods
    _: KW_ONLY
    server: VeleroServerCheck
    mode: RepositoryControllerMode
    new_settings: Callable[[], Awaitable[Mapping[str, str]]]
    block_hash: Callable[[], Awaitable[BlockHash | None]]
    frequency: timedelta = timedelta()

    def __post_init__(self) -> None:
        self._namespace = self.server.namespace
        self._retries = RepositoryRetries(self.cluster.clock)
        kind, failed = BACKUP_REPOSITORIES.kind, "reconciling the repository failed"
        self._steps = ObjectSteps(_log, kind=kind, namespace=self._namespace, failed=failed)
        self._begin()

    def _begin(self) -> None:
        """Begin a term: nothing of an earlier one counts, since another leader may have checked meanwhile."""
        client, clock = self.cluster.client, self.cluster.clock
        selection = Selection(BACKUP_REPOSITORIES, self._namespace)
        self._queue: WorkQueue[str] = WorkQueue(clock, name="repositories", workers=_WORKERS)
        self._repositories = Informer(client, selection, clock=clock, trim=_identify, on_change=self._observe)
        self._inputs = LocationInputs(client, clock, self._namespace, self._enqueue_all_of)
        self._absent: dict[str, RepositoryKey] = {}
        self._early: dict[str, Deadline] = {}

    async def run(self) -> None:
        """Control the repositories until canceled, unless the mode is OFF."""
        if self.mode is RepositoryControllerMode.OFF:
            await asyncio.Event().wait()
        await run_restarting(self._run_once, self.cluster.clock, name="repository controller")

    async def _run_once(self) -> None:
        """Control the repositories until canceled, or until a first list is rejected."""
        cluster = self.cluster
        self._begin()
        init_pods = Selection(PODS, self._namespace, INIT_POD_SELECTOR)
        pods = Informer(cluster.client, init_pods, clock=cluster.clock, trim=_owners_of, on_change=self._enqueue)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repositories.run(), name="repositories")
            group.create_task(pods.run(), name="init pods")
            group.create_task(self._inputs.run(), name="inputs of repositories")
            await self._repositories.synced.wait()
            try:
                if await self._in_charge():
                    cluster.check_leading()
                    await self._ensure_password()
            except AgentError as e:
                _log.warning("could not ensure the repository password Secret, will retry: %s", e)
            await self._queue.run(lambda name: self._steps.take(name, self._read_and_reconcile(name)))

    def _observe(self, changed: _Identity) -> None:
        """Enqueue a changed repository; forget the attempts of one that was deleted."""
        current = self._repositories.get(self._namespace, changed.name)
        if current is None or current.uid != changed.uid:
            self._retries.forget(changed.uid)
        self._queue.add(changed.name)

    def _enqueue(self, names: Iterable[str]) -> None:
        for name in names:
            self._queue.add(name)

    def _enqueue_all_of(self, location: str) -> None:
        self._enqueue(one.name for one in self._repositories.items() if one.key.location == location)

    def _forget(self, name: str) -> None:
        self._early.pop(name, None)
        self.pods.forget(name)
        self.cluster.metrics.forget(REPOSITORY_READY, repository_name=name)

    def request(self, volume_namespace: str, location: str) -> None:
        """Record that a transfer needs a repository now: a NotReady one is retried soon, an absent one is created.

        The transfer's mover would create it only once it runs; meanwhile its volume is exposed.
        """
        wanted = RepositoryKey(volume_namespace, location)
        found = [one for one in self._repositories.items() if one.key == wanted]
        if not found:
            self._absent[name := repository_name(volume_namespace, location)] = wanted
            self._queue.add(name)
        for one in found:
            if self._retries.request(one.uid):
                self._queue.add(one.name)

    def bring_forward(self) -> None:
        """Retry soon what failed: the API server answers again."""
        self._queue.bring_forward()

    async def _read_and_reconcile(self, name: str) -> Requeue | None:
        raw = await self.cluster.client.read(BACKUP_REPOSITORIES, self._namespace, name)
        if raw is not None:
            self._absent.pop(name, None)
            return await self._reconcile(BackupRepository.parse(raw))
        self._forget(name)
        if (wanted := self._absent.get(name)) is not None:
            await self._create(wanted)
            self._absent.pop(name, None)
        return None

    async def _create(self, wanted: RepositoryKey) -> None:
        """Create a repository, unless there is one of another name, or its mover would not create it.

        Where only movers may create it, or its name is invalid, the transfer's mover does, or reports that.
        """
        client, repository = self.cluster.client, build_backup_repository(self._namespace, wanted)
        raw = await client.read(BACKUP_STORAGE_LOCATIONS, self._namespace, wanted.location)
        if raw is None or BackupStorageLocation.parse(raw).read_only:
            return
        labels = select_labels(repository_labels(wanted.volume_namespace, wanted.location))
        if await client.list(Selection(BACKUP_REPOSITORIES, self._namespace, label_selector=labels)):
            return
        self.cluster.check_leading()
        # Before it is created: the answer may be lost.
        self._early[repository["metadata"]["name"]] = Deadline.after(self.cluster.clock, _EARLY)
        with suppress(AlreadyExistsError, ForbiddenError, InvalidError):
            await client.create(BACKUP_REPOSITORIES, repository)

    async def _reconcile(self, repository: BackupRepository) -> Requeue | None:
        if repository.deleting or repository.key.repository_type != REPOSITORY_TYPE:
            return None
        # Also of one that was left to a server meanwhile.
        self.cluster.metrics.set(REPOSITORY_READY, repository.phase is RepositoryPhase.READY, repository.name)
        if not await self._in_charge():
            return None if repository.phase is RepositoryPhase.READY else Requeue(_SERVER_SECONDS)
        self.cluster.check_leading()
        try:
            return await self._control(await self._complete(repository))
        except (ContractError, ForbiddenError) as e:
            if repository.phase is RepositoryPhase.NEW:
                await self._report_pending(repository, Pending("NotReady", str(e), blocked=True))
            raise

    async def _control(self, repository: BackupRepository) -> Requeue | None:
        """Take the next step; ContractError, ForbiddenError: what it depends on cannot be read, or created."""
        pod = await read_init_pod(self.cluster.client, repository)
        if pod is not None:
            return await self._follow(repository, pod)
        self.pods.forget(repository.name)
        if repository.phase is RepositoryPhase.READY:
            return await self._check_again(repository)
        inputs = await self._inputs.of(repository.spec.backup_storage_location, within_seconds=CHECK_SECONDS)
        failed = repository.phase is RepositoryPhase.NOT_READY or self._is_early(repository)
        if failed and not self._retries.is_due(repository.uid, inputs):
            return Requeue(self._retries.pause_seconds)
        return await self._attempt(repository, inputs)

    async def _check_again(self, repository: BackupRepository) -> Requeue | None:
        """Check a Ready repository again if its location, credentials or password have changed since it was opened."""
        inputs = await self._inputs.of(repository.spec.backup_storage_location)
        opened = repository.metadata.annotations.get(names.REPOSITORY_INPUTS_ANNOTATION)
        if opened == inputs:
            return None
        if not opened:
            # A Velero server or an earlier version made it Ready.
            await self._patch(repository, {}, {names.REPOSITORY_INPUTS_ANNOTATION: inputs})
            return None
        text = "its backup storage location, credentials or password have changed: checking it again"
        await self.cluster.events.record(repository, "Checking", text)
        return await self._attempt(repository, inputs)

    async def _attempt(self, repository: BackupRepository, inputs: str) -> Requeue | None:
        """Start an init pod. Transfers that need the repository wait for it, instead of failing with the last cause."""
        if not await self._in_charge(fresh=True):
            return Requeue(_SERVER_SECONDS)
        if await self._ensure_password():
            inputs = await self._read_inputs(repository)
        change: JsonDict = {}
        if repository.phase is not RepositoryPhase.NEW:
            change["status"] = {"phase": RepositoryPhase.NEW, "message": None}
        if change or repository.metadata.annotations.get(names.REPOSITORY_INPUTS_ANNOTATION) != inputs:
            # Before the attempt: what changes during it is checked again after it.
            repository = await self._patch(repository, change, {names.REPOSITORY_INPUTS_ANNOTATION: inputs})
        self._retries.begin(repository.uid, inputs)
        return await self._start(repository)

    async def _ensure_password(self) -> bool:
        """Ensure that the repository password exists before the first repository; return whether it did not.

        One that was lost later is not replaced: new repositories would be encrypted with the published default.
        Source: Velero v1.18, pkg/repository/keys/keys.go (EnsureCommonRepositoryKey).
        """
        client, namespace, name = self.cluster.client, self._namespace, names.REPO_CREDENTIALS_SECRET
        opened = any(one.opened for one in self._repositories.items())
        if opened or await client.read(SECRETS, namespace, name) is not None:
            return False
        data = {names.REPO_CREDENTIALS_KEY: base64.b64encode(names.REPO_DEFAULT_PASSWORD.encode()).decode()}
        secret = SECRETS.build({"name": name, "namespace": namespace}, type="Opaque", data=data)
        # If it was created concurrently, that password counts.
        with suppress(AlreadyExistsError):
            await client.create(SECRETS, secret)
            extra = fields(kind=SECRETS.kind, namespace=namespace, name=name)
            _log.info("created the repository password Secret with the default password", extra=extra)
        return True

    async def _read_inputs(self, repository: BackupRepository) -> str:
        return await self._inputs.of(repository.spec.backup_storage_location, within_seconds=0)

    async def _complete(self, repository: BackupRepository) -> BackupRepository:
        """Set defaults; a repository that was ready once keeps its values."""
        spec: JsonDict = {}
        if repository.spec.maintenance_frequency in _NO_FREQUENCY:
            spec["maintenanceFrequency"] = format_duration(max(self.frequency, timedelta()) or DEFAULT_FREQUENCY)
        new = repository.phase is RepositoryPhase.NEW and repository.status.last_maintenance_time is None
        if new and not repository.spec.repository_config and (settings := await self.new_settings()):
            spec["repositoryConfig"] = dict(settings)
        return await self._patch(repository, {"spec": spec}) if spec else repository

    async def _start(self, repository: BackupRepository) -> Requeue | None:
        self.cluster.check_leading()
        try:
            block_hash = await self.block_hash()
            await start_init_pod(self.cluster.client, repository, self.pods.settings(), block_hash)
        except (ForbiddenError, InvalidError, RepositoryError) as e:
            if isinstance(e, KubeError) and (pending := diagnose_rejection(e)):
                # Its movers wait for the account too.
                await self._report_pending(repository, pending)
                return Requeue(_WORKING_SECONDS)
            await self._fail(repository, str(e))
            return Requeue(self._retries.pause_seconds)
        return Requeue(_WORKING_SECONDS)

    async def _follow(self, repository: BackupRepository, pod: Pod) -> Requeue | None:
        """Write the result of the init pod, then delete the pod."""
        report = await self.pods.inspect(repository, pod)
        if report.state is InitState.UNSCHEDULABLE:
            return Requeue(_WORKING_SECONDS)
        unfinished = report.state in {InitState.WORKING, InitState.TERMINATING}
        if unfinished and report.pending is not None:
            await self._report_pending(repository, report.pending)
        started = repository.metadata.annotations.get(names.REPOSITORY_INPUTS_ANNOTATION)
        outdated = report.state is not InitState.TERMINATING and bool(started)
        outdated = outdated and started != await self._inputs.of(repository.spec.backup_storage_location)
        if unfinished and not outdated:
            # The watch reports changes; this is for what depends on time.
            return Requeue(_WORKING_SECONDS)
        if outdated:
            # It may wait for long for a storage that the location does not name any more, or have opened that.
            _log.info("init pod is replaced: location, credentials or password have changed since it was started")
        elif report.state is InitState.SUCCEEDED:
            await self._succeed(repository, parse_result(InitResult, report.message))
        elif self._is_early(repository) and not report.by_mover:
            await self._fail_early(repository, report.message)
        else:
            await self._fail(repository, report.message, by_mover=report.by_mover)
        await self.pods.delete(repository, pod)
        return Requeue(self._retries.pause_seconds)

    async def _report_pending(self, repository: BackupRepository, pending: Pending) -> None:
        """Report on the repository why its init pod is blocked; transfers that wait for it repeat that."""
        message = redact(self._retries.explain(repository.uid, pending.message))
        if pending.blocked and message != repository.status.message:
            stored = await self._patch(repository, {"status": {"message": message}})
            await self.cluster.events.record(stored, pending.reason, message, warning=True)

    async def _succeed(self, repository: BackupRepository, result: InitResult) -> None:
        if repository.phase is RepositoryPhase.READY:
            return
        status: JsonDict = {"phase": RepositoryPhase.READY, "message": None}
        if repository.status.last_maintenance_time is None:
            # A new repository needs no maintenance before its first interval has passed.
            status["lastMaintenanceTime"] = format_time(self.cluster.clock.now())
        last_id = repository.metadata.annotations.get(names.REPOSITORY_ID_ANNOTATION, result.unique_id)
        # One that was just created has replaced no other: there was none.
        annotations = {names.REPOSITORY_ID_ANNOTATION: result.unique_id if result.created else last_id}
        if result.created:
            annotations[names.REPOSITORY_CREATED_ANNOTATION] = "true"
        stored = await self._patch(repository, {"status": status}, annotations)
        self._retries.forget(stored.uid)
        self.cluster.metrics.set(REPOSITORY_READY, 1, stored.name)
        await self.cluster.events.record(stored, "Ready", "backup repository is ready")
        if result.unique_id != last_id:
            key = names.REPOSITORY_ID_ANNOTATION
            what = f"backups fail and nothing is maintained until annotation {key} is removed"
            if result.created:
                what = "it was empty, so the snapshots of earlier backups are lost"
            text = f"the location has another repository than before (ID {result.unique_id}, was {last_id}): {what}"
            await self.cluster.events.record(stored, "DifferentRepository", text, warning=True)

    async def _fail(self, repository: BackupRepository, message: str, *, by_mover: bool = False) -> None:
        cause = message if by_mover else None
        message = redact(cause or self._retries.explain(repository.uid, message))
        reported = (repository.phase, repository.status.message) == (RepositoryPhase.NOT_READY, message)
        if not reported and repository.phase is not RepositoryPhase.READY:
            status = {"phase": RepositoryPhase.NOT_READY, "message": message}
            repository = await self._patch(repository, {"status": status})
            self.cluster.metrics.set(REPOSITORY_READY, 0, repository.name)
            await self.cluster.events.record(repository, "NotReady", message, warning=True)
        self._retries.fail(repository.uid, await self._read_inputs(repository), cause=cause)

    def _is_early(self, repository: BackupRepository) -> bool:
        """Whether a transfer that was just accepted needs the repository, and its mover may not run for minutes."""
        deadline = self._early.get(repository.name)
        return deadline is not None and not deadline.expired

    async def _fail_early(self, repository: BackupRepository, message: str) -> None:
        """Report a failure that is not the storage's, and attempt again soon.

        A mover that starts meanwhile would fail with a NotReady repository. What kept the init pod from running, such
        as a full cluster, may be over by then.
        """
        message = redact(message)
        if repository.status.message != message:
            repository = await self._patch(repository, {"status": {"message": message}})
        self._retries.fail(repository.uid, await self._read_inputs(repository))
        self._retries.request(repository.uid)

    async def _in_charge(self, *, fresh: bool = False) -> bool:
        """Return whether this controller is in charge: by the mode, or because there is no Velero server."""
        if self.mode is not RepositoryControllerMode.AUTO:
            return self.mode is RepositoryControllerMode.ON
        return not await self.server.finds(fresh=fresh)

    async def _patch(
        self, repository: BackupRepository, change: JsonDict, annotations: Mapping[str, str] | None = None
    ) -> BackupRepository:
        """Write to a repository that has not changed; return it as stored."""
        self.cluster.check_leading()
        if annotations:
            change = change | {"metadata": {"annotations": dict(annotations)}}
        client = self.cluster.client
        return BackupRepository.parse(await client.patch_if_unchanged(BACKUP_REPOSITORIES, repository.metadata, change))


def _owners_of(pod: Pod) -> list[str]:
    """Return the names of the repositories that own the pod; its state is read when needed."""
    owners = pod["metadata"].get("ownerReferences") or []
    return [owner["name"] for owner in owners if owner["kind"] == BACKUP_REPOSITORIES.kind]
