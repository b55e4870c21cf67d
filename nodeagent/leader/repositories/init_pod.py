"""The init pod, which creates or connects one backup repository.

One at a time: the pod's name is fixed, and it is never force-deleted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from core.contract import InitResult, parse_result
from core.errors import CanceledError, ExposeError, RepositoryError, ResultError
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.types import Pod, ResourceRequirements
from core.models.base import CustomResource, WireModel
from core.models.names import OWNER_UID_LABEL, REPOSITORY_TYPE_LABEL
from core.models.storage import BackupRepository, BackupStorageLocation, BlockHash, repository_labels
from core.models.units import parse_quantity
from exposer.causes import CauseFinder
from exposer.model import Owner, Pending
from exposer.ownership import belongs, create_pod, delete_object
from exposer.pod_status import PodEnd, diagnose_pod, parse_pod_end
from exposer.pods import build_init_pod, init_pod_name
from exposer.settings import ExposeSettings, StorageAccess
from exposer.workload import ONTO_ANY_NODE
from nodeagent.leader.context import Cluster
from nodeagent.runtime.workqueue import Timers

INIT_POD_SELECTOR: Final = f"{OWNER_UID_LABEL},{REPOSITORY_TYPE_LABEL}"

_PENDING_LIMIT: Final = timedelta(seconds=90)
"""After this time without a start, the repository is NotReady with the cause: transfers wait for it."""

_STARTING_LIMIT: Final = timedelta(minutes=5)
"""The same for a pod without a fault, whose kubelet may be slow or restarting; a mover waits for 10 minutes."""

_REQUEST_LIMITS: Final = {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "128Mi"}
"""Highest resource requests of an init pod: it connects, and writes one small file."""

_SCHEDULABLE_ONLY_LIMIT: Final = timedelta(seconds=10)
"""How long only schedulable nodes count. After that, cordoned and tainted nodes count too: movers of
pod volumes run there and need their repository."""


class InitState(Enum):
    """The state of an init pod."""

    WORKING = auto()
    UNSCHEDULABLE = auto()
    """No schedulable node takes it: it may tolerate cordoned and tainted nodes."""
    TERMINATING = auto()
    """Being deleted without a result; it may be recreated after that."""
    SUCCEEDED = auto()
    FAILED = auto()


@dataclass(frozen=True)
class PodReport:
    """The state of an init pod: its result or the cause of its failure, and how long this process has observed it.

    `by_mover`: the mover reported it, so the storage was asked; what the cluster does to a pod says nothing about that.
    `pending` is why it does not run yet, or does not end although it was deleted; None: it does, or may soon.
    """

    state: InitState
    message: str = ""
    by_mover: bool = False
    pending: Pending | None = None
    age: timedelta = timedelta()


def _inspect_pod(uid: str, pod: Pod, age: timedelta, *, pending: Pending | None, model: type[WireModel]) -> PodReport:
    """Return the state of an init pod, or of the pod that validates a location, for the object with that `uid`.

    `pod` has that object's name, and was observed for `age`; `pending` is why it does not run yet, as far as Events and
    PVCs show it. `model` is the message of a pod that succeeded.
    """
    meta = pod["metadata"]
    name = f"{meta['namespace']}/{meta['name']}"
    if (meta.get("labels") or {}).get(OWNER_UID_LABEL) != uid:
        if age < _PENDING_LIMIT:
            # Most likely of an object with the same name that was just deleted.
            return PodReport(InitState.TERMINATING)
        message = f"Pod {name} belongs to another object and blocks one of this name; delete it if it is unused"
        return PodReport(InitState.FAILED, message)
    end = parse_pod_end(pod)
    if end is not None:
        return _inspect_end(name, end, model)
    if meta.get("deletionTimestamp"):
        return PodReport(InitState.TERMINATING)
    try:
        found = diagnose_pod(pod)
    except ExposeError as e:
        return PodReport(InitState.FAILED, str(e))
    pending = (pending or found) if found is not None else None
    if pending is not None and age >= (_PENDING_LIMIT if pending.blocked else _STARTING_LIMIT):
        return PodReport(InitState.FAILED, pending.message)
    unscheduled = pending is not None and pending.blocked and not pod["spec"].get("nodeName")
    schedulable_only = ONTO_ANY_NODE not in (pod["spec"].get("tolerations") or [])
    if unscheduled and schedulable_only and age >= _SCHEDULABLE_ONLY_LIMIT:
        return PodReport(InitState.UNSCHEDULABLE)
    return PodReport(InitState.WORKING)


def _inspect_end(name: str, end: PodEnd, model: type[WireModel]) -> PodReport:
    if end.exit_code != 0:
        if end.message:
            # Not by deletionTimestamp: its kubelet may keep it for a time after it was judged, and deleted.
            stopped = end.exit_code in {None, CanceledError.exit_code}
            return PodReport(InitState.FAILED, end.message, by_mover=end.plain and not stopped)
        return PodReport(InitState.FAILED, f"Pod {name} failed: {end.reason or f'exit code {end.exit_code}'}")
    try:
        parse_result(model, end.message)
    except ResultError as e:
        return PodReport(InitState.FAILED, f"Pod {name}: {e}")
    return PodReport(InitState.SUCCEEDED, end.message, by_mover=True)


def init_resources(resources: ResourceRequirements) -> ResourceRequirements:
    """Return the resources of an init pod (of a container, as JSON dict), given the movers'.

    It moves no data, and transfers wait for it: it must fit on a node that is too full for a mover. Limits
    and the set of requests stay, since a ResourceQuota may require them; a limit without a request
    would imply one.
    """
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    reduced = {
        name: min(requests.get(name, limits.get(name, most)), most, key=parse_quantity)
        for name, most in _REQUEST_LIMITS.items()
        if name in requests or name in limits
    }
    return resources | {"requests": reduced} if reduced else resources


class InitPods:
    """The pods of one controller, each for one object: how they are built, what they say, and their deletion."""

    def __init__(self, cluster: Cluster, settings: Callable[[], ExposeSettings], causes: CauseFinder) -> None:
        self._settings = settings
        self._cluster = cluster
        self._causes = causes
        self._ages = Timers(cluster.clock)

    def settings(self) -> ExposeSettings:
        """Return the active settings, with the resources of an init pod."""
        active = self._settings()
        return replace(active, pod=replace(active.pod, resources=init_resources(active.pod.resources)))

    def forget(self, name: str) -> None:
        """Record that there is no pod for the object `name`."""
        self._ages.forget(name)

    async def inspect(self, cr: CustomResource, pod: Pod, *, model: type[WireModel] = InitResult) -> PodReport:
        """Return the state of the pod for `cr`; one that no schedulable node takes may go to any other from now on."""
        try:
            pending = await self._causes.explain(pod)
        except ExposeError:
            # The state of the pod reports it.
            pending = None
        deleting = bool(pod["metadata"].get("deletionTimestamp"))
        age = timedelta(seconds=self._ages.seconds(cr.name, f"{pod['metadata']['uid']} {deleting}"))
        report = _inspect_pod(cr.uid, pod, age, pending=pending, model=model)
        if report.state is InitState.UNSCHEDULABLE:
            await tolerate_any_node(self._cluster.client, pod)
        if deleting and report.state is InitState.TERMINATING:
            # On a lost node it stays until that is back or deleted. This sends no request.
            held = await delete_object(self._cluster.client, PODS, pod)
            pending = replace(held, blocked=True) if held is not None and age >= _PENDING_LIMIT else None
        return replace(report, pending=pending, age=age)

    async def delete(self, cr: CustomResource, pod: Pod) -> None:
        """Request the deletion of the pod if it is the object's own."""
        if belongs(pod, Owner.of(cr)):
            self._cluster.check_leading()
            await delete_object(self._cluster.client, PODS, pod)


async def read_init_pod(client: KubeClient, repository: BackupRepository) -> Pod | None:
    """Return the pod with the name of the repository's init pod, or None."""
    return await client.read(PODS, repository.metadata.namespace, init_pod_name(Owner.of(repository)))


async def tolerate_any_node(client: KubeClient, pod: Pod) -> None:
    """Let `pod`, as it was just read, be scheduled to a cordoned or tainted node.

    Source: Kubernetes v1.34, validation of pod updates: tolerations may be added to a pod.
    """
    tolerations = [*(pod["spec"].get("tolerations") or []), ONTO_ANY_NODE]
    await client.patch_if_unchanged(PODS, pod, {"spec": {"tolerations": tolerations}})


async def start_init_pod(
    client: KubeClient, repository: BackupRepository, settings: ExposeSettings, block_hash: BlockHash | None
) -> None:
    """Create the repository's init pod, which creates a repository with `block_hash`; None: kopia's default.

    `settings` have the resources of an init pod.

    Raises:
        RepositoryError: its location does not exist.
        KubeError: InvalidError and ForbiddenError mean that the API server rejects this pod.
    """
    owner, spec = Owner.of(repository), repository.spec
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, owner.namespace, spec.backup_storage_location)
    if raw is None:
        shown = f"{BACKUP_STORAGE_LOCATIONS.kind} {owner.namespace}/{spec.backup_storage_location}"
        raise RepositoryError(f"{shown} does not exist")
    storage = StorageAccess.of(BackupStorageLocation.parse(raw))
    manifest = build_init_pod(owner, settings, storage=storage, block_hash=block_hash)
    manifest["metadata"]["labels"] |= repository_labels(spec.volume_namespace, spec.backup_storage_location)
    await create_pod(client, manifest)
