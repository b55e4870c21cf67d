"""A cluster with agents and PVCs, as `nodeagent backup` finds it: one has a snapshot class, one a pod, one nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from client.backups.manifests import BackupRequest
from client.session import Session
from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS, VOLUME_SNAPSHOTS, Resource
from core.kube.transport import Request, Response, Retry
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict


@dataclass
class SteppingClock(HandClock):
    """Takes the next of the steps during each sleep."""

    steps: list[Callable[[], None]] = field(default_factory=list)

    def step(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps.pop(0)()


@dataclass
class BackupScene:
    """The cluster: `app/data` with a driver, `app/files` in a pod, `app/loose` with neither."""

    clock: SteppingClock = field(default_factory=SteppingClock)
    notes: list[str] = field(default_factory=list)
    make_kube: Callable[[Clock], FakeKube] = FakeKube

    def __post_init__(self) -> None:
        self.kube = self.make_kube(self.clock)
        template = {"spec": {"containers": [{"name": "a", "image": "i"}]}}
        self.put("DaemonSet", "node-agent", "apps/v1", spec={"template": template})
        self.put_location("default", default=True)
        self.put_class("fast", "csi.example.com")
        self.put("StorageClass", "plain", "storage.k8s.io/v1", namespace="", provisioner="none.example.com")
        self.put_snapshot_class("snap", "csi.example.com")
        self.put_claim("data", "fast")
        self.put_claim("files", "plain", labels={"tier": "web"})
        self.put_claim("loose", "plain")
        self.put_pod("writer", "files")

    @property
    def client(self) -> KubeClient:
        return KubeClient(self.kube, Retry(self.clock, attempts=1))

    @property
    def tools(self) -> Session:
        return Session(self.client, self.clock, "velero", self.notes.append, date=self.clock.now)

    def put(
        self, kind: str, name: str, version: str = "velero.io/v1", *, namespace: str = "velero", **more: Any
    ) -> JsonDict:
        meta = {"name": name} | ({"namespace": namespace} if namespace else {}) | more.pop("meta", {})
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": meta, **more})

    def put_location(self, name: str, **spec: Any) -> None:
        status = spec.pop("status", {"phase": "Available"})
        spec = {"provider": "aws", "objectStorage": {"bucket": "b"}, **spec}
        self.put("BackupStorageLocation", name, spec=spec, status=status)

    def put_class(self, name: str, provisioner: str) -> None:
        self.put("StorageClass", name, "storage.k8s.io/v1", namespace="", provisioner=provisioner)

    def put_snapshot_class(self, name: str, driver: str, **meta: Any) -> None:
        version = "snapshot.storage.k8s.io/v1"
        self.put("VolumeSnapshotClass", name, version, namespace="", driver=driver, deletionPolicy="Delete", meta=meta)

    def put_claim(self, name: str, storage_class: str, *, phase: str = "Bound", **meta: Any) -> JsonDict:
        spec: JsonDict = {"accessModes": ["ReadWriteOnce"], "storageClassName": storage_class}
        spec["resources"] = {"requests": {"storage": "1Gi"}}
        more = {"spec": spec, "status": {"phase": phase}, "meta": meta}
        return self.put("PersistentVolumeClaim", name, "v1", namespace="app", **more)

    def put_pod(self, name: str, claim: str) -> JsonDict:
        spec = {
            "nodeName": "node-a",
            "containers": [{"name": "c", "volumeMounts": [{"name": "vol", "mountPath": "/data"}]}],
            "volumes": [{"name": "vol", "persistentVolumeClaim": {"claimName": claim}}],
        }
        return self.put("Pod", name, "v1", namespace="app", spec=spec, status={"phase": "Running"})

    def reject_after_check(self, path: str = "") -> None:
        """Let the API server reject what is created there, but not its dry run."""
        inner = self.kube.request

        async def request(what: Request) -> Response:
            if what.method == "POST" and path in what.path and not what.query.get("dryRun"):
                self.kube.fail_next("POST", path, 403, message="quota")
            return await inner(what)

        self.kube.request = request  # type: ignore[assignment, method-assign]

    def request(self, name: str = "night", **more: Any) -> BackupRequest:
        return BackupRequest(name, "velero", **{"location": "", **more})

    def objects(self, resource: Resource) -> dict[str, JsonDict]:
        """The stored objects, by their names."""
        return {one["metadata"]["name"]: one for one in self.kube.objects(resource)}

    @property
    def made(self) -> list[str]:
        """The kinds and names of what a backup consists of."""
        kinds = (VOLUME_SNAPSHOTS, DATA_UPLOADS, POD_VOLUME_BACKUPS)
        return [f"{resource.kind}/{name}" for resource in kinds for name in self.objects(resource)]

    def move(self, claim: str, phase: str, **status: Any) -> None:
        """Set the status of the transfer of `claim`, of namespace `app`."""
        reason = status.pop("reason", "")
        for resource in (DATA_UPLOADS, POD_VOLUME_BACKUPS):
            for raw in self.kube.objects(resource):
                if f'"name":"{claim}"' in (raw["metadata"].get("annotations") or {}).get("nodeagent.io/claim", ""):
                    marks = {"nodeagent.io/pending-reason": reason} if reason else {}
                    raw["metadata"]["annotations"] |= marks
                    self.kube.put(raw | {"status": {"phase": phase, **status}})
