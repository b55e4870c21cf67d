"""The node's half of an agent in a simulated cluster, with an API that fails at a chosen request.

`Fuse` sits between the agent and the fake API server: it counts the agent's requests and
at one of them stops the agent, or lets the request fail.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum, auto

from core.kube import resources
from core.kube.client import KubeClient
from core.kube.errors import UnreachableError
from core.kube.events import EventRecorder
from core.kube.resources import (
    EVENTS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Request, Response, Retry, Transport
from core.models.names import (
    DATA_MOVER_FINALIZER,
    EXPOSE_ON_GOING_LABEL,
    NODE_LABEL,
    POD_VOLUME_FINALIZER,
    RECLAIM_POLICY_ANNOTATION,
)
from core.models.phases import RetryRules, Uptime
from core.models.transfers import Transfer
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.app import build_kinds
from nodeagent.metrics import Metrics
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.node.reconciler import Reconciler
from nodeagent.node.steps import Slots, Tools
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.retries import PendingRecords
from nodeagent.transfers.status import EventLog, StatusWriter
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES, Cluster, Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, workload_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running, until
from tests.support.transports import Around

OUTAGE = 6
ACCEPTED_AT = "2026-11-21T12:00:00Z"
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Fault(Enum):
    """What happens at the chosen request."""

    STOP_BEFORE = auto()
    STOP_AFTER = auto()
    CONFLICT = auto()
    SERVER_ERROR = auto()
    LOST = auto()
    LOST_APPLIED = auto()

    @property
    def lasts(self) -> int:
        """The number of consecutive requests that it affects."""
        return OUTAGE if self in {Fault.SERVER_ERROR, Fault.LOST} else 1

    @property
    def stops(self) -> bool:
        """Whether the agent is stopped there."""
        return self in {Fault.STOP_BEFORE, Fault.STOP_AFTER}


@dataclass
class Fuse(Around):
    """The agent's transport to the API server; blows at request number `at`.

    `counts` selects the requests that are counted. An outage lasts for `OUTAGE` of them: more than
    one request is retried. An agent that is stopped sends nothing any more.
    """

    inner: Transport = field(default_factory=FakeKube)
    counts: Callable[[Request], bool] = lambda request: request.method != "GET"
    at: int = 1_000_000
    fault: Fault = Fault.STOP_BEFORE
    counted: list[str] = field(default_factory=list)
    blown: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, request: Request) -> Response:
        if self.fault.stops and self.blown.is_set():
            raise UnreachableError(f"{request.method} {request.path}: the agent is stopped")
        if not self.counts(request):
            return await self.inner.request(request)
        self.counted.append(f"{request.method} {request.path}")
        if not self.at <= len(self.counted) - 1 < self.at + self.fault.lasts:
            return await self.inner.request(request)
        try:
            if self.fault in {Fault.STOP_AFTER, Fault.LOST_APPLIED}:
                await self.inner.request(request)
        finally:
            # Also where a slow server lost the answer by itself.
            self.blown.set()
        if self.fault.stops:
            await asyncio.Event().wait()
        if self.fault in {Fault.LOST, Fault.LOST_APPLIED}:
            raise UnreachableError(f"{request.method} {request.path}: no answer")
        status = 409 if self.fault is Fault.CONFLICT else 500
        return Response(status, json.dumps({"message": "injected", "reason": "Injected"}).encode())


NO_RETRIES = RetryRules(enabled=False)


def build_agent(
    transport: Transport,
    *,
    node: str = NODE,
    slots: int = 1,
    metrics: Metrics | None = None,
    skew: timedelta = timedelta(),
    starting: Callable[[Transfer], dict[str, str | None]] = lambda _: {},
    **settings: object,
) -> Reconciler:
    """Return the node's half of the agent of `node`, whose wall clock is ahead by `skew`, wired as the product does.

    `settings` replace fields of `ExposeSettings`; `retries` are the limits of retries; without them
    there are none. `host_pods` is the kubelet's pods directory; without it the agent has none.
    """
    retries, host_pods = settings.pop("retries", NO_RETRIES), settings.pop("host_pods", "")
    assert isinstance(retries, RetryRules)
    clock = LoopClock(skew)
    client = KubeClient(transport, Retry(clock))
    metrics = metrics or Metrics(node)
    exposes = replace(ExposeSettings(AgentTemplate(image="mover:1", host_pods="/host_pods")), **settings)  # type: ignore[arg-type] # fields
    kinds = build_kinds(client, CauseFinder(client, clock), lambda: exposes, Settings("").datamover_names, node=node)
    site = Site(node, NAMESPACE, host_pods=str(host_pods))
    cache = TransferCache(client, clock, site, kinds=kinds)
    status = StatusWriter(client, lambda: clock.now() - skew, on_stored=[cache.observe_written])
    tools = Tools(
        site=site,
        limits=Timeouts(),
        client=client,
        clock=clock,
        cache=cache,
        pending=PendingRecords(clock),
        status=status,
        events=EventLog(EventRecorder(client, clock, component="node-agent", host=node)),
        logs=MoverLogs(client),
        progress=ProgressFollower(client, clock, site, status=status, metrics=metrics),
        slots=Slots(slots),
        metrics=metrics,
        retry_rules=lambda _: retries,
        api_time=lambda: clock.now() - skew,
        uptime=lambda: Uptime(boot=f"boot of {node}", seconds=clock.monotonic()),
        starting=starting,
    )
    return Reconciler(tools, kinds)


@dataclass
class World:
    """A cluster with the objects that a transfer needs, and the questions of a test about it."""

    kube: FakeKube
    cluster: Cluster

    def transfer(self, kind: str = "DataUpload", name: str = "") -> JsonDict:
        """Return the only transfer of `kind`, or the one of that name."""
        transfers = [o for o in self.kube.objects(TRANSFER_RESOURCES[kind]) if name in {"", o["metadata"]["name"]}]
        return transfers[0] if transfers else {}

    def phase(self, kind: str = "DataUpload", name: str = "") -> str:
        """Return the phase of the transfer, empty if it does not exist."""
        return str(self.transfer(kind, name).get("status", {}).get("phase", ""))

    def reasons(self) -> list[str]:
        events = [e for e in self.kube.objects(EVENTS) if e.get("source", {}).get("component") == "node-agent"]
        return [e["reason"] for e in sorted(events, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    def left(self) -> dict[str, list[str]]:
        """Return the names of all objects except transfers and Events."""
        kinds: tuple[Resource, ...] = (
            PODS,
            PERSISTENT_VOLUME_CLAIMS,
            PERSISTENT_VOLUMES,
            VOLUME_SNAPSHOTS,
            VOLUME_SNAPSHOT_CONTENTS,
        )
        names = {r.plural: sorted(o["metadata"]["name"] for o in self.kube.objects(r)) for r in kinds}
        return {plural: found for plural, found in names.items() if found}

    def everything(self) -> list[str]:
        """Return every object of every kind as `Kind namespace/name`, Events left out; a UID in a name is a star."""
        return sorted(
            _UID.sub("*", f"{resource.kind} {obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}")
            for resource in vars(resources).values()
            if isinstance(resource, Resource) and resource is not EVENTS
            for obj in self.kube.objects(resource)
        )

    def target(self) -> tuple[JsonDict, JsonDict]:
        """Return the claim a DataDownload restores into, and its volume (empty: none)."""
        claim = next(o for o in self.kube.objects(PERSISTENT_VOLUME_CLAIMS) if o["metadata"]["namespace"] != NAMESPACE)
        volumes = {o["metadata"]["name"]: o for o in self.kube.objects(PERSISTENT_VOLUMES)}
        return claim, volumes.get(claim["spec"].get("volumeName", ""), {})

    async def stop(self, transfer: JsonDict, by: str) -> None:
        """Request the cancel of a transfer by `cancel` or by `deletion`."""
        resource, name = TRANSFER_RESOURCES[transfer["kind"]], transfer["metadata"]["name"]
        if by == "cancel":
            await self.cluster.client.patch(resource, NAMESPACE, name, {"spec": {"cancel": True}})
        else:
            await self.cluster.client.delete(resource, NAMESPACE, name)

    async def until(self, condition: Callable[[], bool], *, seconds: float = 300.0, every: float = 0.05) -> None:
        """Wait in virtual time until `condition` holds, checking it `every` so many seconds."""
        await until(condition, seconds=seconds, every=every)

    def done(self, kind: str = "DataUpload", name: str = "") -> bool:
        """Return whether the transfer is cleaned up and released."""
        meta = self.transfer(kind, name).get("metadata")
        return meta is None or NODE_LABEL not in meta.get("labels", {})

    @asynccontextmanager
    async def agent(self, transport: Transport | None = None, **options: object) -> AsyncIterator[Reconciler]:
        reconciler = build_agent(transport or self.kube, **options)  # type: ignore[arg-type] # passed through
        async with running(reconciler.run()):
            yield reconciler


def accepted(transfer: JsonDict, *, node: str = NODE) -> JsonDict:
    """Return a transfer as the dispatcher accepts it for `node`."""
    transfer["metadata"]["labels"] |= {NODE_LABEL: node, EXPOSE_ON_GOING_LABEL: "true"}
    by_pod = transfer["kind"].startswith("PodVolume")
    transfer["metadata"]["finalizers"] = [POD_VOLUME_FINALIZER if by_pod else DATA_MOVER_FINALIZER]
    transfer["status"] = {"phase": "Accepted", "acceptedTimestamp": ACCEPTED_AT}
    if not by_pod:
        transfer["status"]["acceptedByNode"] = node
    return transfer


@asynccontextmanager
async def open_world(*transfers: JsonDict, mover: Mover | None = None) -> AsyncIterator[World]:
    """Run a cluster that has those transfers and their volumes."""
    kube = FakeKube()
    cluster = Cluster(kube.client, mover or Mover(), kube=kube)
    for transfer in transfers:
        kube.put(transfer)
        for obj in volumes_of(transfer):
            kube.put(obj)
    task = asyncio.create_task(cluster.run(), name="cluster")
    try:
        yield World(kube, cluster)
    finally:
        task.cancel()
        # An error of the simulation itself would explain every other failure.
        with suppress(asyncio.CancelledError):
            await task


def volumes_of(transfer: JsonDict) -> list[JsonDict]:
    """Return the objects that a transfer needs."""
    name = transfer["metadata"]["name"]
    if transfer["kind"].startswith("PodVolume"):
        return [workload_pod(transfer)]
    if transfer["kind"] == "DataDownload":
        target = transfer["spec"]["targetVolume"]
        claim = _claim(target["namespace"], target["pvc"])
        return [claim, _released(target)] if target.get("pv") else [claim]
    source, namespace = transfer["spec"]["csiSnapshot"]["volumeSnapshot"], transfer["spec"]["sourceNamespace"]
    content, claim = f"content-{name}", transfer["spec"]["sourcePVC"]
    reference = {"name": source, "namespace": namespace, "uid": f"vs-{name}"}
    return [
        _claim(namespace, claim, volume="pv-source"),
        build_object(
            VOLUME_SNAPSHOTS,
            source,
            namespace,
            # Before the transfer, as Velero creates it.
            metadata={"uid": f"vs-{name}", "creationTimestamp": "2026-11-21T10:59:00Z"},
            spec={"source": {"persistentVolumeClaimName": claim}},
            status={"readyToUse": True, "restoreSize": "1Gi", "boundVolumeSnapshotContentName": content},
        ),
        build_object(
            VOLUME_SNAPSHOT_CONTENTS,
            content,
            metadata={"uid": f"vsc-{name}"},
            spec=_DELETED | {"source": {"volumeHandle": "v"}, "volumeSnapshotRef": reference},
            status={"readyToUse": True, "snapshotHandle": f"handle-{name}"},
        ),
    ]


_DELETED = {"deletionPolicy": "Delete", "driver": "hostpath.csi.k8s.io"}


def _released(target: JsonDict) -> JsonDict:
    """Return the existing volume of a target, as a command has retained and released it."""
    meta = {"annotations": {RECLAIM_POLICY_ANNOTATION: "Delete"}}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": target["namespace"], "name": target["pvc"], "uid": "uid-deleted"},
        "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": "handle-old"},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    return build_object(PERSISTENT_VOLUMES, target["pv"], metadata=meta, spec=spec, status={"phase": "Released"})


def _claim(namespace: str, name: str, *, volume: str = "") -> JsonDict:
    size = {"resources": {"requests": {"storage": "1Gi"}}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "", **size}
    spec |= {"volumeName": volume} if volume else {}
    status = {"phase": "Bound" if volume else "Pending"}
    return build_object(PERSISTENT_VOLUME_CLAIMS, name, namespace, spec=spec, status=status)
