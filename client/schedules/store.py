"""Schedules in the cluster: creating, listing, renewing and deleting their objects, and no others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

import msgspec
from msgspec import field

from client.backups.plan import find_destination, note_absent_claims
from client.install.apply import ApplyResult
from client.install.options import place_of
from client.installation import explain_no_agents
from client.schedules.manifests import build_accounts, build_schedule, is_role_of
from client.schedules.request import ScheduleRequest, ScheduleTimes, read_cron_job
from client.session import Session
from client.text import missing
from core.errors import AgentError, ConfigError, ContractError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import AlreadyExistsError, ForbiddenError
from core.kube.transport import Deletion
from core.kube.types import Manifest, Object, UncheckedObject
from core.models import names as wire
from core.models.backups import deletes_by_old_rules, schedule_words
from core.models.base import WireModel, parse_time
from core.models.units import format_duration
from exposer.pods import AgentImage

_ROLES: Final = (kube.ROLE_BINDINGS, kube.ROLES, kube.CLUSTER_ROLE_BINDINGS, kube.CLUSTER_ROLES)
_SHARED: Final = frozenset(
    {(kube.CONFIG_MAPS.kind, wire.DELETIONS_CONFIGMAP), (kube.LEASES.kind, wire.DELETIONS_LEASE)}
)
"""Kinds and names of what all schedules have in common: it stays."""

_Key = tuple[str, str, str]
"""Kind, namespace and name of an object; without a namespace, of the cluster."""


def _key_of(manifest: Mapping[str, Any]) -> _Key:
    meta = manifest["metadata"]
    return manifest["kind"], meta.get("namespace", ""), meta["name"]


@dataclass(frozen=True)
class OwnedObjects:
    """The objects of one schedule. `on_line` gets a line for each one that is deleted."""

    tools: Session
    request: ScheduleRequest
    on_line: Callable[[str], None]

    async def put(self, manifest: Manifest) -> ApplyResult:
        """Create the object, or change it to what it is to be; ConfigError: one that exists is not of the schedule."""
        kind, namespace, name = _key_of(manifest)
        try:
            await self.tools.client.create(kube.BY_KIND[kind], manifest)
        except AlreadyExistsError:
            stored = await self.read(manifest)
            if stored is None:
                return ApplyResult.UNCHANGED
            patch = _patch_of(manifest, stored)
            patch["metadata"] = patch["metadata"] | {"uid": stored["metadata"]["uid"]}
            patched = await self.tools.client.patch(kube.BY_KIND[kind], namespace, name, patch)
            same = patched["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
            return ApplyResult.UNCHANGED if same else ApplyResult.CHANGED
        return ApplyResult.CREATED

    async def read(self, manifest: Manifest | Object) -> Object | None:
        """Return the object that exists; None for one of all schedules; ConfigError: it is not of the schedule."""
        kind, namespace, name = _key_of(manifest)
        if (kind, name) in _SHARED:
            return None
        stored = await self.tools.client.read(kube.BY_KIND[kind], namespace, name)
        if stored is not None and not _is_own(stored, manifest):
            schedule = self.request.name
            raise ConfigError(f"{place_of(manifest)} exists, and is not of schedule {schedule}: it is left alone")
        return stored

    async def check(self, manifest: Manifest) -> Object | None:
        """Return the object that exists; of one that does not, check by a dry run that it could be created.

        Raises:
            ConfigError: it is not of the schedule.
            KubeError: it could not be created, such as in a namespace that does not exist.
        """
        stored = await self.read(manifest)
        kind, _, name = _key_of(manifest)
        # A binding may only be created once its role is there.
        if stored is None and "roleRef" not in manifest and (kind, name) not in _SHARED:
            await self.tools.client.try_create(kube.BY_KIND[kind], manifest)
        return stored

    async def find_roles(self, known: Sequence[Manifest], keep: Iterable[Manifest] = ()) -> list[Manifest | Object]:
        """Return the schedule's roles and bindings, those that are `known` and those with its label, but not `keep`."""
        kept = {_key_of(one) for one in keep}
        found: dict[_Key, Manifest | Object] = {
            _key_of(one): one for one in known if kube.BY_KIND[one["kind"]] in _ROLES
        }
        labels = select_labels(self.request.own_labels)
        for resource in _ROLES:
            try:
                listed = await self.tools.client.list(Selection(resource, label_selector=labels))
            except ForbiddenError as e:
                self.tools.on_note(f"{resource.kind}s that schedule {self.request.name} had before may be left: {e}")
                continue
            found |= {_key_of(one): one for one in listed if is_role_of(self.request, one)}
        # Bindings first: they grant.
        order = sorted(found.keys() - kept, key=lambda one: (_ROLES.index(kube.BY_KIND[one[0]]), one))
        return [found[one] for one in order]

    async def remove(self, manifests: Iterable[Manifest | Object]) -> None:
        """Delete these objects of the schedule; ConfigError: it names those that are not, and are left alone."""
        foreign = []
        for manifest in manifests:
            kind, namespace, name = _key_of(manifest)
            try:
                stored = await self.read(manifest)
            except ConfigError as e:
                foreign.append(str(e))
                continue
            if stored is None:
                continue
            answer = await self.tools.client.delete(kube.BY_KIND[kind], namespace, name, uid=stored["metadata"]["uid"])
            if answer in {Deletion.DONE, Deletion.STARTED}:
                self.on_line(f"{place_of(manifest)}: deleted")
        if foreign:
            raise ConfigError("; ".join(foreign))


def _is_own(stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    labels, wanted = stored["metadata"].get("labels") or {}, manifest["metadata"]["labels"]
    same_role = "roleRef" not in manifest or stored.get("roleRef") == manifest["roleRef"]
    return labels.get(wire.SCHEDULE_LABEL) == wanted[wire.SCHEDULE_LABEL] and same_role


def _patch_of(manifest: Manifest, stored: Object) -> Manifest:
    """Return the merge patch; what may be absent is removed by it, but no interval that the user has set."""
    patch = {key: value for key, value in manifest.items() if key not in {"apiVersion", "kind", "roleRef"}}
    if manifest["kind"] == kube.CRON_JOBS.kind:
        patch["spec"] = {"timeZone": None} | manifest["spec"]
        removed = [wire.RETENTION_IMAGE_ANNOTATION]
        if "--verify" in schedule_words(stored):
            removed.append(wire.VERIFICATION_INTERVAL_ANNOTATION)
        annotations = dict.fromkeys(removed) | (manifest["metadata"].get("annotations") or {})
        patch["metadata"] = manifest["metadata"] | {"annotations": annotations}
    return patch


_APPLIERS: Final = {
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
    "kubectl.kubernetes.io/last-applied-configuration": "kubectl apply",
}
"""What applies an object from files, by an annotation or label; Argo CD keeps kubectl's annotation, too."""


class Schedule(WireModel):
    """One schedule. `claims` are its PVCs as text. An empty `ttl`: it has none; `keep` has counts by their rules.

    Without both, it deletes nothing; `old_rules`: it deletes by an older image.

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
    keep: dict[str, int]
    created: datetime | None
    running: int
    last_run: datetime | None
    last_success: datetime | None
    next_run: datetime | None
    old_rules: bool


class ScheduleList(WireModel):
    """Schedules in the order of their names, and notes about what could not be read."""

    schedules: list[Schedule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def read_image(client: KubeClient, namespace: str) -> AgentImage:
    """Return the image of the agents; ConfigError: no agents are installed."""
    daemonset = await client.read(kube.DAEMON_SETS, namespace, wire.AGENT_DAEMONSET)
    if daemonset is None:
        raise ConfigError(explain_no_agents(namespace))
    return AgentImage.of(daemonset)


async def check_schedule(tools: Session, request: ScheduleRequest) -> None:
    """Check what every run would need, and note the PVCs that do not exist.

    Raises:
        BackupError: the location does not exist or is read-only, or a Velero server is there, or may be.
        KubeError: the API server rejected the label selector.
    """
    await find_destination(tools, request.location, ignore_velero_server=request.choice.ignore_velero_server)
    await note_absent_claims(tools, request.choice)


async def apply_schedule(owned: OwnedObjects, objects: Sequence[Manifest]) -> ApplyResult:
    """Create or update the objects of a schedule; `CREATED`: its CronJob did not exist.

    Roles that it does not need any more are deleted before the CronJob changes, which says where they were: so an
    interrupted change may be repeated.

    Raises:
        ConfigError: an object of a name that it needs is not of the schedule; nothing was changed.
        KubeError: one cannot be created, and nothing was changed; or a request was rejected after the check: what was
            created stays, and the command may be repeated.
    """
    *others, cron_job = objects
    stored = await owned.check(cron_job)
    for manifest in others:
        await owned.check(manifest)
    results = [await owned.put(manifest) for manifest in others]
    if stored is not None:
        known: list[Manifest] = []
        # A CronJob may be of a version that cannot be read.
        with suppress(ConfigError):
            known = build_accounts(read_cron_job(cast("UncheckedObject", stored)))
        await owned.remove(await owned.find_roles(known, keep=others))
    result = await owned.put(cron_job)
    changed = any(one is not ApplyResult.UNCHANGED for one in results)
    return ApplyResult.CHANGED if changed and result is ApplyResult.UNCHANGED else result


async def find_schedules(client: KubeClient, namespace: str, names: Sequence[str], now: datetime) -> ScheduleList:
    """Return the schedules of these names, all if there are none; NotFoundError: it has the name that may be meant."""
    found, notes = [], []
    for raw in await _list_cron_jobs(client, namespace, names):
        try:
            found.append(_build(raw, read_cron_job(raw), now))
        except (ConfigError, ContractError) as e:
            notes.append(str(e))
    return ScheduleList(schedules=found, notes=notes)


async def _list_cron_jobs(client: KubeClient, namespace: str, names: Sequence[str]) -> list[UncheckedObject]:
    """Return the CronJobs of the schedules of these names, all if there are none, in the order of their names.

    They have `metadata.managedFields`, which other lists do not.
    """
    pages = client.raw_pages(Selection(kube.CRON_JOBS, namespace, label_selector=wire.SCHEDULE_LABEL))
    listed = [msgspec.json.decode(text) async for page in pages for text in page]
    found = {one["metadata"]["name"]: one for one in listed if schedule_words(one)}
    for name in names:
        if name not in found:
            raise missing(f"there is no schedule {name} in namespace {namespace}", name, list(found))
    return [found[name] for name in sorted(set(names) or found)]


def _build(raw: UncheckedObject, request: ScheduleRequest, now: datetime) -> Schedule:
    status, times, created = raw.get("status") or {}, _times_of(raw), raw["metadata"]["creationTimestamp"]
    last_run, last_success = status.get("lastScheduleTime"), status.get("lastSuccessfulTime")
    return Schedule(
        name=raw["metadata"]["name"],
        schedule=times.schedule,
        time_zone=times.time_zone or "",
        suspended=times.suspend,
        claims=request.shown_claims,
        method=str(request.choice.method),
        location=request.location,
        ttl=format_duration(request.ttl) if request.ttl is not None else "",
        keep=request.keep.by_name if request.keep else {},
        created=parse_time(created),
        running=len(status.get("active") or ()),
        last_run=parse_time(last_run) if last_run else None,
        last_success=parse_time(last_success) if last_success else None,
        next_run=None if times.suspend else times.next_after(now),
        old_rules=deletes_by_old_rules(raw),
    )


def _times_of(cron_job: UncheckedObject) -> ScheduleTimes:
    spec = cron_job["spec"]
    return ScheduleTimes(spec["schedule"], spec.get("timeZone") or None, spec.get("suspend") or False)


async def read_request(client: KubeClient, namespace: str, name: str) -> ScheduleRequest:
    """Return what the schedule backs up and keeps; raises as `find_schedules`, and ConfigError if it cannot be read."""
    (raw,) = await _list_cron_jobs(client, namespace, (name,))
    return read_cron_job(raw)


async def renew_schedules(tools: Session, names: Sequence[str], on_line: Callable[[str], None]) -> list[str]:
    """Build the objects of the schedules of these names again, all if there are none, with the image of the agents.

    `on_line` gets what became of each one; what is applied from files is left alone. Returns why some were not renewed.

    Raises:
        NotFoundError: there is none of such a name; the message has the one that may be meant.
        ConfigError: no agents are installed.
    """
    cron_jobs, failures = await _list_cron_jobs(tools.client, tools.namespace, names), list[str]()
    if not cron_jobs:
        return []
    image = await read_image(tools.client, tools.namespace)
    for cron_job in cron_jobs:
        name = cron_job["metadata"]["name"]
        if applier := find_applier(cron_job):
            on_line(
                f"schedule {name}: left alone, since {applier} applies it from files: "
                f"apply what nodeagent schedule create {name} ... -o yaml prints"
            )
            continue
        try:
            result = await _renew(tools, cron_job, image, on_line)
        except AgentError as e:
            failures.append(f"schedule {name} was not renewed: {e}")
        else:
            on_line(f"schedule {name}: {'unchanged' if result is ApplyResult.UNCHANGED else 'renewed'}")
    return failures


def find_applier(obj: Mapping[str, Any]) -> str | None:
    """Return what applies the object from files, and would undo changes; None: nothing that is known.

    Source: Kubernetes v1.34, API concepts, "Server-Side Apply": `operation` of `metadata.managedFields`.
    """
    meta = obj["metadata"]
    keys = (meta.get("annotations") or {}).keys() | (meta.get("labels") or {}).keys()
    managers = [one.get("manager") for one in meta.get("managedFields") or [] if one.get("operation") == "Apply"]
    found = [*(["Helm"] if wire.helm_release(obj) else []), *(tool for key, tool in _APPLIERS.items() if key in keys)]
    return next(iter([*found, *managers]), None)


async def _renew(
    tools: Session, cron_job: UncheckedObject, image: AgentImage, on_line: Callable[[str], None]
) -> ApplyResult:
    """Apply the objects of a schedule as its pods' command line describes it."""
    request, times = read_cron_job(cron_job), _times_of(cron_job)
    meta = cron_job["metadata"]
    if (request.namespace, request.name) != (meta["namespace"], meta["name"]):
        raise ConfigError(f"its pods run schedule {request.name} of namespace {request.namespace}")
    times.check()
    owned = OwnedObjects(tools, request, on_line)
    return await apply_schedule(owned, build_schedule(request, times, image, tools.clock.now()))


async def delete_schedule(owned: OwnedObjects) -> None:
    """Delete the roles and the account of a schedule, and its CronJob at last; its backups stay.

    The CronJob says in which namespaces there are roles: so an interrupted deletion may be repeated.

    Raises:
        ConfigError: an object of such a name is not of the schedule, and is left alone; the message names it.
    """
    request = owned.request
    known = build_accounts(request)
    meta = {"name": request.name, "namespace": request.namespace, "labels": request.own_labels}
    cron_job = {"kind": kube.CRON_JOBS.kind, "metadata": meta}
    account = [one for one in known if one["kind"] == kube.SERVICE_ACCOUNTS.kind]
    await owned.remove([*await owned.find_roles(known), *account, cron_job])
