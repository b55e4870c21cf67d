"""VolumeSnapshotContents: the data behind a snapshot is copied, found by its handle, or removed.

The part that kubernetes-csi/external-snapshotter calls the sidecar controller.
Source: https://github.com/kubernetes-csi/external-snapshotter/tree/v8.2.0/pkg/sidecar-controller
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tests.testbed.storage.faults import find_fault
from tests.testbed.storage.objects import CONTENTS, DRIVER, SNAPSHOT_CLASSES, SNAPSHOTS, VOLUMES
from tests.testbed.storage.quantity import parse_bytes
from tests.testbed.storage.snapshots import BEING_DELETED

if TYPE_CHECKING:
    from tests.testbed.api import Api, Json
    from tests.testbed.storage.cache import Cache
    from tests.testbed.storage.disk import Disk, Snapshot
    from tests.testbed.storage.faults import Fault
    from tests.testbed.storage.jobs import Jobs

__all__ = ["Contents"]

_FINALIZER = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"
_BEING_CREATED = "snapshot.storage.kubernetes.io/volumesnapshot-being-created"


class Contents:
    """Reconciles the contents of our driver."""

    def __init__(self, api: Api, cache: Cache, disk: Disk, jobs: Jobs) -> None:
        """Read from `cache`, write through `api`, copy as `jobs`."""
        self._api = api
        self._cache = cache
        self._disk = disk
        self._jobs = jobs

    def reconcile(self, content: Json) -> None:
        """Take the next step with one content."""
        metadata = content["metadata"]
        if content["spec"]["driver"] != DRIVER:
            return
        finalizers = metadata.get("finalizers", [])
        if "deletionTimestamp" in metadata:
            if _FINALIZER in finalizers and self._may_go(content):
                self._end(content)
        elif _FINALIZER not in finalizers:
            self._patch(content, {"finalizers": [*finalizers, _FINALIZER]})
        elif not (content.get("status") or {}).get("readyToUse"):
            self._make_ready(content)
        elif _BEING_CREATED in metadata.get("annotations", {}):
            self._patch(content, {"annotations": {_BEING_CREATED: None}})

    def _make_ready(self, content: Json) -> None:
        fault = self._fault("snapshot", content)
        if fault is not None:
            if fault.message:
                self._set_error(content, fault.message)
            return
        handle = content["spec"]["source"].get("snapshotHandle")
        found = self._disk.find_snapshot(handle) if handle else self._take(content)
        if found is not None:
            status = {
                "snapshotHandle": found.handle,
                "creationTime": found.created_ns,
                "restoreSize": found.size_bytes,
                "readyToUse": True,
                "error": None,
            }
            self._patch_status(content, status)
        elif handle:
            self._set_error(content, f"Failed to check and update snapshot content: there is no snapshot {handle}")

    def _take(self, content: Json) -> Snapshot | None:
        """The snapshot of the content's volume, once the copy is complete."""
        if _BEING_CREATED not in content["metadata"].get("annotations", {}):
            self._patch(content, {"annotations": {_BEING_CREATED: "yes"}})
            return None
        name = content["spec"]["source"]["volumeHandle"]
        volume = self._cache.get(VOLUMES, "", name)
        if volume is None:
            self._set_error(content, f"Failed to create snapshot: there is no volume {name}")
            return None
        size_bytes = parse_bytes(volume["spec"]["capacity"]["storage"])
        key = content["metadata"]["name"]
        return self._jobs.result(key, lambda: self._disk.take_snapshot(name, size_bytes))

    def _may_go(self, content: Json) -> bool:
        """Whether no snapshot needs a deleted content any more."""
        reference = content["spec"]["volumeSnapshotRef"]
        if BEING_DELETED in content["metadata"].get("annotations", {}) or not reference.get("uid"):
            return True
        snapshot = self._cache.get(SNAPSHOTS, reference["namespace"], reference["name"])
        return snapshot is None or snapshot["metadata"]["uid"] != reference["uid"]

    def _end(self, content: Json) -> None:
        if self._fault("delete", content) is not None or not self._jobs.forget(content["metadata"]["name"]):
            return
        if content["spec"]["deletionPolicy"] == "Delete":
            handle = (content.get("status") or {}).get("snapshotHandle")
            if handle:
                self._disk.delete_snapshot(handle)
        kept = [each for each in content["metadata"]["finalizers"] if each != _FINALIZER]
        self._patch(content, {"finalizers": kept})

    def _fault(self, what: str, content: Json) -> Fault | None:
        reference = content["spec"]["volumeSnapshotRef"]
        snapshot = self._cache.get(SNAPSHOTS, reference["namespace"], reference["name"])
        class_name = content["spec"].get("volumeSnapshotClassName", "")
        names = {key: reference[key] for key in ("namespace", "name")}
        stand_in = snapshot or {"metadata": {**content["metadata"], **names}}
        return find_fault(self._cache, what, stand_in, self._cache.get(SNAPSHOT_CLASSES, "", class_name))

    def _set_error(self, content: Json, message: str) -> None:
        status = content.get("status") or {}
        if status.get("error", {}).get("message") != message:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._patch_status(content, {"readyToUse": False, "error": {"message": message, "time": now}})

    def _patch(self, content: Json, metadata: Json) -> None:
        version = {"resourceVersion": content["metadata"]["resourceVersion"]}
        self._api.patch(CONTENTS, {"metadata": {**metadata, **version}}, name=content["metadata"]["name"])

    def _patch_status(self, content: Json, status: Json) -> None:
        body = {"metadata": {"resourceVersion": content["metadata"]["resourceVersion"]}, "status": status}
        self._api.patch(CONTENTS, body, name=content["metadata"]["name"], sub="status")
