"""A small cluster for the exposers: the fake API server, its controllers, and a storage.

`settle()` is what time does in a real cluster: snapshot controller, provisioner, volume
controller and kubelet each take their steps until nothing changes any more. What they write on
objects is what the recordings show.
"""

from contextlib import suppress
from typing import Any, Final

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.errors import NotFoundError
from core.kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Retry, Transport
from core.models.names import SELECTED_NODE_ANNOTATION
from exposer.causes import CauseFinder
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import Exposed, Pending
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

ALL: Final = (PODS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)
_KUBELET: Final = "test/kubelet"
_PROTECTION: Final = "kubernetes.io/pvc-protection"
_BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
_PROVISIONER: Final = "volume.kubernetes.io/storage-provisioner"
_BEING_DELETED: Final = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"


async def no_guard(*, sure: bool) -> None:
    """A guard for a custom resource that stays this agent's."""


class World:
    """The cluster; `handles` are snapshots and `disks` volumes on its storage.

    `groups` has the groups of snapshots that the driver does not delete alone; it names them if it `lists` snapshots.
    Unless it `answers`, its sidecar learns nothing about snapshots.
    """

    def __init__(self, *, reclaim: str = "Delete", binding: str = "Immediate") -> None:
        self.kube = FakeKube()
        self.client = self.client_over(self.kube)
        self.handles: set[str] = set()
        self.disks: set[str] = set()
        self.violations: list[str] = []
        self.pods_run = True
        self.reclaims = True
        self.provisions = True
        self.answers = True
        self.groups: dict[str, str] = {}
        self.lists = True
        self._requested: dict[str, JsonDict] = {}
        self._policies: dict[str, str] = {}
        for name, policy in (("hostpath", reclaim), ("fast", "Delete"), ("kept", "Retain")):
            self.put(
                STORAGE_CLASSES,
                name,
                provisioner="hostpath.csi.k8s.io",
                reclaimPolicy=policy,
                volumeBindingMode=binding,
            )
        for node in ("node-a", "node-b"):
            self.put(NODES, node)

    @staticmethod
    def client_over(transport: Transport) -> KubeClient:
        """Return a client without retries, so that every fault takes effect."""
        return KubeClient(transport, Retry(SystemClock(), attempts=1))

    @staticmethod
    def causes_over(client: KubeClient) -> CauseFinder:
        """Return a cause finder over the same transport as `client`."""
        return CauseFinder(client, SystemClock())

    def put(self, resource: Resource, name: str, **fields: Any) -> None:
        """Store an object; fields of its metadata are moved there."""
        content = _move_metadata(fields)
        content["metadata"]["name"] = name
        self.kube.put({"apiVersion": resource.api_version, "kind": resource.kind} | content)

    async def patch(self, resource: Resource, place: str, **fields: Any) -> None:
        """Change an object, named as `namespace/name` or `name`, as another client does."""
        namespace, _, name = place.rpartition("/")
        await self.client.patch(resource, namespace, name, _move_metadata(fields))

    async def delete(self, resource: Resource, place: str, *, settle: bool = False) -> None:
        namespace, _, name = place.rpartition("/")
        await self.client.delete(resource, namespace, name)
        if settle:
            await self.settle()

    def find(self, resource: Resource, name: str, namespace: str = "") -> JsonDict:
        """Return the object of that name, in any namespace unless it is given."""
        named = [one for one in self.kube.objects(resource) if one["metadata"]["name"] == name]
        return next(one for one in named if namespace in {"", one["metadata"].get("namespace")})

    def names(self) -> set[str]:
        """Return every object that exposers can create, as `Kind namespace/name`."""
        return {
            f"{resource.kind} {obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"
            for resource in ALL
            for obj in self.kube.objects(resource)
        }

    async def settle(self) -> None:
        """Run all controllers until nothing changes; the snapshot controller's cache of contents is from before.

        Source: external-snapshotter v8.6.0, pkg/common-controller, processSnapshotWithDeletionTimestamp.
        """
        try:
            await self._run_controllers()
        finally:
            contents = self.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
            self._policies = {one["metadata"]["uid"]: one["spec"].get("deletionPolicy", "") for one in contents}

    async def _run_controllers(self) -> None:
        for _ in range(50):
            before = self._versions()
            for resource, step in (
                (VOLUME_SNAPSHOTS, self._snapshot),
                (VOLUME_SNAPSHOT_CONTENTS, self._content),
                (PERSISTENT_VOLUME_CLAIMS, self._claim),
                (PERSISTENT_VOLUMES, self._volume),
                (PODS, self._pod),
            ):
                for obj in await self._list(resource):
                    await step(obj)
            if self.provisions:
                await self._provision_late()
            if self._versions() == before:
                return
        raise AssertionError("the cluster does not come to rest")

    async def until_exposed(self, step: Any) -> Exposed:
        """Call an ensure step until it is exposed, running the controllers in between."""
        for _ in range(20):
            found = await step()
            if isinstance(found, Exposed):
                return found
            await self.settle()
        raise AssertionError(f"never exposed: {found}")

    async def until_none(self, step: Any) -> None:
        """Call a step until nothing is pending, running the controllers in between."""
        for _ in range(20):
            found: Pending | None = await step()
            await self.settle()
            if found is None:
                return
        raise AssertionError(f"never done: {found}")

    async def collect(self, transport: Transport | None = None) -> None:
        """Have garbage collection delete the objects of all transfers, as if these had been deleted by force."""
        client = self.client_over(transport or self.kube)
        for _ in range(20):
            leaked = (await list_leaked_objects(client, "velero")).values()
            pending = [await delete_leaked_objects(client, one) for one in leaked]
            await self.settle()
            if not any(pending):
                return
        raise AssertionError(f"never collected: {self.names()}")

    def _versions(self) -> list[str]:
        return [obj["metadata"]["resourceVersion"] for resource in ALL for obj in self.kube.objects(resource)]

    async def _list(self, resource: Resource) -> list[JsonDict]:
        return await self.client.list(Selection(resource))

    async def _write(self, resource: Resource, obj: JsonDict, patch: JsonDict) -> None:
        meta = obj["metadata"]
        with suppress(NotFoundError):
            await self.client.patch(resource, meta.get("namespace", ""), meta["name"], patch)

    async def _snapshot(self, snapshot: JsonDict) -> None:
        meta = snapshot["metadata"]
        content_name = snapshot["spec"]["source"].get("volumeSnapshotContentName")
        content_name = content_name or (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
        content = await self.client.read(VOLUME_SNAPSHOT_CONTENTS, "", str(content_name))
        if meta.get("deletionTimestamp"):
            if content is not None and content["spec"]["volumeSnapshotRef"].get("uid") == meta["uid"]:
                patch = {"metadata": {"annotations": {_BEING_DELETED: "yes"}}}
                await self._write(VOLUME_SNAPSHOT_CONTENTS, content, patch)
                if self._policies.get(content["metadata"]["uid"], content["spec"]["deletionPolicy"]) == "Delete":
                    await self.client.delete(VOLUME_SNAPSHOT_CONTENTS, "", content["metadata"]["name"])
            left = [one for one in meta.get("finalizers") or [] if one != _BOUND]
            await self._write(VOLUME_SNAPSHOTS, snapshot, {"metadata": {"finalizers": left or None}})
            return
        if content is None or content["metadata"].get("deletionTimestamp"):
            return
        await self._write(VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"volumeSnapshotRef": {"uid": meta["uid"]}}})
        status = content.get("status") or {}
        in_group = self.lists and content["spec"]["source"].get("snapshotHandle") in self.groups
        if in_group and (status.get("volumeGroupSnapshotHandle") or not status.get("readyToUse")):
            # The group's own objects are gone: the snapshot controller does not find them.
            return
        ready = {"boundVolumeSnapshotContentName": content_name, "restoreSize": "2Gi"}
        ready["readyToUse"] = bool(status.get("readyToUse"))
        finalizers = sorted({_BOUND, *(meta.get("finalizers") or [])})
        await self._write(VOLUME_SNAPSHOTS, snapshot, {"metadata": {"finalizers": finalizers}, "status": ready})

    async def _content(self, content: JsonDict) -> None:
        meta, spec = content["metadata"], content["spec"]
        handle = spec["source"].get("snapshotHandle") or (content.get("status") or {}).get("snapshotHandle")
        status = content.get("status") or {}
        if not meta.get("deletionTimestamp"):
            ready = {"snapshotHandle": handle, "readyToUse": True}
            if self.lists and handle in self.groups and not status.get("readyToUse"):
                ready["volumeGroupSnapshotHandle"] = self.groups[handle]
            patch = {"metadata": {"finalizers": [_BOUND]}, "status": ready if self.answers else status}
            await self._write(VOLUME_SNAPSHOT_CONTENTS, content, patch)
            return
        if _BEING_DELETED not in (meta.get("annotations") or {}) and spec["volumeSnapshotRef"].get("uid"):
            return
        deleted = status.get("snapshotHandle") and not status.get("volumeGroupSnapshotHandle")
        if spec["deletionPolicy"] == "Delete" and deleted:
            if handle in self.groups or not self.answers:
                # The driver refuses, or does not answer, and the sidecar asks again and again.
                return
            used = [v for v in await self._list(PERSISTENT_VOLUMES) if v["spec"].get("handle") == handle]
            if used:
                self.violations.append(f"snapshot {handle} deleted before its volume")
            self.handles.discard(handle)
        await self._let_go(VOLUME_SNAPSHOT_CONTENTS, content)

    async def _claim(self, claim: JsonDict) -> None:
        meta, spec = claim["metadata"], claim["spec"]
        users = [pod for pod in await self._list(PODS) if _uses(pod, claim)]
        if meta.get("deletionTimestamp"):
            if not users:
                await self._let_go(PERSISTENT_VOLUME_CLAIMS, claim)
            return
        await self._write(PERSISTENT_VOLUME_CLAIMS, claim, {"metadata": {"finalizers": [_PROTECTION]}})
        storage_class = await self.client.read(STORAGE_CLASSES, "", spec["storageClassName"])
        if spec.get("selector") or storage_class is None:
            return
        binds_late = storage_class["volumeBindingMode"] == "WaitForFirstConsumer"
        if spec.get("volumeName") or (binds_late and not users) or await self._bind_available(claim):
            return
        selected = {SELECTED_NODE_ANNOTATION: "node-a"} if binds_late and not self.provisions else {}
        asked = {_PROVISIONER: "csi"} | selected | (meta.get("annotations") or {})
        if meta["uid"] not in self._requested:
            await self._write(PERSISTENT_VOLUME_CLAIMS, claim, {"metadata": {"annotations": asked}})
        self._requested[meta["uid"]] = claim
        if not self.provisions:
            return
        del self._requested[meta["uid"]]
        snapshot = spec.get("dataSource") and await self.client.get(
            VOLUME_SNAPSHOTS, meta["namespace"], spec["dataSource"]["name"]
        )
        content = snapshot and await self.client.get(
            VOLUME_SNAPSHOT_CONTENTS, "", snapshot["status"]["boundVolumeSnapshotContentName"]
        )
        self._provision(claim, storage_class, content["spec"]["source"]["snapshotHandle"] if content else "")
        volume = {"volumeName": f"pvc-{meta['uid']}"}
        await self._write(PERSISTENT_VOLUME_CLAIMS, claim, {"spec": volume, "status": {"phase": "Bound"}})

    async def _bind_available(self, claim: JsonDict) -> bool:
        """Bind an Available, unreserved volume of the claim's class as the volume controller does, whatever its source.

        Source: Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go (FindMatchingVolume,
        GetBindVolumeToClaim).
        """
        meta, class_name = claim["metadata"], claim["spec"]["storageClassName"]
        for volume in await self._list(PERSISTENT_VOLUMES):
            status, spec = volume.get("status") or {}, volume["spec"]
            if status.get("phase") != "Available" or spec.get("storageClassName") != class_name or spec.get("claimRef"):
                continue
            reference = {key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion")}
            patch: JsonDict = {"metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}}
            await self._write(PERSISTENT_VOLUMES, volume, patch | {"spec": {"claimRef": reference}})
            bound = {"spec": {"volumeName": volume["metadata"]["name"]}, "status": {"phase": "Bound"}}
            await self._write(PERSISTENT_VOLUME_CLAIMS, claim, bound)
            return True
        return False

    def put_available(self, name: str, *, policy: str = "Retain") -> None:
        """Store a volume that was released, and that an administrator has made Available again."""
        self.disks.add(name)
        self.put(
            PERSISTENT_VOLUMES,
            name,
            finalizers=["test/provisioner"],
            annotations={"pv.kubernetes.io/provisioned-by": "hostpath.csi.k8s.io"},
            spec={"persistentVolumeReclaimPolicy": policy, "storageClassName": "hostpath"},
            status={"phase": "Available"},
        )

    async def _provision_late(self) -> None:
        """Finish the requests whose PVC was deleted meanwhile: a provisioner has the volume by then."""
        left = {claim["metadata"]["uid"] for claim in await self._list(PERSISTENT_VOLUME_CLAIMS)}
        for uid in self._requested.keys() - left:
            claim = self._requested.pop(uid)
            storage_class = await self.client.get(STORAGE_CLASSES, "", claim["spec"]["storageClassName"])
            self._provision(claim, storage_class, "")

    def _provision(self, claim: JsonDict, storage_class: JsonDict, handle: str) -> None:
        meta = claim["metadata"]
        if handle and handle not in self.handles:
            self.violations.append(f"snapshot {handle} was deleted before its volume was provisioned")
        reference = {key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion")}
        self.disks.add(f"pvc-{meta['uid']}")
        self.put(
            PERSISTENT_VOLUMES,
            f"pvc-{meta['uid']}",
            finalizers=["test/provisioner"],
            annotations={"pv.kubernetes.io/provisioned-by": "hostpath.csi.k8s.io"},
            spec={
                "claimRef": reference,
                "persistentVolumeReclaimPolicy": storage_class["reclaimPolicy"],
                "handle": handle,
                "volumeMode": claim["spec"].get("volumeMode", "Filesystem"),
                "csi": {
                    "driver": "hostpath.csi.k8s.io",
                    "volumeHandle": f"pvc-{meta['uid']}",
                    "volumeAttributes": {"storage.kubernetes.io/csiProvisionerIdentity": "1-x", "kind": "fast"},
                },
            },
            status={"phase": "Bound"},
        )

    async def _volume(self, volume: JsonDict) -> None:
        meta, reference = volume["metadata"], volume["spec"].get("claimRef") or {}
        if meta.get("deletionTimestamp") and volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain":
            await self._let_go(PERSISTENT_VOLUMES, volume)
            return
        if not reference.get("uid"):
            await self._bind_reserved(volume)
            return
        claim = await self.client.read(PERSISTENT_VOLUME_CLAIMS, reference["namespace"], reference["name"])
        if claim is not None and claim["metadata"]["uid"] == reference["uid"]:
            other = claim["spec"].get("volumeName") not in {None, meta["name"]}
            if other and volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain":
                # Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go (unbindVolume).
                unbound = {"spec": {"claimRef": {"uid": None}}, "status": {"phase": "Available"}}
                await self._write(PERSISTENT_VOLUMES, volume, unbound)
                return
            bound = {"status": {"phase": "Released" if other else "Bound"}}
            if not other and not claim["metadata"].get("deletionTimestamp"):
                name = {"spec": {"volumeName": meta["name"]}}
                await self._write(PERSISTENT_VOLUME_CLAIMS, claim, bound | name)
            await self._write(PERSISTENT_VOLUMES, volume, bound)
            return
        await self._write(PERSISTENT_VOLUMES, volume, {"status": {"phase": "Released"}})
        if self.reclaims and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
            self.disks.discard((volume["spec"].get("csi") or {}).get("volumeHandle", meta["name"]))
            await self.client.delete(PERSISTENT_VOLUMES, "", meta["name"])
            await self._let_go(PERSISTENT_VOLUMES, volume)

    async def _bind_reserved(self, volume: JsonDict) -> None:
        """Bind a volume that is reserved by name, unless the PVC of that name has another one.

        Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go (syncUnboundClaim).
        """
        reference, name = volume["spec"].get("claimRef"), volume["metadata"]["name"]
        if not reference:
            return
        claim = await self.client.read(PERSISTENT_VOLUME_CLAIMS, reference["namespace"], reference["name"])
        if claim is None or claim["spec"].get("volumeName") not in {None, name}:
            await self._write(PERSISTENT_VOLUMES, volume, {"status": {"phase": "Available"}})
            return
        uid = {"claimRef": {"uid": claim["metadata"]["uid"]}}
        await self._write(PERSISTENT_VOLUMES, volume, {"spec": uid, "status": {"phase": "Bound"}})
        bound = {"spec": {"volumeName": name}, "status": {"phase": "Bound"}}
        await self._write(PERSISTENT_VOLUME_CLAIMS, claim, bound)

    async def _pod(self, pod: JsonDict) -> None:
        if pod["metadata"].get("deletionTimestamp"):
            await self._let_go(PODS, pod)
        elif self.pods_run:
            patch = {"metadata": {"finalizers": [_KUBELET]}, "spec": {"nodeName": "node-a"}}
            await self._write(PODS, pod, patch | {"status": {"phase": "Running"}})

    async def _let_go(self, resource: Resource, obj: JsonDict) -> None:
        await self._write(resource, obj, {"metadata": {"finalizers": None}})


def _move_metadata(fields: JsonDict) -> JsonDict:
    keys = ("namespace", "labels", "annotations", "uid", "finalizers", "ownerReferences", "creationTimestamp")
    return {"metadata": {key: fields.pop(key) for key in keys if key in fields}, **fields}


def _uses(pod: JsonDict, claim: JsonDict) -> bool:
    claims = [(one.get("persistentVolumeClaim") or {}).get("claimName") for one in pod["spec"].get("volumes") or []]
    same = pod["metadata"]["namespace"] == claim["metadata"]["namespace"]
    return same and claim["metadata"]["name"] in claims
