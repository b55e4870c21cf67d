"""Jobs of data movers that a command starts, waits for and deletes: they only read, and report in log and result.

Needs the user's permissions to create, get and delete Jobs, to list pods, and to get `pods/log`.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

from client.installation import find_last_warning, read_named, read_settings
from client.session import REQUEST_TIMEOUT, Session, StepTimeoutError
from core.clock import Deadline
from core.errors import AgentError, ResultError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, KubeError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, JOBS
from core.kube.types import Job, Manifest, Pod
from core.models.base import WireModel
from core.models.job_output import OutputLine, read_output
from core.models.names import MAINTENANCE_CONTAINER
from core.models.storage import BackupRepository, BackupStorageLocation, RepositoryKey
from core.models.units import format_duration
from core.mover_specs import MoverSpec
from exposer.causes import CauseFinder
from exposer.model import Owner
from exposer.pod_manifest import MoverVolume
from exposer.pod_status import PodEnd, explain_exit, parse_pod_end
from exposer.pods import MaintenanceRun, build_command_job
from exposer.settings import StorageAccess
from nodeagent.config.expose_settings import build_defaults, build_expose_settings, read_template
from nodeagent.config.parse import read_config
from nodeagent.config.repositories import MaintenanceConfig
from nodeagent.maintenance.jobs import DEADLINE, POD_DELETED, MaintenanceJob, read_pod
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import decide_memory, record_of

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=WireModel)

_POLL_SECONDS: Final = 2.0
_KEEP_TIMEOUT: Final = timedelta(minutes=5)

_LOG_LIMIT_BYTES: Final = 15 << 20
"""Some 40,000 snapshots; the transport refuses a response of 16 MiB."""

_NAME_CHARACTERS: Final = 40
"""Characters of the subject's name in the Job's, which has at most 63: a label of its pod has it as value."""


class JobError(AgentError):
    """The Job failed, or did not start or end in time."""


class JobTimeoutError(JobError):
    """The Job did not start or end in time."""


@dataclass(frozen=True)
class JobSubject:
    """What a Job is about: a BackupRepository or a BackupStorageLocation, and the key of its configuration.

    `what` is a word for its name, `location` has its data. `record` says how much memory earlier Jobs took.
    """

    owner: Owner
    what: str
    key: RepositoryKey
    location: BackupStorageLocation
    record: MaintenanceRecord = dataclasses.field(default_factory=MaintenanceRecord)


class IncompleteLogError(JobError):
    """The log of the Job lacks results."""


@dataclass(frozen=True)
class JobAnswer:
    """The termination message and the log of a pod that ended with 0; `source` names the pod, for messages."""

    message: str
    log: str
    source: str

    def find(self, kind: OutputLine[_Model]) -> list[_Model]:
        """Return the objects of one kind that the pod wrote.

        Raises:
            IncompleteLogError: the log does not have all that it wrote, of any kind.
            ContractError: the termination message is invalid, or from agents of an older version.
        """
        with Translated(ResultError, IncompleteLogError, self.source):
            return read_output(kind, self.message, self.log)


async def read_location(client: KubeClient, namespace: str, name: str) -> BackupStorageLocation:
    """Return the BackupStorageLocation.

    Raises:
        NotFoundError: it does not exist; the message has the name that may be meant.
        ContractError: it is invalid.
    """
    return BackupStorageLocation.parse(await read_named(client, BACKUP_STORAGE_LOCATIONS, namespace, name))


async def find_subject(tools: Session, what: str, location_name: str, volume_namespace: str = "") -> JobSubject:
    """Return a location as the subject of a Job, which may be about the repository of one namespace in it.

    Raises:
        NotFoundError: it does not exist; the message has the name that may be meant.
        ContractError: it is invalid.
    """
    location = await read_location(tools.client, tools.namespace, location_name)
    return JobSubject(Owner.of(location), what, RepositoryKey(volume_namespace, location_name), location)


async def find_subject_of(tools: Session, what: str, repository: BackupRepository) -> JobSubject:
    """Return a repository as the subject of a Job; raises the same."""
    location = await read_location(tools.client, tools.namespace, repository.key.location)
    return JobSubject(Owner.of(repository), what, repository.key, location, record_of(repository))


async def plan_job(
    tools: Session,
    subject: JobSubject,
    spec: MoverSpec,
    *,
    longest: timedelta | None = None,
    volume: MoverVolume | None = None,
) -> Manifest:
    """Return the manifest of the Job, with the settings that the leader's own Jobs have.

    A verification may take `longest`. What compares a volume mounts `volume`.

    Raises:
        ConfigError: no agent is installed, or its configuration cannot be read.
    """
    client, namespace = tools.client, tools.namespace
    settings = await read_settings(client, namespace)
    config = await read_config(client, namespace, settings.config_map_name)
    defaults = build_defaults(settings, await read_template(client, namespace))
    expose = build_expose_settings(defaults, config.config, priority_class=None, cache_limit_mib=0)
    configured = await MaintenanceConfig(client, namespace, settings.maintenance_config_map).settings_for(subject.key)
    job = configured.job
    if job.resources is None:
        memory = decide_memory(subject.record, may_be_full=True, most_bytes=configured.memory_limit_max_bytes)
        job = dataclasses.replace(job, resources=memory.resources)
    name = f"{subject.owner.name[:_NAME_CHARACTERS].rstrip('.-')}-{subject.what}-{secrets.token_hex(4)}"
    if longest is not None:
        job = dataclasses.replace(job, active_deadline=longest)
    run = MaintenanceRun(subject.owner, name, job, StorageAccess.of(subject.location), volume=volume)
    return build_command_job(run, expose, spec)


async def run_job(
    tools: Session,
    manifest: Manifest,
    what: str,
    timeout: timedelta,
    on_log: Callable[[str], Awaitable[None]] | None = None,
) -> JobAnswer:
    """Run the Job and return its answer; `what` is a word for messages.

    The Job is deleted in any case, also after a cancellation; if that fails, `on_note` gets the command that does it.
    Before that, `on_log` gets the log of its pod, if there is one: whether the Job ended as it should or not.

    Raises:
        JobError: the Job failed, or did not start or end in time.
        ExposeError: its pod can never start.
    """
    async with open_job(tools, manifest) as job:
        try:
            pod, end = await _wait(tools, job, timeout, parse_pod_end)
            _check_end(what, pod, end)
            log = await _read_log(tools, pod)
        except (AgentError, asyncio.CancelledError):
            if on_log is not None:
                await _keep(tools, lambda: _keep_log_of(tools, job, on_log))
            raise
        if on_log is not None:
            await _keep(tools, lambda: on_log(log))
        return JobAnswer(end.message, log, f"{_shown(pod)} of the {what}")


async def _keep(tools: Session, step: Callable[[], Awaitable[None]]) -> None:
    """Take the step, also while the caller is canceled, unless the API server keeps it from that."""
    with suppress(KubeError, StepTimeoutError):
        await tools.finish("keep the results of the Job", _KEEP_TIMEOUT, step)


async def _keep_log_of(tools: Session, job: Job, on_log: Callable[[str], Awaitable[None]]) -> None:
    if (pod := await read_pod(tools.client, tools.namespace, job["metadata"]["name"])) is not None:
        await on_log(await _read_log(tools, pod))


@asynccontextmanager
async def open_job(tools: Session, manifest: Manifest) -> AsyncIterator[Job]:
    """Create the Job, yield it, and delete it in any case, as `run_job` does."""
    if tools.owners:
        manifest = manifest | {"metadata": manifest["metadata"] | {"ownerReferences": list(tools.owners)}}
    name = f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
    try:
        # A request whose answer is not awaited may create the Job after its deletion.
        create = partial(_create, tools, manifest)
        job = await tools.finish(f"create Job {name}", REQUEST_TIMEOUT, create)
        tools.on_created(job)
        yield job
    finally:
        delete = partial(_delete, tools, manifest["metadata"])
        await tools.finish(f"delete Job {name}", REQUEST_TIMEOUT, delete)


async def _create(tools: Session, manifest: Manifest) -> Job:
    try:
        return await tools.client.create(JOBS, manifest)
    except AlreadyExistsError:
        # Its name is random: the answer to an earlier attempt was lost.
        meta = manifest["metadata"]
        return await tools.client.get(JOBS, meta["namespace"], meta["name"])


async def end_jobs(tools: Session, jobs: Sequence[Job], timeout: timedelta) -> None:
    """Delete Jobs that another command has left, and return once no pod of theirs runs any more.

    Raises:
        JobTimeoutError: the pod of one does not end.
    """
    left = [one["metadata"] for one in jobs]
    for meta in left:
        await tools.client.delete(JOBS, meta["namespace"], meta["name"], uid=meta["uid"])
    deadline = Deadline.after(tools.clock, timeout)
    for meta in left:
        tools.on_progress(f"ending Job {meta['namespace']}/{meta['name']} of another command")
        while (pod := await read_pod(tools.client, meta["namespace"], meta["name"])) and not parse_pod_end(pod):
            if deadline.expired:
                raise JobTimeoutError(f"{_shown(pod)} of Job {meta['name']} does not end, though the Job is deleted")
            await tools.clock.sleep(_POLL_SECONDS)


async def wait_for_start(tools: Session, job: Job, what: str, timeout: timedelta) -> Pod:
    """Return the pod of the Job once it runs; `what` is a word for messages.

    Raises:
        JobError: it failed, cannot start, or did not start in time.
    """
    pod, end = await _wait(tools, job, timeout, _look_for_start)
    if isinstance(end, PodEnd):
        _check_end(what, pod, end)
        raise JobError(f"{_shown(pod)} of the {what} has ended already")
    return pod


async def check_end(tools: Session, job: Job, what: str, timeout: timedelta) -> str:
    """Return the message of the Job's pod once it has ended with 0; JobError: it failed, or did not end in time."""
    pod, end = await _wait(tools, job, timeout, parse_pod_end)
    _check_end(what, pod, end)
    return end.message


async def list_mounting(tools: Session, label: str, claim: str) -> list[Job]:
    """Return the Jobs with a label that mount a PVC of the agents' namespace."""
    jobs = await tools.client.list(Selection(JOBS, tools.namespace, label))
    return [job for job in jobs if _mounts(job, claim)]


def _mounts(job: Job, claim: str) -> bool:
    volumes = job["spec"]["template"]["spec"].get("volumes") or []
    return any("persistentVolumeClaim" in one and one["persistentVolumeClaim"]["claimName"] == claim for one in volumes)


def _look_for_start(pod: Pod) -> PodEnd | bool | None:
    return parse_pod_end(pod) or (pod.get("status") or {}).get("phase") == "Running" or None


def _shown(pod: Pod) -> str:
    return f"Pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _check_end(what: str, pod: Pod, end: PodEnd) -> None:
    if end.exit_code != 0:
        cause = ": ".join(filter(None, (explain_exit(end), end.message)))
        raise JobError(f"{_shown(pod)} of the {what} failed: {cause}")


async def _wait(tools: Session, job: Job, timeout: timedelta, look: Callable[[Pod], _T | None]) -> tuple[Pod, _T]:
    """Return the pod of the Job once `look` returns something about it, and what that is."""
    deadline = Deadline.after(tools.clock, timeout)
    client, namespace, name = tools.client.patiently(), tools.namespace, job["metadata"]["name"]
    causes, shown = CauseFinder(client, tools.clock), ""
    while True:
        # The Job first: once it has ended, its pod has too, or is being deleted.
        current, pod = await client.read(JOBS, namespace, name), await read_pod(client, namespace, name)
        if pod is not None and (found := look(pod)) is not None:
            return pod, found
        if current is None:
            raise JobError(f"Job {namespace}/{name} was deleted before it ended")
        parsed = MaintenanceJob.parse(current)
        if parsed.ended:
            cause = parsed.message if parsed.reason == DEADLINE else POD_DELETED
            raise JobError(f"Job {namespace}/{name} failed: {cause}")
        doing = await _describe(tools, causes, current, pod)
        if doing != shown:
            tools.on_progress(doing)
            shown = doing
        if deadline.expired:
            raise JobTimeoutError(f"Job {namespace}/{name} did not end within {format_duration(timeout)}: {doing}")
        await tools.clock.sleep(min(_POLL_SECONDS, max(deadline.remaining_seconds, 0.1)))


async def _describe(tools: Session, causes: CauseFinder, job: Job, pod: Pod | None) -> str:
    meta = job["metadata"]
    if pod is not None:
        pending = await causes.explain(pod)
        return pending.message if pending is not None else f"{_shown(pod)} is running"
    warning = await find_last_warning(tools.client, meta["namespace"], meta["uid"])
    text = f"Job {meta['namespace']}/{meta['name']} has no pod yet"
    return f"{text}: {warning.message}" if warning is not None else text


async def _read_log(tools: Session, pod: Pod) -> str:
    meta = pod["metadata"]
    return await tools.client.pod_log(
        meta["namespace"], meta["name"], container=MAINTENANCE_CONTAINER, limit_bytes=_LOG_LIMIT_BYTES
    )


async def _delete(tools: Session, meta: Manifest) -> None:
    """Delete the Job with that metadata, whose name is unique; one that was not created is none."""
    try:
        await tools.client.delete(JOBS, meta["namespace"], meta["name"])
    except AgentError as e:
        command = f"kubectl -n {meta['namespace']} delete job {meta['name']}"
        tools.on_note(f"the Job could not be deleted, so it ends by itself, or by {command}: {e}")
