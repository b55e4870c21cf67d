"""The snapshot report of one repository by command: a Job lists what nothing refers to, and is deleted afterward.

Needs the user's permissions to create, get and delete Jobs, to list pods, and to get `pods/log`.
"""

import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from core.aio import run_shielded
from core.clock import Clock, Deadline
from core.contract import ReportedSnapshot, SnapshotReport, SnapshotVerdict, parse_reported, parse_result
from core.errors import AgentError, ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.errors import NotFoundError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, EVENTS, JOBS
from core.models.base import JsonDict, WireModel
from core.models.names import MAINTENANCE_CONTAINER
from core.models.storage import BackupStorageLocation, RepositoryKey
from core.models.units import format_duration
from exposer.causes import CauseFinder
from exposer.maintenance_job import MaintenanceRun, build_report_job
from exposer.model import Owner
from exposer.pod_status import PodEnd, explain_exit, parse_pod_end
from exposer.storage_access import access_of
from nodeagent.config.expose_settings import build_expose_settings
from nodeagent.config.maintenance import MaintenanceConfig
from nodeagent.config.source import read_config
from nodeagent.leader.maintenance.facts import record_of
from nodeagent.leader.maintenance.jobs import MaintenanceJob, read_pod
from nodeagent.leader.maintenance.rules import decide_memory
from nodeagent.operations.installation import read_settings
from nodeagent.operations.repositories import read_repository
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentSpec, read_template

__all__ = ["ReportError", "ReportTools", "SnapshotList", "report_snapshots"]

_T = TypeVar("_T")

_POLL_SECONDS: Final = 2.0
_REQUEST_TIMEOUT: Final = timedelta(seconds=90)
"""More than the retries of a client take."""

_LOG_LIMIT_BYTES: Final = 15 << 20
"""Some 40,000 snapshots; the transport refuses a response of 16 MiB."""

_NAME_CHARACTERS: Final = 40
"""Of the repository's name in that of the Job, which has at most 63: it is the value of a label of its pod."""

_ORDER: Final = (SnapshotVerdict.UNREFERENCED, SnapshotVerdict.INCOMPLETE, SnapshotVerdict.UNKNOWN)


class ReportError(AgentError):
    """The Job of the report failed, or did not end in time."""


class SnapshotList(WireModel):
    """The kopia snapshots of one repository that are not referenced, and the totals of all of them."""

    repository: str
    totals: SnapshotReport
    snapshots: list[ReportedSnapshot]
    notes: list[str]


@dataclass(frozen=True)
class ReportTools:
    """What a report works with.

    `parse_serve` reads the arguments of an agent's command `serve`. `on_progress` is called with what the Job is doing
    whenever that changes, and `on_note` with what the user should know beside the answer.
    """

    client: KubeClient
    clock: Clock
    namespace: str
    parse_serve: Callable[[Sequence[str]], Settings]
    on_progress: Callable[[str], None]
    on_note: Callable[[str], None]


async def report_snapshots(tools: ReportTools, name: str, *, timeout: timedelta) -> SnapshotList:  # noqa: ASYNC109 - of the Job
    """Run the report of the repository `name` and return it.

    The Job is deleted in any case, also after a cancellation; if that fails, `on_note` gets the command that does it.

    Raises:
        NotFoundError: the repository or its location does not exist.
        ConfigError: no agent is installed, or its configuration cannot be read.
        ReportError: the Job failed, cannot start, or did not end in time.
        KubeError: the API server rejected a request.
    """
    manifest = await _build(tools, name)
    try:
        # A request whose answer is not awaited may create the Job after its deletion.
        job = await _shielded(tools, lambda: tools.client.create(JOBS, manifest), "create the Job")
        pod, end = await _wait(tools, job, Deadline.after(tools.clock, timeout), timeout)
        return await _read_result(tools, name, pod, end)
    finally:
        await _shielded(tools, lambda: _delete(tools, manifest["metadata"]), "delete the Job")


async def _shielded(tools: ReportTools, step: Callable[[], Awaitable[_T]], name: str) -> _T:
    return await run_shielded(step, name=name, deadline=Deadline.after(tools.clock, _REQUEST_TIMEOUT))


async def _build(tools: ReportTools, name: str) -> JsonDict:
    """Return the manifest of the Job, with the settings that the leader's own Jobs have."""
    client, namespace = tools.client, tools.namespace
    repository = await read_repository(client, namespace, name)
    spec = repository.spec
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, spec.backup_storage_location)
    if raw is None:
        place = f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{spec.backup_storage_location}"
        raise NotFoundError(f"{place} of the repository does not exist", status=404, reason="NotFound")
    settings = await read_settings(client, namespace, tools.parse_serve)
    config = await read_config(client, namespace, settings.config_map_name)
    agent = AgentSpec(settings, namespace, config, await read_template(client, namespace))
    expose = build_expose_settings(agent.expose_defaults, config.config, priority_class="", cache_limit_mib=0)
    key = RepositoryKey(spec.volume_namespace, spec.backup_storage_location)
    configured = await MaintenanceConfig(client, namespace, settings.maintenance_config_map).settings_for(key)
    job = configured.job
    if job.resources is None:
        memory = decide_memory(record_of(repository), may_be_full=True, most_bytes=configured.memory_limit_max_bytes)
        job = dataclasses.replace(job, resources=memory.resources)
    run = MaintenanceRun(
        owner=Owner.of(repository),
        name=f"{name[:_NAME_CHARACTERS].rstrip('.-')}-report-{secrets.token_hex(4)}",
        settings=job,
        storage=access_of(BackupStorageLocation.parse(raw)),
    )
    return build_report_job(run, expose)


async def _wait(tools: ReportTools, job: JsonDict, deadline: Deadline, timeout: timedelta) -> tuple[JsonDict, PodEnd]:  # noqa: ASYNC109 - shown
    """Return the pod of the Job once it has ended, and how.

    Raises:
        ReportError: it cannot run, or did not end before the deadline.
    """
    client, namespace, name = tools.client, tools.namespace, job["metadata"]["name"]
    causes, shown = CauseFinder(client, tools.clock), ""
    while True:
        pod = await read_pod(client, namespace, name)
        if pod is not None and (end := parse_pod_end(pod)) is not None:
            return pod, end
        current = await client.read(JOBS, namespace, name)
        if current is None:
            raise ReportError(f"Job {namespace}/{name} was deleted before it ended")
        parsed = MaintenanceJob.parse(current)
        if parsed.ended:
            raise ReportError(f"Job {namespace}/{name} failed: {parsed.message or parsed.reason or 'it has no pod'}")
        doing = await _describe(tools, causes, current, pod)
        if doing != shown:
            tools.on_progress(doing)
            shown = doing
        if deadline.expired:
            raise ReportError(f"Job {namespace}/{name} did not end within {format_duration(timeout)}: {doing}")
        await tools.clock.sleep(min(_POLL_SECONDS, max(deadline.remaining_seconds, 0.1)))


async def _describe(tools: ReportTools, causes: CauseFinder, job: JsonDict, pod: JsonDict | None) -> str:
    """Return what the Job is doing.

    Raises:
        ReportError: its pod can never run.
    """
    meta = job["metadata"]
    if pod is not None:
        try:
            pending = await causes.explain(pod)
        except ExposeError as e:
            raise ReportError(str(e)) from e
        return (
            pending.message if pending is not None else f"Pod {meta['namespace']}/{pod['metadata']['name']} is running"
        )
    selection = Selection(EVENTS, meta["namespace"], field_selector=f"involvedObject.uid={meta['uid']}")
    warnings = [event for event in await tools.client.list(selection) if event.get("type") == "Warning"]
    text = f"Job {meta['namespace']}/{meta['name']} has no pod yet"
    return f"{text}: {warnings[-1].get('message', '')}" if warnings else text


async def _read_result(tools: ReportTools, name: str, pod: JsonDict, end: PodEnd) -> SnapshotList:
    """Return the report in the termination message and the log of the pod.

    Raises:
        ReportError: the pod failed.
    """
    meta = pod["metadata"]
    if end.exit_code != 0:
        cause = ": ".join(filter(None, (explain_exit(end), end.message)))
        raise ReportError(f"Pod {meta['namespace']}/{meta['name']} of the report failed: {cause}")
    totals = parse_result(SnapshotReport, end.message)
    log = await tools.client.pod_log(
        meta["namespace"], meta["name"], container=MAINTENANCE_CONTAINER, limit_bytes=_LOG_LIMIT_BYTES
    )
    found = [one for line in log.splitlines() if (one := parse_reported(line)) is not None]
    expected = totals.unreferenced.count + totals.incomplete.count + totals.unknown.count
    notes = [f"what refers to snapshots could not be read: {totals.unread}"] if totals.unread else []
    if len(found) < expected:
        notes.append(f"the log of the pod has only {len(found)} of {expected} snapshots")
    found.sort(key=lambda one: (_ORDER.index(one.verdict) if one.verdict in _ORDER else len(_ORDER), one.start, one.id))
    return SnapshotList(repository=name, totals=totals, snapshots=found, notes=notes)


async def _delete(tools: ReportTools, meta: JsonDict) -> None:
    """Delete the Job with that metadata, whose name is unique; one that was not created is none."""
    try:
        await tools.client.delete(JOBS, meta["namespace"], meta["name"])
    except AgentError as e:
        command = f"kubectl -n {meta['namespace']} delete job {meta['name']}"
        tools.on_note(f"the Job could not be deleted, so it ends by itself, or by {command}: {e}")
