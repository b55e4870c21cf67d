"""Reads what coverage is about: PVCs, their volumes and pods, and the schedules that are to back them up.

Everything is read page by page. What may not be read is named in a note, and judged as far as the rest allows.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import Final, NoReturn, TypeVar

from msgspec import Raw
from msgspec import field as wire_field

from core.aio import run_for_many
from core.errors import AgentError, ContractError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError, NotServedError, UnauthorizedError, UnreachableError
from core.kube.resources import Resource
from core.kube.types import UncheckedObject
from core.kube.velero_server import find_velero_server, flags_of
from core.models.backups import schedule_words
from core.models.base import ObjectMeta, Time, WireModel
from core.models.names import SCHEDULE_LABEL
from nodeagent.config.windows import parse_interval
from nodeagent.coverage.cluster import (
    ClusterObject,
    ClusterVolumes,
    Namespace,
    StoredVolume,
    VolumeClaim,
    VolumeKey,
    WorkloadPod,
    decode_object,
)
from nodeagent.coverage.policies import Policies, parse_policies
from nodeagent.coverage.selection import (
    BackupMethod,
    BackupSchedule,
    ServerDefaults,
    VolumeChoice,
    explain_fault,
    parse_selector,
    select_volumes,
)
from nodeagent.coverage.states import BackupSource, VolumePlan, plan_volumes

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=ClusterObject)


@dataclass(frozen=True)
class PlannedVolumes:
    """The volumes with the backups that are expected, None: they may not be listed; and what could not be read."""

    plans: tuple[VolumePlan, ...] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObservedVolumes:
    """What was read: the volumes, None if the PVCs may not be listed, and the schedules.

    `all_sources`: no schedule is missing. `passing`: something of it could not be read, for another reason than a
    missing permission.
    """

    cluster: ClusterVolumes | None
    sources: tuple[BackupSource, ...] = ()
    all_sources: bool = True
    notes: tuple[str, ...] = ()
    passing: bool = False

    def plan(self, leave_out_namespaces: Collection[str] | None) -> PlannedVolumes:
        """Return the plans, with the annotations of PVCs that count in these namespaces; None: they are not known."""
        if self.cluster is None:
            return PlannedVolumes(None, self.notes)
        plans = plan_volumes(self.cluster, self.sources, leave_out_namespaces, all_sources=self.all_sources)
        return PlannedVolumes(plans, self.notes)


@dataclass(frozen=True)
class _VeleroPlan:
    """A Schedule with its volume policies; `fault` is why no Backup of it succeeds, None: nothing known."""

    schedule: BackupSchedule
    policies: Policies = field(default_factory=Policies)
    fault: str | None = None


class TooManyObjectsError(AgentError):
    """The cluster has more objects of a kind than may be held in memory."""


@dataclass(eq=False)
class VolumeReader:
    """Reads all volumes, or those in one namespace, and the schedules that are to back them up.

    Schedules are in `namespace`, where the agents run; an empty `volume_namespace`: volumes of all namespaces. `most`
    is how many objects of a kind may be held; None: as many as there are. `cron_jobs` returns the schedules of
    `nodeagent schedule`, to be read once; None: they are listed.
    """

    client: KubeClient
    namespace: str
    now: Callable[[], datetime]
    volume_namespace: str = ""
    _: KW_ONLY
    most: int | None = None
    cron_jobs: Awaitable[Sequence[UncheckedObject]] | None = None
    _notes: list[str] = field(default_factory=list, init=False)
    _passing: bool = field(default=False, init=False)
    _lost_sources: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Compute once how often a schedule runs: many have the same one."""
        self._interval = cache(lambda schedule, zone="": parse_interval(schedule, zone, self.now()))

    async def read(self) -> ObservedVolumes:
        """Return what there is now.

        Raises:
            UnreachableError: the API server does not answer.
            UnauthorizedError: it rejects the credentials.
            TooManyObjectsError: there are more objects of a kind than may be held.
        """
        self._notes, self._passing, self._lost_sources = [], False, False
        read_claims = partial(self._read_all, kube.PERSISTENT_VOLUME_CLAIMS, VolumeClaim, self.volume_namespace)
        read_namespaces = partial(self._read_all, kube.NAMESPACES, Namespace)
        claims, namespaces, cron_jobs, (schedules, defaults, pods, volumes) = await asyncio.gather(
            self._try("PVCs", "volumes that were never backed up are not known", read_claims),
            self._try("Namespaces", "those that are left out are not known", read_namespaces),
            self._try("CronJobs", "schedules of nodeagent schedule are not known", self._list_cron_jobs, sources=True),
            self._read_selected(),
        )
        if claims is None:
            return ObservedVolumes(None, notes=tuple(self._notes), passing=self._passing)
        cluster = ClusterVolumes(
            {one.key: one for one in claims}, pods, volumes, {one.metadata.name: one for one in namespaces or []}
        )
        # Each schedule is matched with each volume: that takes seconds, in which the leader renews its Lease.
        sources = await run_for_many(len(claims), self._build_sources, cron_jobs or (), schedules, cluster, defaults)
        known = not self._lost_sources
        return ObservedVolumes(cluster, sources, known, tuple(self._notes), self._passing)

    async def _read_selected(
        self,
    ) -> tuple[list[_VeleroPlan], ServerDefaults, tuple[WorkloadPod, ...], Mapping[str, StoredVolume] | None]:
        """Return the Schedules, what the server's flags say, and the pods and volumes that active ones may select."""
        schedules, defaults = await self._read_velero()
        if all(one.fault is not None or one.schedule.spec.paused for one in schedules):
            return schedules, defaults, (), {}
        read_pods = partial(self._read_all, kube.PODS, WorkloadPod, self.volume_namespace)
        read_volumes = partial(self._read_all, kube.PERSISTENT_VOLUMES, StoredVolume)
        pods, volumes = await asyncio.gather(
            self._try("Pods", "volumes of pods, and whether fs-backup covers a PVC, are not known", read_pods),
            self._try("PersistentVolumes", "they are taken for volumes of CSI drivers", read_volumes),
        )
        by_name = None if volumes is None else {one.metadata.name: one for one in volumes}
        return schedules, defaults, tuple(pods or ()), by_name

    def _build_sources(
        self,
        cron_jobs: Sequence[UncheckedObject],
        schedules: Sequence[_VeleroPlan],
        cluster: ClusterVolumes,
        defaults: ServerDefaults,
    ) -> tuple[BackupSource, ...]:
        ours = [source for raw in cron_jobs if (source := self._read_cron_job(raw, cluster.claims)) is not None]
        return (*ours, *(self._build_source(one, cluster, defaults) for one in schedules))

    async def _try(
        self, what: str, without: str, read: Callable[[], Awaitable[_T]], *, sources: bool = False
    ) -> _T | None:
        """Return what `read` returns; None, and note why, if the API server rejects that."""
        try:
            return await read()
        except (UnreachableError, UnauthorizedError):
            raise
        except NotServedError:
            # Such as Schedules in a cluster without Velero.
            return None
        except KubeError as e:
            self._notes.append(f"{what} cannot be read, so {without}: {e}")
            self._passing = self._passing or not isinstance(e, ForbiddenError)
            self._lost_sources = self._lost_sources or sources
            return None

    async def _read_all(self, resource: Resource, model: type[_Model], namespace: str = "") -> list[_Model]:
        found: list[_Model] = []
        async for page in self.client.raw_pages(Selection(resource, namespace)):
            decoded = (self._decode(resource, model, text) for text in page)
            found += [one for one in decoded if one is not None and one.matters]
            if self.most is not None and len(found) > self.most:
                raise TooManyObjectsError(f"there are more than {self.most} {resource.plural}")
        return found

    def _decode(self, resource: Resource, model: type[_Model], text: Raw) -> _Model | None:
        try:
            return decode_object(model, text)
        except ContractError as e:
            self._notes.append(f"a {resource.kind} cannot be read: {e}")
            return None

    async def _list_cron_jobs(self) -> Sequence[UncheckedObject]:
        if self.cron_jobs is not None:
            return await self.cron_jobs
        return await self.client.list(Selection(kube.CRON_JOBS, self.namespace, label_selector=SCHEDULE_LABEL))

    def _read_cron_job(self, raw: UncheckedObject, claims: Mapping[VolumeKey, VolumeClaim]) -> BackupSource | None:
        """Return what a CronJob of ours backs up; None: it is not one, or cannot be read."""
        try:
            cron_job = _CronJob.from_wire(raw)
            words = schedule_words(raw)
            if not words:
                return None
            chosen = _chosen(words[1:], claims)
            spec, name = cron_job.spec, f"schedule {cron_job.metadata.name}"
            choices = dict.fromkeys(chosen, VolumeChoice(BackupMethod.MOVED))
            if spec.suspend:
                return BackupSource(name, None, choices, "it is suspended")
            ran = cron_job.status.last_schedule_time
            return BackupSource(name, self._interval(spec.schedule, spec.time_zone), choices, ran=ran)
        except (ContractError, ValueError) as e:
            self._note_lost(f"CronJob {self.namespace}/{raw['metadata']['name']} cannot be read: {e}")
            return None

    def _note_lost(self, note: str) -> None:
        self._notes.append(note)
        self._lost_sources = True

    async def _read_velero(self) -> tuple[list[_VeleroPlan], ServerDefaults]:
        """Return the Schedules of a Velero server, and what its flags say."""
        listing = partial(self.client.list, Selection(kube.SCHEDULES, self.namespace))
        listed = await self._try("Schedules", "what Velero is to back up is not known", listing, sources=True)
        if not listed:
            return [], ServerDefaults()
        without = "the defaults of the Velero server are not known"
        servers = await self._try("Deployments", without, self._read_servers)
        defaults = await self._read_defaults(servers[0] if servers else None)
        plans = []
        for raw in listed:
            try:
                schedule = BackupSchedule.from_wire(raw)
            except ContractError as e:
                self._note_lost(f"Schedule {self.namespace}/{raw['metadata']['name']} cannot be read: {e}")
                continue
            if servers == []:
                plans.append(_VeleroPlan(schedule, fault=f"there is no Velero server in namespace {self.namespace}"))
            else:
                plans.append(await self._with_policies(schedule, defaults))
        return plans, defaults

    async def _read_servers(self) -> list[Mapping[str, str]]:
        """Return the flags of the Velero server; empty: there is none."""
        server = await find_velero_server(self.client, self.namespace)
        return [flags_of(server)] if server is not None else []

    async def _read_defaults(self, found: Mapping[str, str] | None) -> ServerDefaults:
        flags = found or {}
        name = flags.get(_POLICIES_FLAG)
        policies = await self._read_policies(name) if name else None
        return ServerDefaults(
            fs_backup=_is_set(flags.get("default-volumes-to-fs-backup")),
            move_data=_is_set(flags.get("default-snapshot-move-data")),
            csi=found is None or _CSI_FEATURE in flags.get("features", "").split(","),
            group_label=flags.get("volume-group-snapshot-label-key") or ServerDefaults().group_label,
            policies=policies if isinstance(policies, Policies) else Policies(),
            fault=policies if isinstance(policies, str) else None,
        )

    async def _with_policies(self, schedule: BackupSchedule, defaults: ServerDefaults) -> _VeleroPlan:
        template = schedule.spec.template
        found: Policies | str = defaults.fault or explain_fault(template) or Policies()
        if template.policy_name and isinstance(found, Policies):
            found = await self._read_policies(template.policy_name)
        if isinstance(found, Policies) and found.resources is not None and template.has_old_filters:
            found = "it has older filters of resources, and its policies have newer ones"
        if isinstance(found, str):
            return _VeleroPlan(schedule, fault=f"the server rejects its Backups: {found}")
        return _VeleroPlan(schedule, found)

    async def _read_policies(self, name: str) -> Policies | str:
        """Return the volume policies in the ConfigMap; a text: why the server rejects them."""

        async def read() -> Policies | str:
            raw = await self.client.read(kube.CONFIG_MAPS, self.namespace, name)
            if raw is None:
                return f"ConfigMap {name} of its volume policies does not exist"
            try:
                return parse_policies(raw.get("data"))
            except ContractError as e:
                return f"volume policies in ConfigMap {name}: {e}"

        return await self._try(f"ConfigMap {name}", "volume policies in it are not known", read) or Policies()

    def _build_source(self, one: _VeleroPlan, cluster: ClusterVolumes, defaults: ServerDefaults) -> BackupSource:
        spec, name = one.schedule.spec, f"Schedule {one.schedule.metadata.name}"
        choices = select_volumes(spec.template, cluster, defaults, one.policies)
        if spec.paused or one.fault is not None:
            return BackupSource(name, None, choices, one.fault or "it is paused")
        try:
            return BackupSource(name, self._interval(spec.schedule), choices, ran=one.schedule.status.last_backup)
        except ValueError as e:
            return BackupSource(name, None, choices, f"its cron expression is invalid: {e}")


_POLICIES_FLAG: Final = "global-backup-volume-policies-configmap"
_CSI_FEATURE: Final = "EnableCSI"


def _is_set(value: str | None) -> bool:
    """Return whether a boolean flag of Go is on; alone, without `=`, it is."""
    return value is not None and value.lower() not in {"false", "f", "0"}


class RunTimes(WireModel):
    """When a CronJob or a Schedule runs, in its spec; `suspend` is a CronJob's, and `paused` a Schedule's."""

    schedule: str = ""
    time_zone: str = ""
    suspend: bool = False
    paused: bool = False


class _CronJobStatus(WireModel):
    last_schedule_time: Time | None = None


class _CronJob(WireModel):
    metadata: ObjectMeta
    spec: RunTimes = wire_field(default_factory=RunTimes)
    status: _CronJobStatus = wire_field(default_factory=_CronJobStatus)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _chosen(words: Sequence[str], claims: Mapping[VolumeKey, VolumeClaim]) -> list[VolumeKey]:
    """Return the PVCs that words choose, as `client.schedules.request` reads them; ValueError: they are invalid."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--pvc", action="append", default=[])
    parser.add_argument("--namespace", "-n", default="")
    parser.add_argument("--selector", "-l", default=None)
    given, _ = parser.parse_known_args(list(words))
    if given.pvc:
        named = [word.partition("/") for word in given.pvc]
        return [(before, after) if slash else (given.namespace, before) for before, slash, after in named]
    selector = parse_selector(given.selector or "")
    return [
        key
        for key, claim in claims.items()
        if key[0] == given.namespace and claim.bound and selector.matches(claim.metadata.labels)
    ]
