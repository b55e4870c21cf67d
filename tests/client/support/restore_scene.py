"""A cluster with agents, a backup of two volumes, and nothing restored, as `nodeagent restore` finds it."""

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from client.restores.manifests import RequestedRestore
from client.restores.sources import RestoreError, SavedVolume
from client.session import Session
from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import UnreachableError
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, PODS, Resource
from core.kube.transport import Request, Response, Retry
from core.models.backups import SavedClaim
from core.snapshot_contract import StoredSnapshot
from tests.client.support.user_scene import UserScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

Send = Callable[[Request], Awaitable[Response]]

_LABELS = {"tier": "web", "velero.io/x": "y"}
_MODES = ("ReadWriteMany",)
DATA = SavedClaim(namespace="app", name="data", size="2Gi", storage_class="fast", access_modes=_MODES, labels=_LABELS)
FILES = SavedClaim(namespace="db", name="files", size="1Gi", storage_class="late", volume_mode="Block")


def saved(claim: SavedClaim, snapshot_id: str = "s1") -> SavedVolume:
    """Return the volume of that PVC in a bucket."""
    return SavedVolume(snapshot_id, claim.namespace, "default", claim, 7)


def stored(claim: SavedClaim | None, snapshot_id: str = "s1", **more: Any) -> StoredSnapshot:
    """Return a snapshot of the backup `night` of the cluster `uid-1`, as a bucket has it."""
    values: dict[str, Any] = {"backup": "night", "cluster": "uid-1", "start": "2026-11-21T10:00:00Z", "bytes": 7}
    values |= {"described": bool(claim), "volume_namespace": claim.namespace if claim else "app"}
    return StoredSnapshot(id=snapshot_id, claim=claim, **values | more)


@dataclass
class RestoreScene:
    """The cluster: classes `fast` and `late`, the namespace `app`, and a completed backup `night`."""

    clock: Clock = field(default_factory=LoopClock)
    notes: list[str] = field(default_factory=list)
    make_kube: Callable[[Clock], FakeKube] = FakeKube
    attempts: int = 1

    def __post_init__(self) -> None:
        self.user = UserScene(kube=self.make_kube(self.clock))
        self.kube = self.user.kube
        for name, mode in (("fast", "Immediate"), ("late", "WaitForFirstConsumer")):
            self._put("StorageClass", name, "storage.k8s.io/v1", provisioner="p", volumeBindingMode=mode)
        self._put("Namespace", "app", "v1")
        self.put_upload(DATA, "s1")
        self.put_upload(FILES, "s2")

    def _put(self, kind: str, name: str, version: str, **more: Any) -> None:
        self.kube.put({"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more})

    @contextmanager
    def answering(self, answer: Callable[[Request, Send], Coroutine[Any, Any, Response]]) -> Iterator[None]:
        """Let this answer the requests meanwhile; it gets what sends one."""
        inner = self.kube.request
        self.kube.request = lambda request: answer(request, inner)  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.kube.request = inner  # type: ignore[method-assign]

    @contextmanager
    def cutting(self, at: int, *, applied: bool = True, dead: bool = True) -> Iterator[list[str]]:
        """Let the request number `at` that changes something fail, after it was `applied` or not; yield all of them.

        `dead`: so do later ones, as of a command that was killed.
        """
        sent: list[str] = []

        async def answer(what: Request, send: Send) -> Response:
            sent.extend([what.path] if what.method != "GET" else [])
            if what.method == "GET" or len(sent) < at or (len(sent) > at and not dead):
                return await send(what)
            if len(sent) == at and applied:
                await send(what)
            raise UnreachableError("the connection is cut", status=0)

        with suppress(RestoreError, UnreachableError), self.answering(answer):
            yield sent

    def put_upload(self, claim: SavedClaim, snapshot_id: str, phase: str = "Completed", **more: Any) -> JsonDict:
        """Store the DataUpload of a PVC, of the backup `night` unless `backup` says another."""
        backup = more.pop("backup", "night")
        annotations = {"nodeagent.io/backup": backup, "nodeagent.io/backup-volumes": more.pop("volumes", "2")}
        meta: JsonDict = {"name": f"{backup}-{claim.name}", "namespace": "velero"}
        meta["annotations"] = annotations | {"nodeagent.io/claim": claim.text}
        meta["labels"] = {"nodeagent.io/backup": backup}
        spec = {"snapshotType": "CSI", "sourceNamespace": claim.namespace, "sourcePVC": claim.name}
        spec |= {"backupStorageLocation": "default", "operationTimeout": "10m0s"}
        status = {"phase": phase, "snapshotID": snapshot_id, "progress": {"totalBytes": 7}, **more}
        raw = {"apiVersion": "velero.io/v2alpha1", "kind": "DataUpload", "metadata": meta, "spec": spec}
        return self.kube.put(raw | {"status": status})

    def put_claim(self, name: str, namespace: str = "app", **more: Any) -> None:
        """Store a PVC that exists before."""
        meta = {"name": name, "namespace": namespace}
        self.kube.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {}, **more})

    @property
    def client(self) -> KubeClient:
        return KubeClient(self.kube, Retry(self.clock, attempts=self.attempts))

    @property
    def tools(self) -> Session:
        return Session(self.client, self.clock, "velero", self.notes.append)

    def request(self, name: str = "back", **more: Any) -> RequestedRestore:
        return RequestedRestore(name, "velero", **more)

    def objects(self, resource: Resource) -> dict[str, JsonDict]:
        """The stored objects, by namespace and name."""
        found = self.kube.objects(resource)
        return {f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}": one for one in found}

    @property
    def claims(self) -> dict[str, JsonDict]:
        return self.objects(PERSISTENT_VOLUME_CLAIMS)

    @property
    def pods(self) -> list[JsonDict]:
        """The pods that wait for data; the leader's is in another namespace."""
        return [one for one in self.kube.objects(PODS) if one["metadata"]["namespace"] == "app"]

    @property
    def downloads(self) -> list[JsonDict]:
        return self.kube.objects(DATA_DOWNLOADS)

    def move(self, claim: str, phase: str, **status: Any) -> None:
        """Set the status of the DataDownload into that PVC."""
        for raw in self.downloads:
            if raw["spec"]["targetVolume"]["pvc"] == claim:
                self.kube.put(raw | {"status": {"phase": phase, **status}})
