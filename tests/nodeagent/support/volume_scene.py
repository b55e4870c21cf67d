"""PVCs, PersistentVolumes, pods and schedules as the API server has them, for tests of coverage."""

from collections.abc import Iterable
from typing import Any

import msgspec

from core.models.base import WireModel
from nodeagent.coverage.cluster import ClusterVolumes, Namespace, StoredVolume, VolumeClaim, WorkloadPod, decode_object
from tests.support.objects import JsonDict

CREATED = "2026-11-01T00:00:00Z"


def an_object(kind: str, name: str, namespace: str = "", version: str = "v1", **more: Any) -> JsonDict:
    """Return an object; `labels`, `annotations`, `uid` and `deleting` are about its metadata."""
    meta: JsonDict = {"name": name, "creationTimestamp": more.pop("created", CREATED)}
    meta |= {"namespace": namespace} if namespace else {}
    meta |= {key: more.pop(key) for key in ("labels", "annotations", "uid") if key in more}
    if more.pop("deleting", False):
        meta["deletionTimestamp"] = CREATED
    return {"apiVersion": version, "kind": kind, "metadata": meta, **more}


def a_claim(
    name: str, namespace: str = "app", *, phase: str = "Bound", class_: str | None = "fast", **more: Any
) -> JsonDict:
    """Return a PVC of the PersistentVolume `pv-<namespace>-<name>`."""
    spec: JsonDict = {"accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem"}
    spec |= {"volumeName": f"pv-{namespace}-{name}"} if phase == "Bound" else {}
    spec |= {"storageClassName": class_} if class_ is not None else {}
    return an_object("PersistentVolumeClaim", name, namespace, spec=spec, status={"phase": phase}, **more)


def a_volume(name: str, namespace: str = "app", size: str = "10Gi", class_: str = "fast", **source: Any) -> JsonDict:
    """Return the PersistentVolume of a PVC, of a CSI driver unless there is a `source`."""
    spec = {"capacity": {"storage": size}, "storageClassName": class_, "accessModes": ["ReadWriteOnce"]}
    spec |= source or {"csi": {"driver": "csi.example.com", "volumeHandle": "1", "volumeAttributes": {"pool": "ssd"}}}
    return an_object("PersistentVolume", f"pv-{namespace}-{name}", spec=spec)


def a_pod(
    name: str,
    namespace: str = "app",
    *,
    claims: Iterable[str] = (),
    volumes: Iterable[JsonDict] = (),
    phase: str = "Running",
    mounted: bool = True,
    **more: Any,
) -> JsonDict:
    """Return a pod that mounts PVCs, each as a volume of the name of the PVC, and other volumes."""
    of_claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
    declared = [*of_claims, *volumes]
    mounts = [{"name": one["name"], "mountPath": f"/{one['name']}"} for one in declared] if mounted else []
    spec = {"nodeName": "a", "volumes": declared, "containers": [{"name": "main", "volumeMounts": mounts}]}
    return an_object("Pod", name, namespace, spec=spec, status={"phase": phase}, **more)


def a_schedule(name: str, schedule: str = "@daily", *, paused: bool = False, **template: Any) -> JsonDict:
    spec = {"schedule": schedule, "paused": paused, "template": template}
    return an_object("Schedule", name, "velero", "velero.io/v1", spec=spec)


def decoded(model: type[WireModel], objects: Iterable[JsonDict]) -> list[Any]:
    """Return the models of objects, as they are read."""
    return [decode_object(model, msgspec.Raw(msgspec.json.encode(one))) for one in objects]


def a_cluster(*objects: JsonDict) -> ClusterVolumes:
    """Return what is read of a cluster with these objects."""
    by_kind: dict[str, list[JsonDict]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(one)
    return ClusterVolumes(
        {claim.key: claim for claim in decoded(VolumeClaim, by_kind.get("PersistentVolumeClaim", []))},
        tuple(decoded(WorkloadPod, by_kind.get("Pod", []))),
        {one.metadata.name: one for one in decoded(StoredVolume, by_kind.get("PersistentVolume", []))},
        {one.metadata.name: one for one in decoded(Namespace, by_kind.get("Namespace", []))},
    )
