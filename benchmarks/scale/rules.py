"""What storage, scheduler, kubelet and mover do about one transfer, and pods that only ask the storage do.

Level-based like the real controllers, each call does what is missing: all objects of a transfer have its name.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.scale.kubelet import PodDirectories
from core.clock import Clock
from core.contract import DataPathReason, InitResult, LocationResult, MoverVerb, ProgressMessage
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, ConflictError, NotFoundError
from core.kube.event_files import write_event
from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_SNAPSHOTS, Resource
from core.kube.transport import Request
from core.models.base import format_time
from core.models.names import NODE_LABEL
from exposer.workload import EVENTS_VOLUME
from nodeagent.runtime.workqueue import Requeue
from tests.crash.controllers import set_status
from tests.nodeagent.support.simulation import BACKUP_DONE, RESTORE_DONE
from tests.nodeagent.support.volume_scene import an_object
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict

_TOTAL_BYTES: Final = 1000
_BACKUPS: Final = frozenset({"DataUpload", "PodVolumeBackup"})

_STORAGE_RESULTS: Final = {
    str(MoverVerb.INIT_REPOSITORY): InitResult(unique_id="2f47a1", created=True).to_json(),
    str(MoverVerb.VALIDATE_LOCATION): LocationResult().to_json(),
}
"""What the pods report that ask the storage for the leader, about no transfer."""


@dataclass(frozen=True)
class Seen:
    """All objects of one transfer, as JSON; None where there is none. `target` is in another namespace."""

    transfer: JsonDict | None
    pod: JsonDict | None
    claim: JsonDict | None
    target: JsonDict | None
    volume: JsonDict | None
    snapshot: JsonDict | None


@dataclass(frozen=True)
class Shape:
    """What movers do: how long they move data, how often they report progress, on which nodes they run."""

    seconds: float
    reports: int
    nodes: tuple[str, ...]


def volume_name(namespace: str, transfer: str) -> str:
    """Return the name of the volume that is made for the claim of a transfer."""
    return f"pv-{namespace}-{transfer}"


@dataclass
class Rules:
    """The controllers of `namespace`; `count_pods` returns how many movers each node has."""

    client: KubeClient
    clock: Clock
    namespace: str
    shape: Shape
    directories: PodDirectories
    count_pods: Callable[[], Counter[str]]
    _started: dict[str, tuple[float, int]] = field(default_factory=dict)
    _assigned: dict[str, str] = field(default_factory=dict)

    async def reconcile(self, name: str, seen: Seen) -> Requeue | None:
        """Do what is missing for the transfer of that name."""
        # What another call did a moment ago, or an agent meanwhile, is done.
        with suppress(ConflictError, NotFoundError, AlreadyExistsError):
            if seen.snapshot is not None:
                await self._ready(name, seen.snapshot)
            if seen.claim is not None:
                await self._provision(name, seen.claim, seen)
            elif seen.volume is not None:
                await self._reclaim(seen.volume, seen.target)
            if seen.pod is not None:
                return await self._run(seen.pod, seen)
        return None

    async def _ready(self, name: str, snapshot: JsonDict) -> None:
        if snapshot["metadata"].get("deletionTimestamp") or (snapshot.get("status") or {}).get("readyToUse"):
            return
        status = {"readyToUse": True, "restoreSize": "1Gi", "boundVolumeSnapshotContentName": name}
        await set_status(self.client, VOLUME_SNAPSHOTS, snapshot, status)

    async def _provision(self, name: str, claim: JsonDict, seen: Seen) -> None:
        meta = claim["metadata"]
        if meta.get("deletionTimestamp"):
            if seen.pod is None:
                await self._patch(PERSISTENT_VOLUME_CLAIMS, claim, {"metadata": {"finalizers": None}})
            return
        if seen.volume is None:
            volume = await self.client.create(PERSISTENT_VOLUMES, _build_volume(self.namespace, name, claim))
            await set_status(self.client, PERSISTENT_VOLUMES, volume, {"phase": "Bound"})
        if not claim["spec"].get("volumeName"):
            bound = {"spec": {"volumeName": volume_name(self.namespace, name)}}
            await self._patch(PERSISTENT_VOLUME_CLAIMS, claim, bound)
        if (claim.get("status") or {}).get("phase") != "Bound":
            await set_status(self.client, PERSISTENT_VOLUME_CLAIMS, claim, {"phase": "Bound"})

    async def _reclaim(self, volume: JsonDict, target: JsonDict | None) -> None:
        spec, name = volume["spec"], volume["metadata"]["name"]
        phase = (volume.get("status") or {}).get("phase")
        if target is not None and target["metadata"]["uid"] == (spec.get("claimRef") or {}).get("uid"):
            if target["spec"].get("volumeName") != name:
                return
            if phase != "Bound":
                await set_status(self.client, PERSISTENT_VOLUMES, volume, {"phase": "Bound"})
            if (target.get("status") or {}).get("phase") != "Bound":
                await set_status(self.client, PERSISTENT_VOLUME_CLAIMS, target, {"phase": "Bound"})
        elif spec["persistentVolumeReclaimPolicy"] == "Delete":
            if volume["metadata"].get("finalizers"):
                await self._patch(PERSISTENT_VOLUMES, volume, {"metadata": {"finalizers": None}})
            await self.client.delete(PERSISTENT_VOLUMES, "", name)
        elif phase != "Released":
            await set_status(self.client, PERSISTENT_VOLUMES, volume, {"phase": "Released"})

    async def _run(self, pod: JsonDict, seen: Seen) -> Requeue | None:
        meta = pod["metadata"]
        if meta.get("deletionTimestamp"):
            self._started.pop(meta["uid"], None)
            self.directories.remove(pod)
            await force_delete(self.client, PODS, self.namespace, meta["name"], uid=meta["uid"])
            return None
        if not pod["spec"].get("nodeName"):
            await self._schedule(pod)
            return None
        phase = (pod.get("status") or {}).get("phase", "Pending")
        if phase == "Pending":
            self._assigned.pop(meta["uid"], None)
            if seen.claim is None or (seen.claim.get("status") or {}).get("phase") == "Bound":
                self.directories.make(pod)
                await set_status(self.client, PODS, pod, {"phase": "Running"})
        elif phase == "Running" and seen.transfer is not None:
            return await self._move_data(pod, seen.transfer)
        elif phase == "Running" and (result := _STORAGE_RESULTS.get(_verb(pod))):
            await self._succeed(pod, result)
        return None

    async def _schedule(self, pod: JsonDict) -> None:
        """Bind a pod to the node it needs, or to the one with the fewest movers."""
        meta = pod["metadata"]
        counts = self.count_pods() + Counter(self._assigned.values())
        fewest = min(self.shape.nodes, key=lambda node: (counts[node], node))
        node = _needed_node(pod) or fewest
        self._assigned[meta["uid"]] = node
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}}
        body = json.dumps(binding | {"target": {"apiVersion": "v1", "kind": "Node", "name": node}}).encode()
        path = PODS.path(self.namespace, meta["name"], subresource="binding")
        await self.client.transport.request(Request("POST", path, body=body))

    async def _move_data(self, pod: JsonDict, transfer: JsonDict) -> Requeue | None:
        """Report progress so many times, then complete; not before the transfer is InProgress."""
        if (transfer.get("status") or {}).get("phase") != "InProgress":
            return None
        uid, now = pod["metadata"]["uid"], self.clock.monotonic()
        if uid not in self._started:
            self._started[uid] = (now, 0)
            text = f"Data path for {transfer['metadata']['name']} started"
            await self._record(transfer, pod, DataPathReason.STARTED, text)
        began, reported = self._started[uid]
        every = self.shape.seconds / (self.shape.reports + 1)
        due = began + every * (reported + 1)
        if now < due:
            return Requeue(due - now)
        if reported < self.shape.reports:
            self._started[uid] = (began, reported + 1)
            done = _TOTAL_BYTES * (reported + 1) // (self.shape.reports + 1)
            progress = ProgressMessage(total_bytes=_TOTAL_BYTES, done_bytes=done, sent_bytes=done // 2)
            await self._record(transfer, pod, DataPathReason.PROGRESS, progress.to_json())
            return Requeue(max(0.0, due + every - self.clock.monotonic()))
        await self._succeed(pod, BACKUP_DONE if transfer["kind"] in _BACKUPS else RESTORE_DONE)
        return None

    async def _succeed(self, pod: JsonDict, message: str) -> None:
        ended = {"name": "mover", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
        terminated = {"terminated": {"exitCode": 0, "message": message}}
        status = {"phase": "Succeeded", "containerStatuses": [ended | {"state": terminated}]}
        await set_status(self.client, PODS, pod, status)

    async def _record(self, transfer: JsonDict, pod: JsonDict, reason: DataPathReason, message: str) -> None:
        """Record an Event, also in a file for the agent of the node."""
        meta, now = transfer["metadata"], format_time(self.clock.now())
        name = f"{meta['name']}.{time.time_ns():x}"
        labels = {NODE_LABEL: meta["labels"][NODE_LABEL]}
        about = {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
        event = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": meta["namespace"], "labels": labels},
            "involvedObject": about | {"apiVersion": transfer["apiVersion"], "kind": transfer["kind"]},
            "type": "Normal",
            "reason": str(reason),
            "message": message,
            "firstTimestamp": now,
            "lastTimestamp": now,
        }
        if (files := self.directories.volume(pod, EVENTS_VOLUME)).is_dir():
            write_event(files, event)
        await self.client.create(EVENTS, event)

    async def _patch(self, resource: Resource, obj: JsonDict, patch: Mapping[str, Any]) -> None:
        meta = obj["metadata"]
        await self.client.patch(resource, meta.get("namespace", ""), meta["name"], dict(patch))


def _build_volume(namespace: str, name: str, claim: JsonDict) -> JsonDict:
    reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": name}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "claimRef": reference | {"uid": claim["metadata"]["uid"]},
        "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": name},
        "persistentVolumeReclaimPolicy": "Delete",
    }
    annotations = {"pv.kubernetes.io/provisioned-by": "hostpath.csi.k8s.io"}
    return an_object("PersistentVolume", volume_name(namespace, name), annotations=annotations, spec=spec)


def _verb(pod: JsonDict) -> str:
    """Return what a mover's pod does; empty for other pods."""
    return str(next(iter(pod["spec"]["containers"][0].get("args") or ()), ""))


def _needed_node(pod: JsonDict) -> str:
    """Return the only node that the pod's affinity allows; empty where there are several."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or []:
        for wanted in term.get("matchFields") or []:
            return str(wanted["values"][0])
    return ""
