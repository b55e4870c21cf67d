"""A cluster with a PVC whose volume can be restored into, as `nodeagent restore create --in-place` finds it."""

from collections.abc import Callable
from typing import Any, Self

from core.kube.resources import JOBS, PERSISTENT_VOLUMES, PODS, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from core.models.transfer_settings import PLAN_LINE, EndedPlan, InPlacePlan
from tests.client.support.job_pods import ended
from tests.client.support.restore_scene import RestoreScene
from tests.support.job_output import seal
from tests.support.objects import JsonDict

OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u-db"}
NODE = "volume.kubernetes.io/selected-node"
BOUND = {"pv.kubernetes.io/bind-completed": "yes", "pv.kubernetes.io/bound-by-controller": "yes"}
SPEC: JsonDict = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}
SPEC |= {"storageClassName": "fast", "volumeMode": "Filesystem", "volumeName": "pv-1"}


class InPlaceScene(RestoreScene):
    """The PVC app/data with a volume, an agent that can restore in place, and a snapshot class.

    With controllers, `on_job` is called when there is a Job, and Jobs end unless `ending` is False.
    """

    ending = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_job: Callable[[], object] = lambda: None
        self._put("VolumeSnapshotClass", "snap", "snapshot.storage.k8s.io/v1", driver="p", deletionPolicy="Delete")
        meta: JsonDict = {"name": "data", "namespace": "app", "uid": "uid-old", "labels": {"tier": "db"}}
        meta |= {"annotations": {NODE: "node-a", "team": "x", **BOUND}, "ownerReferences": [OWNER]}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": SPEC}
        self.kube.put(claim | {"status": {"phase": "Bound"}})
        reference = {"namespace": "app", "name": "data", "uid": "uid-old"}
        self.put_volume("pv-1", claimRef=reference, capacity={"storage": "2Gi"})
        self.put_agent("restore-in-place")

    def put_volume(self, name: str, **spec: Any) -> None:
        csi = {"driver": "p", "volumeHandle": "h-1"}
        wanted = {"csi": csi, "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Filesystem"}
        self._put("PersistentVolume", name, "v1", spec=wanted | spec, status={"phase": "Bound"})

    def put_agent(self, features: str) -> None:
        meta = {"name": "agent", "namespace": "velero", "labels": {"role": "node-agent"}}
        meta["annotations"] = {"nodeagent.io/features": features}
        self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "node-a"}})

    def put_pod(self, claim: str = "data", namespace: str = "app", phase: str = "Running") -> None:
        owners = [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}]
        meta = {"name": "db-0", "namespace": namespace, "ownerReferences": owners}
        spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}
        self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": phase}})

    @property
    def volume(self) -> JsonDict:
        found: JsonDict = next(v for v in self.kube.objects(PERSISTENT_VOLUMES) if v["metadata"]["name"] == "pv-1")
        return found

    @property
    def snapshots(self) -> list[JsonDict]:
        return self.kube.objects(VOLUME_SNAPSHOTS)

    def make_block(self) -> None:
        """Turn the volume into a block device."""
        self.kube.put(self.claims["app/data"] | {"spec": SPEC | {"volumeMode": "Block"}})
        self.kube.put(self.volume | {"spec": self.volume["spec"] | {"volumeMode": "Block"}})

    def bind(self) -> None:
        """Bind a volume that was given back, as the volume controller does."""
        claim, volume = self.claims.get("app/data"), self.volume
        reference = volume["spec"]["claimRef"]
        if claim is not None and not reference.get("uid") and claim["spec"]["volumeName"] == "pv-1":
            spec = volume["spec"] | {"claimRef": reference | {"uid": claim["metadata"]["uid"]}}
            self.kube.put(volume | {"spec": spec})

    def with_controllers(self, plan: InPlacePlan | None) -> Self:
        """Return the scene, where snapshots become ready and Jobs end with this plan; None: they fail."""
        inner = self.kube.request

        async def request(what: Request) -> Response:
            answer = await inner(what)
            if what.method in {"POST", "DELETE"}:
                self._bind_snapshots()
                self._end_jobs(plan)
            return answer

        self.kube.request = request  # type: ignore[assignment, method-assign]
        return self

    def _bind_snapshots(self) -> None:
        for snapshot in self.snapshots:
            meta, source = snapshot["metadata"], snapshot["spec"]["source"]
            if snapshot.get("status"):
                continue
            content = source.get("volumeSnapshotContentName") or f"content-{meta['name']}"
            if "persistentVolumeClaimName" in source:
                reference = {key: meta[key] for key in ("namespace", "name", "uid")}
                spec = {"driver": "p", "deletionPolicy": "Delete", "volumeSnapshotRef": reference}
                status = {"readyToUse": True, "snapshotHandle": f"handle-{meta['name']}", "restoreSize": 2 << 30}
                version = "snapshot.storage.k8s.io/v1"
                self._put("VolumeSnapshotContent", content, version, spec=spec | {"source": {}}, status=status)
            self.kube.put(snapshot | {"status": {"readyToUse": True, "boundVolumeSnapshotContentName": content}})

    def _end_jobs(self, plan: InPlacePlan | None) -> None:
        pods = {one["metadata"]["name"] for one in self.kube.objects(PODS)}
        for job in self.kube.objects(JOBS):
            name = f"{job['metadata']['name']}-x"
            if name in pods or not self.ending:
                continue
            self.on_job()
            lines = [PLAN_LINE.format(plan)] if plan is not None else []
            message = seal(EndedPlan(entries=3), *lines) if plan is not None else "no memory"
            labels = {"job-name": job["metadata"]["name"]}
            self.user.put("Pod", name, "v1", labels=labels, spec={}, status=ended(int(plan is None), message))
            self.kube.logs["velero", name] = "\n".join([*lines, ""])
