"""Schedules in the cluster: creating, listing and deleting them."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from msgspec import field

from core.errors import ConfigError, ContractError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.models.base import JsonDict, ObjectMeta, Time, WireModel
from core.models.names import AGENT_DAEMONSET, SCHEDULE_LABEL
from core.models.units import format_duration
from nodeagent.config.keys import missing
from nodeagent.operations.backups.plan import BackupTools, find_destination, note_absent_claims
from nodeagent.operations.schedules.objects import AgentImage, build_accounts
from nodeagent.operations.schedules.owned import OwnedObjects
from nodeagent.operations.schedules.request import ScheduleRequest, ScheduleTimes, words_of

__all__ = [
    "Schedule",
    "ScheduleList",
    "apply_schedule",
    "check_schedule",
    "delete_schedule",
    "find_schedules",
    "read_image",
    "read_request",
]

ParseWords = Callable[[Sequence[str]], ScheduleRequest]
"""Reads the words after `run-schedule`; raises ConfigError where they are invalid."""


class _Status(WireModel):
    last_schedule_time: Time | None = None
    last_successful_time: Time | None = None
    active: list[JsonDict] = field(default_factory=list)


class _Spec(WireModel):
    schedule: str = ""
    time_zone: str = ""
    suspend: bool = False


class _CronJob(WireModel):
    metadata: ObjectMeta
    spec: _Spec = field(default_factory=_Spec)
    status: _Status = field(default_factory=_Status)


class Schedule(WireModel):
    """One schedule. `claims` are its PVCs as text; an empty `ttl`: it deletes nothing.

    `last_success` is when a run that succeeded ended, `next_run` when the next one begins; None: never, or unknown.
    """

    name: str
    schedule: str
    time_zone: str
    suspended: bool
    claims: str
    method: str
    location: str
    ttl: str
    created: datetime | None
    running: int
    last_run: datetime | None
    last_success: datetime | None
    next_run: datetime | None


class ScheduleList(WireModel):
    """Schedules in the order of their names, and notes about what could not be read."""

    schedules: list[Schedule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def read_image(client: KubeClient, namespace: str) -> AgentImage:
    """Return the image of the agents.

    Raises:
        ConfigError: no agents are installed.
        KubeError: that cannot be found out.
    """
    daemonset = await client.read(kube.DAEMON_SETS, namespace, AGENT_DAEMONSET)
    if daemonset is None:
        place = f"DaemonSet {namespace}/{AGENT_DAEMONSET}"
        raise ConfigError(f"{place} does not exist: run nodeagent install, or set --agent-namespace")
    return AgentImage.of(daemonset)


async def check_schedule(tools: BackupTools, request: ScheduleRequest) -> None:
    """Check what every run would need, and note the PVCs that do not exist.

    Raises:
        BackupError: the location does not exist or is read-only, or a Velero server is there, or may be.
        KubeError: the API server rejected a request.
    """
    await find_destination(
        tools, request.namespace, request.location, ignore_velero_server=request.ignore_velero_server
    )
    await note_absent_claims(tools, request.claims)


async def apply_schedule(owned: OwnedObjects, objects: Sequence[JsonDict], parse: ParseWords) -> bool:
    """Create or update the objects of a schedule, and return whether its CronJob existed.

    Roles that it does not need any more are deleted before the CronJob changes, which says where they were: so an
    interrupted change may be repeated.

    Raises:
        ConfigError: an object of a name that it needs is not of the schedule; nothing was changed.
        KubeError: the API server rejected a request; what was created stays, and the command may be repeated.
    """
    *others, cron_job = objects
    await owned.check([cron_job, *others])
    for manifest in others:
        await owned.put(manifest)
    meta = cron_job["metadata"]
    stored = await owned.client.read(kube.CRON_JOBS, meta["namespace"], meta["name"])
    if stored is not None:
        await owned.remove_roles(_known(stored, parse), keep=others)
    return await owned.put(cron_job)


def _known(cron_job: JsonDict, parse: ParseWords) -> list[JsonDict]:
    """Return the objects that the CronJob needs; none, if it is of a version that cannot be read."""
    try:
        return build_accounts(parse(words_of(cron_job)[1:]))
    except ConfigError:
        return []


async def find_schedules(
    client: KubeClient, namespace: str, names: Sequence[str], parse: ParseWords, now: datetime
) -> ScheduleList:
    """Return the schedules of these names, all if there are none.

    Raises:
        NotFoundError: there is none of such a name; the message has the one that may be meant.
        KubeError: they cannot be listed.
    """
    found, notes = [], []
    for raw in await client.list(Selection(kube.CRON_JOBS, namespace, label_selector=SCHEDULE_LABEL)):
        words = words_of(raw)
        if not words:
            continue
        try:
            found.append(_build(_CronJob.from_wire(raw), parse(words[1:]), now))
        except (ConfigError, ContractError) as e:
            notes.append(f"CronJob {namespace}/{raw['metadata']['name']} cannot be read: {e}")
    found.sort(key=lambda one: one.name)
    known = [one.name for one in found]
    for name in names:
        if name not in known:
            raise missing(f"there is no schedule {name} in namespace {namespace}", name, known)
    return ScheduleList(schedules=[one for one in found if not names or one.name in names], notes=notes)


def _build(cron_job: _CronJob, request: ScheduleRequest, now: datetime) -> Schedule:
    spec, status = cron_job.spec, cron_job.status
    times = ScheduleTimes(spec.schedule, spec.time_zone, spec.suspend)
    return Schedule(
        name=cron_job.metadata.name,
        schedule=spec.schedule,
        time_zone=spec.time_zone,
        suspended=spec.suspend,
        claims=request.shown_claims,
        method=str(request.method),
        location=request.location,
        ttl=format_duration(request.ttl) if request.ttl is not None else "",
        created=cron_job.metadata.creation_timestamp,
        running=len(status.active),
        last_run=status.last_schedule_time,
        last_success=status.last_successful_time,
        next_run=None if spec.suspend else times.next_after(now),
    )


async def read_request(client: KubeClient, namespace: str, name: str, parse: ParseWords) -> ScheduleRequest:
    """Return what the schedule of that name backs up and keeps.

    Raises:
        NotFoundError: there is none; the message has the name that may be meant.
        ConfigError: the command line of its pods cannot be read.
        KubeError: the API server rejected a request.
    """
    raw = await client.read(kube.CRON_JOBS, namespace, name)
    if raw is not None and (words := words_of(raw)):
        return parse(words[1:])
    listed = await client.list(Selection(kube.CRON_JOBS, namespace, label_selector=SCHEDULE_LABEL))
    known = [one["metadata"]["name"] for one in listed if words_of(one)]
    raise missing(f"there is no schedule {name} in namespace {namespace}", name, known)


async def delete_schedule(owned: OwnedObjects) -> None:
    """Delete the roles and the account of a schedule, and its CronJob at last; its backups stay.

    The CronJob says in which namespaces there are roles: so an interrupted deletion may be repeated.

    Raises:
        ConfigError: an object of such a name is not of the schedule, and is left alone; the message names it.
        KubeError: the API server rejected a request.
    """
    request = owned.request
    known = build_accounts(request)
    meta = {"name": request.name, "namespace": request.namespace, "labels": {SCHEDULE_LABEL: request.label}}
    cron_job = {"kind": kube.CRON_JOBS.kind, "metadata": meta}
    account = [one for one in known if one["kind"] == kube.SERVICE_ACCOUNTS.kind]
    foreign = []
    for remove in (partial(owned.remove_roles, known), partial(owned.remove, [*account, cron_job])):
        try:
            await remove()
        except ConfigError as e:
            foreign.append(str(e))
    if foreign:
        raise ConfigError("; ".join(foreign))
