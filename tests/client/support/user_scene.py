"""A cluster as a user's command finds it: agents, their leader with its status page, one repository."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from client.repositories import RepositoryReader
from core.kube.client import KubeClient
from core.kube.resources import DAEMON_SETS
from core.kube.transport import Retry
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.maintenance_scene import repository_object
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

NAME = "app-default-kopia"
LEADER_POD = "node-agent-x"

RECORD: JsonDict = {"at": "2026-11-21T10:00:00Z", "mode": "quick", "seconds": 3.0, "fingerprint": "f", "contents": 70}
RECORD |= {"nextQuick": "2026-11-21T13:00:00Z", "nextFull": "2026-11-22T10:00:00Z", "fullIntervalSeconds": 86400.0}
RECORD |= {"indexBlobs": 7, "peakQuickBytes": 2**27}


@dataclass
class UserScene:
    """The server; `serve` are the arguments of the agents. It is two hours after the last maintenance: 12:00."""

    serve: Sequence[str] = ("serve",)
    kube: FakeKube = field(default_factory=lambda: FakeKube(HandClock()))

    def __post_init__(self) -> None:
        self.put_daemonset(*self.serve)
        self.put("BackupStorageLocation", "default", spec={"provider": "aws", "objectStorage": {"bucket": "b"}})
        self.put_repository()
        self.put("Lease", "node-agent-dispatcher", "coordination.k8s.io/v1", spec={"holderIdentity": "a_1_b_42"})
        labels = {"role": "node-agent"}
        self.put("Pod", LEADER_POD, "v1", labels=labels, spec={"nodeName": "a_1_b", "containers": []})
        self.answer({NAME: {"hold": "not-due", "due": "2026-11-21T13:00:00Z", "overdue": False}})

    def put(
        self, kind: str, name: str, version: str = "velero.io/v1", *, labels: JsonDict | None = None, **more: Any
    ) -> JsonDict:
        """Store an object in the namespace velero."""
        meta: JsonDict = {"name": name, "namespace": "velero"} | ({"labels": labels} if labels else {})
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": meta, **more})

    def put_daemonset(self, *serve: str) -> None:
        container = {"name": "node-agent", "image": "mover:1", "command": ["python", "-m", "nodeagent"], "args": serve}
        self.put(DAEMON_SETS.kind, "node-agent", "apps/v1", spec={"template": {"spec": {"containers": [container]}}})

    def put_repository(self, record: JsonDict | None = None, name: str = NAME, **status: Any) -> JsonDict:
        """Store a BackupRepository that was maintained at ten, unless `status` says otherwise."""
        raw = repository_object(name, **{"lastMaintenanceTime": "2026-11-21T10:00:00Z", **status})
        marks = {"nodeagent.io/repository-id": "unique-1", "nodeagent.io/repository-created": "true"}
        marks["nodeagent.io/maintenance"] = json.dumps(RECORD if record is None else record)
        raw["metadata"] |= {"creationTimestamp": "2026-11-01T12:00:00Z", "annotations": marks}
        return self.kube.put(raw)

    def answer(self, maintenance: JsonDict, *, leading: bool = True, port: int = 8085) -> None:
        """Let the leader's status page have this maintenance part."""
        page = {"dispatcher": {"holder": "a_1_b_42", "leading": leading}, "maintenance": maintenance}
        self.kube.pages["velero", f"{LEADER_POD}:{port}", "/status"] = page

    def hush(self, status: int = 403) -> None:
        """Let the API server refuse the next request to a pod."""
        self.kube.fail_next("GET", "/proxy/", status, message="pods/proxy is forbidden")

    @property
    def client(self) -> KubeClient:
        return KubeClient(self.kube, Retry(HandClock(), attempts=1))

    @property
    def reader(self) -> RepositoryReader:
        return RepositoryReader(self.client, "velero", now=lambda: NOON)
