"""Claims become volumes, and volumes that are released with policy Delete are deleted.

Behaves as kubernetes-csi/external-provisioner does, as far as a client can observe: the same
conditions, annotations, finalizer and reasons of Events; claims with a selector are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testbed.api import ApiError
from tests.testbed.storage.faults import find_fault
from tests.testbed.storage.objects import CLAIMS, CONTENTS, DRIVER, SHARED, SNAPSHOTS, STORAGE_CLASSES, VOLUMES
from tests.testbed.storage.quantity import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tests.testbed.api import Api, Json
    from tests.testbed.storage.cache import Cache
    from tests.testbed.storage.disk import Disk
    from tests.testbed.storage.events import Recorder
    from tests.testbed.storage.jobs import Jobs

__all__ = ["Claims", "Rejected"]

_PROVISIONER_ANNOTATION = "volume.kubernetes.io/storage-provisioner"
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_FINALIZER = "external-provisioner.volume.kubernetes.io/finalizer"
_HOSTNAME = "kubernetes.io/hostname"
_SNAPSHOT_GROUP = "snapshot.storage.k8s.io"


class Rejected(Exception):  # noqa: N818 - no error of the program: the answer to a claim
    """A claim cannot be served as it is; the message goes into an Event."""


class Claims:
    """Makes and removes PersistentVolumes."""

    def __init__(self, api: Api, cache: Cache, disk: Disk, jobs: Jobs, events: Recorder, node: str) -> None:  # noqa: PLR0913, PLR0917
        """Give volumes that may be anywhere to `node`."""
        self._api = api
        self._cache = cache
        self._disk = disk
        self._jobs = jobs
        self._events = events
        self._node = node
        self._made: set[str] = set()
        """Volumes that were handed to the API server; the caches may not show them yet."""

    def reconcile_claim(self, claim: Json) -> None:
        """Take the next step toward a volume for this claim, if it is ours to serve."""
        storage_class = self._class_to_serve(claim)
        if storage_class is None:
            return
        fault = find_fault(self._cache, "provision", claim, storage_class)
        try:
            if fault is not None:
                fault.raise_as(Rejected)
                return
            self._events.record(
                claim, "Provisioning", f"External provisioner is provisioning volume for claim {_name(claim)}"
            )
            self._provision(claim, storage_class)
        except Rejected as rejected:
            text = f'failed to provision volume with StorageClass "{storage_class["metadata"]["name"]}": {rejected}'
            self._events.record(claim, "ProvisioningFailed", text)

    def reconcile_volume(self, volume: Json) -> None:
        """Keep the finalizer of one of our volumes in step with its policy, and reclaim it."""
        metadata, spec = volume["metadata"], volume["spec"]
        if metadata.get("annotations", {}).get(_PROVISIONED_BY) != DRIVER:
            return
        finalizers = metadata.get("finalizers", [])
        deletes = spec["persistentVolumeReclaimPolicy"] == "Delete"
        if deletes and volume.get("status", {}).get("phase") == "Released":
            self._reclaim(volume)
        elif deletes and _FINALIZER not in finalizers and "deletionTimestamp" not in metadata:
            self._set_finalizers(volume, [*finalizers, _FINALIZER])
        elif not deletes and _FINALIZER in finalizers:
            self._set_finalizers(volume, [each for each in finalizers if each != _FINALIZER])

    def drop_orphans(self) -> None:
        """Remove the data of volumes whose claim was deleted while they were made."""
        wanted = {_volume_name(claim) for claim in self._cache.all(CLAIMS)} | self._made
        for name in self._jobs.keys():  # noqa: SIM118 - no mapping
            if name.startswith("pvc-") and name not in wanted and self._jobs.forget(name):
                self._disk.delete(name)

    def _class_to_serve(self, claim: Json) -> Json | None:
        """The class of a claim, if the claim is ours and may be served now."""
        metadata, spec = claim["metadata"], claim["spec"]
        if spec.get("volumeName") or spec.get("selector") or "deletionTimestamp" in metadata:
            return None
        annotations = metadata.get("annotations", {})
        if annotations.get(_PROVISIONER_ANNOTATION) != DRIVER:
            return None
        found = self._cache.get(STORAGE_CLASSES, "", spec.get("storageClassName", ""))
        waits = found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"
        return None if waits and not annotations.get(_SELECTED_NODE) else found

    def _provision(self, claim: Json, storage_class: Json) -> None:
        name = _volume_name(claim)
        if name in self._made:
            return
        size_bytes = parse_bytes(claim["spec"]["resources"]["requests"]["storage"])
        block = claim["spec"].get("volumeMode") == "Block"
        source = self._source(claim, size_bytes, block=block)
        path = self._jobs.result(name, lambda: self._disk.create(name, size_bytes, block=block, source=source))
        if path is None:
            return
        try:
            self._api.create(VOLUMES, self._volume(claim, storage_class, path))
        except ApiError as error:
            if error.status != 409:  # an earlier try, whose answer was lost
                raise
        self._made.add(name)
        self._events.record(claim, "ProvisioningSucceeded", f"Successfully provisioned volume {name}")

    def _source(self, claim: Json, size_bytes: int, *, block: bool) -> str:
        """Handle of the snapshot a claim starts from, empty if from none.

        Raises:
            Rejected: The snapshot is not to be had, or does not fit.
        """
        source = claim["spec"].get("dataSource") or claim["spec"].get("dataSourceRef")
        if not source:
            return ""
        if source.get("apiGroup") != _SNAPSHOT_GROUP or source["kind"] != "VolumeSnapshot":
            raise Rejected(f"data source {source['kind']} {source['name']} is not supported")
        snapshot = self._cache.get(SNAPSHOTS, claim["metadata"]["namespace"], source["name"])
        if snapshot is None:
            raise Rejected(
                f"error getting handle for DataSource Type VolumeSnapshot by Name {source['name']}: not found"
            )
        status = snapshot.get("status", {})
        content = self._cache.get(CONTENTS, "", status.get("boundVolumeSnapshotContentName", ""))
        if not status.get("readyToUse") or content is None:
            raise Rejected(f"snapshot {source['name']} is not Ready")
        found = self._disk.find_snapshot(content.get("status", {}).get("snapshotHandle", ""))
        if found is None:
            raise Rejected(f"the data of snapshot {source['name']} is gone")
        if found.size_bytes > size_bytes:
            raise Rejected(
                f"requested volume size {size_bytes} is less than the size {found.size_bytes} "
                f"for the source snapshot {source['name']}"
            )
        if found.block is not block:
            raise Rejected(f"requested volume mode does not match that of snapshot {source['name']}")
        return found.handle

    def _volume(self, claim: Json, storage_class: Json, path: str) -> Json:
        metadata, spec = claim["metadata"], claim["spec"]
        policy = storage_class.get("reclaimPolicy", "Delete")
        node = metadata.get("annotations", {}).get(_SELECTED_NODE) or _allowed_node(storage_class) or self._node
        term: Json = {"key": _HOSTNAME, "operator": "In", "values": [node]}
        if (storage_class.get("parameters") or {}).get(SHARED) == "true":
            # Folders and devices of the test bed are the same on all of its nodes.
            term = {"key": _HOSTNAME, "operator": "Exists"}
        reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        reference |= {key: metadata[key] for key in ("namespace", "name", "uid", "resourceVersion")}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": _volume_name(claim),
                "annotations": {_PROVISIONED_BY: DRIVER},
                "finalizers": [_FINALIZER] if policy == "Delete" else [],
            },
            "spec": {
                "accessModes": spec["accessModes"],
                "capacity": {"storage": format_bytes(parse_bytes(spec["resources"]["requests"]["storage"]))},
                "claimRef": reference,
                "local": {"path": path},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}},
                "persistentVolumeReclaimPolicy": policy,
                "storageClassName": storage_class["metadata"]["name"],
                "volumeMode": spec.get("volumeMode", "Filesystem"),
            },
        }

    def _reclaim(self, volume: Json) -> None:
        name = volume["metadata"]["name"]
        item = {"metadata": {**volume["metadata"], **_only_name(volume["spec"]["claimRef"])}}
        storage_class = self._cache.get(STORAGE_CLASSES, "", volume["spec"].get("storageClassName", ""))
        if find_fault(self._cache, "delete", item, storage_class) is not None:
            return
        self._made.discard(name)
        self._disk.delete(name)
        if "deletionTimestamp" not in volume["metadata"]:
            self._api.delete(VOLUMES, "", name)  # and when the watch reports that, the finalizer
            return
        finalizers = volume["metadata"].get("finalizers", [])
        if _FINALIZER in finalizers:
            self._set_finalizers(volume, [each for each in finalizers if each != _FINALIZER])

    def _set_finalizers(self, volume: Json, finalizers: list[str]) -> None:
        metadata = volume["metadata"]
        body = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
        self._api.patch(VOLUMES, body, name=metadata["name"])


def _allowed_node(storage_class: Json) -> str:
    """The first node that the class allows its volumes on; empty: it allows all.

    Source: https://kubernetes.io/docs/concepts/storage/storage-classes/#allowed-topologies
    """
    terms = storage_class.get("allowedTopologies") or [{"matchLabelExpressions": []}]
    hosts = (each["values"] for each in terms[0]["matchLabelExpressions"] if each["key"] == _HOSTNAME)
    return str(next(hosts, [""])[0])


def _volume_name(claim: Json) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def _only_name(reference: Json) -> Json:
    return {key: reference[key] for key in ("namespace", "name")}


def _name(claim: Json) -> str:
    return f'"{claim["metadata"]["namespace"]}/{claim["metadata"]["name"]}"'
