"""VolumeSnapshots: bound to their contents, marked when they are ready, deleted in the right order.

The part that kubernetes-csi/external-snapshotter calls the common controller: it touches
objects only, never data.
Source: https://github.com/kubernetes-csi/external-snapshotter/tree/v8.2.0/pkg/common-controller
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tests.testbed.api import ApiError
from tests.testbed.storage.objects import CLAIMS, CONTENTS, DRIVER, SNAPSHOT_CLASSES, SNAPSHOTS, VOLUMES
from tests.testbed.storage.quantity import format_bytes

if TYPE_CHECKING:
    from tests.testbed.api import Api, Json
    from tests.testbed.storage.cache import Cache

__all__ = ["BEING_DELETED", "Snapshots"]

BEING_DELETED = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
_AS_SOURCE = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection"
_BOUND = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
_NANOSECONDS = 1_000_000_000


class Snapshots:
    """Reconciles VolumeSnapshots of our classes, and those bound to contents of our driver."""

    def __init__(self, api: Api, cache: Cache) -> None:
        """Read from `cache`, write through `api`."""
        self._api = api
        self._cache = cache

    def reconcile(self, snapshot: Json) -> None:
        """Take the next step with one VolumeSnapshot."""
        content = self._content(snapshot)
        if "deletionTimestamp" in snapshot["metadata"]:
            self._end(snapshot, content)
        elif _AS_SOURCE not in _finalizers(snapshot):
            self._set_finalizers(snapshot, [*_finalizers(snapshot), _AS_SOURCE])
        elif content is None:
            self._make_content(snapshot)
        elif content["spec"]["driver"] == DRIVER:
            self._bind(snapshot, content)

    def _content(self, snapshot: Json) -> Json | None:
        """The content of a snapshot, if it exists and is meant for it."""
        name = snapshot["spec"]["source"].get("volumeSnapshotContentName") or _dynamic_name(snapshot)
        content = self._cache.get(CONTENTS, "", name)
        if content is None:
            return None
        reference, metadata = content["spec"]["volumeSnapshotRef"], snapshot["metadata"]
        meant = (reference.get("namespace"), reference.get("name")) == (metadata["namespace"], metadata["name"])
        return content if meant and reference.get("uid") in {None, "", metadata["uid"]} else None

    def _make_content(self, snapshot: Json) -> None:
        """Make the content of a snapshot of a claim; for a static one, wait for it."""
        claim_name = snapshot["spec"]["source"].get("persistentVolumeClaimName")
        if not claim_name:
            return
        class_name = snapshot["spec"].get("volumeSnapshotClassName", "")
        snapshot_class = self._cache.get(SNAPSHOT_CLASSES, "", class_name)
        if snapshot_class is None:
            self._fail(snapshot, f'failed to get the VolumeSnapshotClass "{class_name}": not found')
            return
        claim = self._cache.get(CLAIMS, snapshot["metadata"]["namespace"], claim_name)
        volume = self._cache.get(VOLUMES, "", (claim or {}).get("spec", {}).get("volumeName", ""))
        if snapshot_class["driver"] != DRIVER:
            return
        if claim is None or volume is None:
            state = "not found" if claim is None else "not yet bound to a PV"
            self._fail(snapshot, f"Failed to create snapshot content with error: the PVC {claim_name} is {state}")
            return
        spec = {
            "deletionPolicy": snapshot_class["deletionPolicy"],
            "driver": DRIVER,
            "source": {"volumeHandle": volume["metadata"]["name"]},
            "sourceVolumeMode": volume["spec"]["volumeMode"],
            "volumeSnapshotClassName": class_name,
            "volumeSnapshotRef": _reference(snapshot),
        }
        body = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent"}
        self._create_content({**body, "metadata": {"name": _dynamic_name(snapshot)}, "spec": spec})

    def _create_content(self, body: Json) -> None:
        try:
            self._api.create(CONTENTS, body)
        except ApiError as error:
            if error.status != 409:  # made by an earlier pass; the watch has not reported it yet
                raise

    def _bind(self, snapshot: Json, content: Json) -> None:
        """Update the snapshot's status from its content's."""
        name = content["metadata"]["name"]
        if not content["spec"]["volumeSnapshotRef"].get("uid"):
            reference = {"volumeSnapshotRef": {"uid": snapshot["metadata"]["uid"]}}
            self._api.patch(CONTENTS, {"spec": reference}, name=name)
            return
        known, status = content.get("status") or {}, snapshot.get("status") or {}
        wanted: Json = {"boundVolumeSnapshotContentName": name, "readyToUse": bool(known.get("readyToUse"))}
        if not status.get("boundVolumeSnapshotContentName"):
            wanted["readyToUse"] = False
        elif _BOUND not in _finalizers(snapshot):
            self._set_finalizers(snapshot, [*_finalizers(snapshot), _BOUND])
            return
        elif wanted["readyToUse"]:
            made = datetime.fromtimestamp(known["creationTime"] // _NANOSECONDS, UTC)
            wanted["creationTime"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
            wanted["restoreSize"] = format_bytes(known["restoreSize"])
            wanted["error"] = None
        elif "error" in known:
            wanted["error"] = known["error"]
        if any(status.get(key) != value for key, value in wanted.items()):
            self._patch_status(snapshot, wanted)

    def _end(self, snapshot: Json, content: Json | None) -> None:
        """Let a deleted snapshot go: its content first, if that is to be deleted with it."""
        if _AS_SOURCE in _finalizers(snapshot) and self._is_being_restored(snapshot):
            return
        if content is not None:
            metadata = content["metadata"]
            if BEING_DELETED not in metadata.get("annotations", {}):
                body = {"metadata": {"annotations": {BEING_DELETED: "yes"}}}
                self._api.patch(CONTENTS, body, name=metadata["name"])
                return
            if content["spec"]["deletionPolicy"] == "Delete":
                if "deletionTimestamp" not in metadata:
                    self._api.delete(CONTENTS, "", metadata["name"])
                return
        ours = (_AS_SOURCE, _BOUND)
        self._set_finalizers(snapshot, [each for each in _finalizers(snapshot) if each not in ours])

    def _is_being_restored(self, snapshot: Json) -> bool:
        namespace, name = snapshot["metadata"]["namespace"], snapshot["metadata"]["name"]
        for claim in self._cache.all(CLAIMS):
            source = claim["spec"].get("dataSource") or {}
            same = (source.get("kind"), source.get("name")) == ("VolumeSnapshot", name)
            pending = claim.get("status", {}).get("phase") == "Pending" and not claim["spec"].get("volumeName")
            if same and pending and claim["metadata"]["namespace"] == namespace:
                return "deletionTimestamp" not in claim["metadata"]
        return False

    def _fail(self, snapshot: Json, message: str) -> None:
        status = snapshot.get("status") or {}
        if status.get("error", {}).get("message") != message:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._patch_status(snapshot, {"readyToUse": False, "error": {"message": message, "time": now}})

    def _patch_status(self, snapshot: Json, status: Json) -> None:
        metadata = snapshot["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status}
        self._api.patch(SNAPSHOTS, body, name=metadata["name"], namespace=metadata["namespace"], sub="status")

    def _set_finalizers(self, snapshot: Json, finalizers: list[str]) -> None:
        metadata = snapshot["metadata"]
        if finalizers != _finalizers(snapshot):
            body = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
            self._api.patch(SNAPSHOTS, body, name=metadata["name"], namespace=metadata["namespace"])


def _finalizers(item: Json) -> list[str]:
    found: list[str] = item["metadata"].get("finalizers", [])
    return found


def _dynamic_name(snapshot: Json) -> str:
    return f"snapcontent-{snapshot['metadata']['uid']}"


def _reference(snapshot: Json) -> Json:
    metadata = snapshot["metadata"]
    keys = ("namespace", "name", "uid", "resourceVersion")
    kind = {"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot"}
    return {**kind, **{key: metadata[key] for key in keys}}
