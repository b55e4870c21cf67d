"""The rest of a cluster: storage, scheduler, kubelet and movers of one node.

Level-based like the real controllers: every tenth of a second each rule compares desired and observed state and does
what is missing. `Mover` describes a mover that may start. `Cluster` runs them with the fake API server; `tests.crash`
with a real one.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, ConflictError, NotFoundError
from core.kube.event_files import write_event
from core.kube.resources import (
    EVENTS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    TRANSFERS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.base import format_time
from core.models.names import ATTEMPT_LABEL, ATTEMPTS_ANNOTATION, NODE_LABEL, OWNER_UID_LABEL
from core.models.phases import Attempts, AttemptStage
from exposer.workload import EVENTS_VOLUME
from tests.nodeagent.support.transfers import NODE
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object

BACKUP_DONE = json.dumps(
    {
        "snapshotID": "kopia-1",
        "source": {"byPath": "/uid", "volumeMode": "Filesystem"},
        "totalBytes": 1000,
        "incrementalBytes": 600,
    }
)
RESTORE_DONE = json.dumps({"target": {"byPath": "/uid", "volumeMode": "Filesystem"}, "totalBytes": 1000})
TRANSFER_RESOURCES = {r.kind: r for r in TRANSFERS}
CANCELED = "the data path is canceled"
_CONTAINER = "mover"
_REPORT_SECONDS = 1.0
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
"""The condition of a pod that the kubelet evicts; one that it rejects has none."""


@dataclass
class Mover:
    """A mover: how long it moves data, and how it ends.

    `stubborn`: it does not stop after a cancel request. `message` of None is the result of its kind.
    `rejected` is why the kubelet rejects the first `rejections` pods; `evicted`: it evicts each one instead.
    The movers of the first `interrupted` attempts are killed instead of ending. With `host_pods`, the kubelet's pods
    directory, a mover writes its Events to files there, and leaves its result; the kubelet reports its end a second
    later.
    """

    seconds: float = 3.0
    exit_code: int = 0
    message: str | None = None
    reason: str = ""
    stubborn: bool = False
    starts: bool = True
    rejected: str = ""
    rejections: int = 1_000_000
    evicted: bool = False
    interrupted: int = 0
    host_pods: Path | None = None

    def mount(self, pod: JsonDict) -> None:
        """Make the directory for the Events of a pod that has a volume for them."""
        if self.host_pods is not None and any(each["name"] == EVENTS_VOLUME for each in pod["spec"]["volumes"]):
            _events_directory(self.host_pods, pod).mkdir(parents=True, exist_ok=True)

    def write(self, pod: JsonDict, event: JsonDict) -> None:
        if self.host_pods is not None and (directory := _events_directory(self.host_pods, pod)).is_dir():
            write_event(directory, event)

    def leave(self, pod: JsonDict, message: str) -> None:
        """Write the termination message where the kubelet collects it."""
        if self.host_pods is not None:
            directory = self.host_pods / pod["metadata"]["uid"] / "containers" / _CONTAINER
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "0a1b2c3d").write_text(message)


@dataclass
class Controllers(ABC):
    """The controllers; `run` them beside the agent.

    `moved` has the data of the last completed mover by the UID of its transfer: the handle of a snapshot, the name of
    a volume, or a folder. `grants`: another attempt may begin. `refuses_devices`: volumes have a file system only.
    """

    client: KubeClient
    mover: Mover = field(default_factory=Mover)
    node: str = NODE
    tick_seconds: float = 0.1
    binds: bool = True
    snapshots_become_ready: bool = True
    grants: bool = False
    refuses_devices: bool = False
    moved: dict[str, str] = field(default_factory=dict)
    _started_at: dict[str, float] = field(default_factory=dict)
    _rejected: int = 0
    _events: int = 0

    async def run(self) -> None:
        while True:
            for rule in self._rules():
                # An object may be deleted or changed between the read and the write: the next pass sees that.
                with suppress(NotFoundError, ConflictError):
                    await rule()
            await asyncio.sleep(self.tick_seconds)

    def _rules(self) -> Iterator[Callable[[], Awaitable[None]]]:
        yield from (self._snapshots, self._claims, self._volumes, self._pods)
        if self.grants:
            yield self._let_begin

    async def _snapshots(self) -> None:
        contents = {o["metadata"]["name"]: o for o in await self._all(VOLUME_SNAPSHOT_CONTENTS)}
        snapshots = {o["metadata"]["uid"]: o for o in await self._all(VOLUME_SNAPSHOTS)}
        for snapshot in snapshots.values():
            name = snapshot["spec"]["source"].get("volumeSnapshotContentName", "")
            content = contents.get(name)
            if content is None or (snapshot.get("status") or {}).get("readyToUse"):
                continue
            if not self.snapshots_become_ready:
                continue
            uid = {"uid": snapshot["metadata"]["uid"]}
            ready = {"readyToUse": True, "restoreSize": "1Gi"}
            await self._patch(VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"volumeSnapshotRef": uid}})
            taken = {"readyToUse": True, "snapshotHandle": content["spec"]["source"]["snapshotHandle"]}
            await self._set_status(VOLUME_SNAPSHOT_CONTENTS, content, taken)
            status = ready | {"boundVolumeSnapshotContentName": name}
            await self._set_status(VOLUME_SNAPSHOTS, snapshot, status)
        for content in contents.values():
            uid = content["spec"]["volumeSnapshotRef"].get("uid", "")
            if uid and uid not in snapshots and content["spec"]["deletionPolicy"] == "Delete":
                await self.client.delete(VOLUME_SNAPSHOT_CONTENTS, "", content["metadata"]["name"])

    async def _claims(self) -> None:
        """Provision the PVCs that an agent has created, also Velero's; those of workloads stay pending."""
        for claim in await self._all(PERSISTENT_VOLUME_CLAIMS):
            meta, spec = claim["metadata"], claim["spec"]
            owned = OWNER_UID_LABEL in meta.get("labels", {}) or meta.get("ownerReferences")
            if not owned or spec.get("volumeName"):
                continue
            if self.refuses_devices and spec.get("volumeMode") == "Block":
                await self._refuse(claim)
                continue
            name = f"pvc-{meta['uid']}"
            reference = {key: meta[key] for key in ("namespace", "name", "uid")}
            spec_of_volume = {
                "accessModes": spec["accessModes"],
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "claimRef": reference | {"kind": "PersistentVolumeClaim"},
                "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": name},
                "persistentVolumeReclaimPolicy": "Delete",
                "volumeMode": spec.get("volumeMode", "Filesystem"),
            }
            volume = build_object(PERSISTENT_VOLUMES, name, spec=spec_of_volume)
            await self._create(PERSISTENT_VOLUMES, volume, {"phase": "Bound"})
            await self._patch(PERSISTENT_VOLUME_CLAIMS, claim, {"spec": {"volumeName": name}})
            await self._set_status(PERSISTENT_VOLUME_CLAIMS, claim, {"phase": "Bound"})

    async def _refuse(self, claim: JsonDict) -> None:
        """Record the Event of a provisioner, once."""
        meta = claim["metadata"]
        event = build_object(
            EVENTS,
            f"refused-{meta['uid']}",
            meta["namespace"],
            involvedObject={"kind": "PersistentVolumeClaim", "name": meta["name"], "uid": meta["uid"]},
            type="Warning",
            reason="ProvisioningFailed",
            message="rpc error: code = InvalidArgument desc = block volume capability not supported",
        )
        with suppress(AlreadyExistsError):
            await self._create(EVENTS, event)

    async def _volumes(self) -> None:
        claims = {o["metadata"]["uid"]: o for o in await self._all(PERSISTENT_VOLUME_CLAIMS)}
        for volume in await self._all(PERSISTENT_VOLUMES):
            spec, name = volume["spec"], volume["metadata"]["name"]
            reference = spec.get("claimRef") or {}
            claim = claims.get(reference.get("uid", ""))
            if reference.get("name") and not reference.get("uid"):
                await self._bind_reserved(volume, claims.values())
            elif claim is None:
                if spec["persistentVolumeReclaimPolicy"] == "Delete":
                    await self.client.delete(PERSISTENT_VOLUMES, "", name)
                elif (volume.get("status") or {}).get("phase") != "Released":
                    await self._set_status(PERSISTENT_VOLUMES, volume, {"phase": "Released"})
            elif self.binds and claim["spec"].get("volumeName") == name:
                for resource, obj in ((PERSISTENT_VOLUMES, volume), (PERSISTENT_VOLUME_CLAIMS, claim)):
                    if (obj.get("status") or {}).get("phase") != "Bound":
                        await self._set_status(resource, obj, {"phase": "Bound"})

    async def _bind_reserved(self, volume: JsonDict, claims: Iterable[JsonDict]) -> None:
        """Bind a volume that is reserved by name, unless the PVC of that name has another one."""
        reference, name = volume["spec"]["claimRef"], volume["metadata"]["name"]
        for claim in claims:
            meta = claim["metadata"]
            here = (meta["namespace"], meta["name"]) == (reference["namespace"], reference["name"])
            if here and self.binds and claim["spec"].get("volumeName") in {None, name}:
                await self._patch(PERSISTENT_VOLUMES, volume, {"spec": {"claimRef": {"uid": meta["uid"]}}})
                await self._patch(PERSISTENT_VOLUME_CLAIMS, claim, {"spec": {"volumeName": name}})
                await self._set_status(PERSISTENT_VOLUMES, volume, {"phase": "Bound"})
                await self._set_status(PERSISTENT_VOLUME_CLAIMS, claim, {"phase": "Bound"})

    async def _let_begin(self) -> None:
        for transfer in [o for resource in TRANSFER_RESOURCES.values() for o in await self._all(resource)]:
            attempts, phase = _attempts_of(transfer), (transfer.get("status") or {}).get("phase")
            if phase != "InProgress" or attempts.stage is not AttemptStage.READY:
                continue
            mark = {ATTEMPTS_ANNOTATION: attempts.move(AttemptStage.EXPOSING).to_json()}
            version = {key: transfer["metadata"][key] for key in ("uid", "resourceVersion")}
            patch: JsonDict = {"metadata": version | {"annotations": mark}}
            await self._patch(TRANSFER_RESOURCES[transfer["kind"]], transfer, patch)

    async def _pods(self) -> None:
        for pod in await self._all(PODS):
            if not pod["metadata"].get("ownerReferences"):
                # A workload's: the test itself changes it.
                continue
            phase = (pod.get("status") or {}).get("phase", "Pending")
            bound = not self.refuses_devices or await self._has_volumes(pod)
            if phase == "Pending" and self.mover.starts and bound:
                self.mover.mount(pod)
                await self._start(pod)
            elif phase == "Running":
                await self._move_data(pod)

    async def _has_volumes(self, pod: JsonDict) -> bool:
        names = {(one.get("persistentVolumeClaim") or {}).get("claimName") for one in pod["spec"].get("volumes") or []}
        claims = [o for o in await self._all(PERSISTENT_VOLUME_CLAIMS) if o["metadata"]["name"] in names]
        return all(claim["spec"].get("volumeName") for claim in claims)

    async def _move_data(self, pod: JsonDict) -> None:
        transfer = await self._transfer_of(pod)
        if transfer is None or self.mover.stubborn:
            return
        status = transfer.get("status") or {}
        stop = transfer["spec"].get("cancel") or transfer["metadata"].get("deletionTimestamp")
        now = asyncio.get_running_loop().time()
        if stop and status.get("phase") in {"InProgress", "Canceling"}:
            await self._end(pod, 14, CANCELED)
        elif status.get("phase") == "InProgress" and _may_move(pod, transfer):
            began = self._started_at.setdefault(pod["metadata"]["uid"], now)
            if now == began:
                progress = {"totalBytes": 1000, "doneBytes": 400, "bytesPerSecond": 100, "sentBytes": 50}
                progress |= {"hashedBytes": 300, "dedupedBytes": 200, "storedBytes": 40}
                await self.record(transfer, json.dumps(progress), pod)
            if now - began >= self.mover.seconds and _attempts_of(transfer).number <= self.mover.interrupted:
                await self._end(pod, 137, "")
            elif now - began >= self.mover.seconds:
                done = BACKUP_DONE if transfer["kind"] in {"DataUpload", "PodVolumeBackup"} else RESTORE_DONE
                message = done if self.mover.message is None else self.mover.message
                await self._finish(pod, transfer, message, reported=now - began >= self.mover.seconds + _REPORT_SECONDS)

    async def _finish(self, pod: JsonDict, transfer: JsonDict, message: str, *, reported: bool) -> None:
        """End the mover; if it leaves its result, the kubelet only reports the end once it has `reported` it."""
        if self.mover.host_pods is None or reported:
            self.moved[transfer["metadata"]["uid"]] = await self._data_of(pod)
            await self._end(pod, self.mover.exit_code, message)
        elif transfer["metadata"]["uid"] not in self.moved:
            self.moved[transfer["metadata"]["uid"]] = await self._data_of(pod)
            self.mover.leave(pod, message)
            await self.record(transfer, message, pod, reason="Data-Path-Completed")

    async def _end(self, pod: JsonDict, exit_code: int, message: str) -> None:
        terminated = {"exitCode": exit_code, "message": message, "reason": self.mover.reason}
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "containerStatuses": [{"name": _CONTAINER, "state": {"terminated": terminated}}],
        }
        await self._set_status(PODS, pod, status)

    async def record(
        self, transfer: JsonDict, message: str, pod: JsonDict | None = None, *, reason: str = "Data-Path-Progress"
    ) -> None:
        """Record an Event, such as one with the progress in `message`, as a mover does: that in `pod` has its files."""
        meta = transfer["metadata"]
        self._events += 1
        about = {"kind": transfer["kind"]} | {key: meta[key] for key in ("namespace", "name", "uid")}
        event = build_object(
            EVENTS,
            f"{meta['name']}.{self._events}",
            meta["namespace"],
            metadata={"labels": {NODE_LABEL: self.node}},
            involvedObject=about,
            reason=reason,
            message=message,
            lastTimestamp=format_time(datetime.now(UTC)),
        )
        if pod is not None:
            self.mover.write(pod, event)
        await self._create(EVENTS, event)

    async def _transfer_of(self, pod: JsonDict) -> JsonDict | None:
        uids = {reference["uid"] for reference in pod["metadata"].get("ownerReferences", [])}
        transfers = [o for resource in TRANSFER_RESOURCES.values() for o in await self._all(resource)]
        return next((transfer for transfer in transfers if transfer["metadata"]["uid"] in uids), None)

    async def _data_of(self, pod: JsonDict) -> str:
        """Return the data that a mover reads or writes: of a snapshot, a new volume, or a folder."""
        namespace = pod["metadata"]["namespace"]
        uids = {reference["uid"] for reference in pod["metadata"]["ownerReferences"]}
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] in uids)
        if "hostPath" in volume:
            return str(volume["hostPath"]["path"])
        name = volume["persistentVolumeClaim"]["claimName"]
        claim: JsonDict = await self.client.get(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        source = claim["spec"].get("dataSource")
        if not source:
            return str(claim["spec"]["volumeName"])
        snapshot = await self.client.get(VOLUME_SNAPSHOTS, namespace, source["name"])
        content_name = snapshot["status"]["boundVolumeSnapshotContentName"]
        content = await self.client.get(VOLUME_SNAPSHOT_CONTENTS, "", content_name)
        return str(content["spec"]["source"]["snapshotHandle"])

    # -- how objects are read and written ------------------------------------------------------

    @abstractmethod
    async def _all(self, resource: Resource) -> list[JsonDict]:
        """Return all objects of a kind."""

    @abstractmethod
    async def _create(self, resource: Resource, obj: JsonDict, status: JsonDict | None = None) -> None:
        """Create an object with a status."""

    @abstractmethod
    async def _start(self, pod: JsonDict) -> None:
        """Start a pod on the node."""

    @abstractmethod
    async def _set_status(self, resource: Resource, obj: JsonDict, status: JsonDict) -> None:
        """Change an object's status."""

    async def _patch(self, resource: Resource, obj: JsonDict, patch: JsonDict) -> None:
        meta = obj["metadata"]
        await self.client.patch(resource, meta.get("namespace", ""), meta["name"], patch)


def _events_directory(host_pods: Path, pod: JsonDict) -> Path:
    """Return the directory on the node with the Events of the mover in `pod`."""
    return Path(host_pods, pod["metadata"]["uid"], "volumes", "kubernetes.io~empty-dir", EVENTS_VOLUME)


def _attempts_of(transfer: JsonDict) -> Attempts:
    return Attempts.from_json((transfer["metadata"].get("annotations") or {}).get(ATTEMPTS_ANNOTATION) or "{}")


def _may_move(pod: JsonDict, transfer: JsonDict) -> bool:
    """Return whether the mover in `pod` may move data, as it decides itself."""
    attempts, own = _attempts_of(transfer), int(pod["metadata"]["labels"].get(ATTEMPT_LABEL, "1"))
    return attempts.stage is AttemptStage.RUNNING and attempts.number == own


@dataclass
class Cluster(Controllers):
    """The controllers of the fake API server."""

    kube: FakeKube = field(default_factory=FakeKube)

    async def _all(self, resource: Resource) -> list[JsonDict]:
        # The rules change no object in place.
        return self.kube.stored(resource)

    async def _create(self, resource: Resource, obj: JsonDict, status: JsonDict | None = None) -> None:
        self.kube.put(obj | ({"status": status} if status else {}))

    async def _start(self, pod: JsonDict) -> None:
        self._rejected += 1 if self.mover.rejected else 0
        rejected = 0 < self._rejected <= self.mover.rejections
        running = {"phase": "Running", "containerStatuses": [{"name": _CONTAINER, "state": {"running": {}}}]}
        status: JsonDict = {"phase": "Failed", "reason": self.mover.rejected} if rejected else running
        if self.mover.evicted:
            status = {"phase": "Failed", "reason": "Evicted", "conditions": [EVICTED]}
        await self._patch(PODS, pod, {"spec": {"nodeName": self.node}, "status": status})

    async def _set_status(self, resource: Resource, obj: JsonDict, status: JsonDict) -> None:
        await self._patch(resource, obj, {"status": status})
