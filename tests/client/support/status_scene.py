"""A cluster as `nodeagent status` finds it at noon: two agents, a leader, transfers in several phases; all is well."""

from dataclasses import dataclass, field
from typing import Any

from client.status.read import StatusReader
from core.kube.client import KubeClient
from core.kube.resources import DAEMON_SETS
from core.kube.transport import Retry
from core.models.backups import REPORT_KEY, RetentionReport
from core.models.names import (
    CONFIG_ANNOTATION,
    DELETIONS_CONFIGMAP,
    PENDING_REASON_ANNOTATION,
    PVC_UID_LABEL,
    SCHEDULE_COMMAND,
    SCHEDULE_LABEL,
)
from nodeagent.config.parse import parse_config
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.maintenance_scene import repository_object
from tests.nodeagent.support.transfers import TRANSFERS
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

CONFIG = '{"loadConcurrency": {"globalConfig": 2, "prepareQueueLength": 5}}'
DIGEST = parse_config(CONFIG).digest
LEADER_POD = "agent-a"
_MIB = 2**20


def transfer(kind: str, name: str, phase: str = "New", *, reason: str = "", **status: Any) -> JsonDict:
    """Return a transfer in that phase, pending for that reason."""
    build = TRANSFERS[kind]
    annotations = {PENDING_REASON_ANNOTATION: reason} if reason else {}
    created = "2026-11-21T11:00:00Z"
    raw = build(name, status={"phase": phase} | status, annotations=annotations, creationTimestamp=created)
    # The server assigns them, each name its own.
    for key in ("uid", "resourceVersion"):
        del raw["metadata"][key]
    # It is of the recorded PVC.
    raw["metadata"]["labels"].pop(PVC_UID_LABEL, None)
    return raw


@dataclass
class StatusScene:
    """The server."""

    kube: FakeKube = field(default_factory=lambda: FakeKube(HandClock()))

    def __post_init__(self) -> None:
        container = {"name": "node-agent", "image": "agent:1", "command": ["python", "-m", "nodeagent"]}
        container |= {"args": ["serve", "--node-agent-configmap=node-agent-config"]}
        template = {"template": {"spec": {"containers": [container]}}}
        self.put(DAEMON_SETS.kind, "node-agent", "apps/v1", spec=template)
        self.put_config(CONFIG)
        self.put_agent("a")
        self.put_agent("b")
        self.put_lease()
        location = {"provider": "aws", "objectStorage": {"bucket": "b"}}
        validated = {"phase": "Available", "lastValidationTime": "2026-11-21T11:59:00Z"}
        self.put("BackupStorageLocation", "default", spec=location, status=validated)
        self.kube.put(repository_object("app-default-kopia", lastMaintenanceTime="2026-11-21T10:00:00Z"))
        self.answer()

    def put(self, kind: str, name: str, version: str = "velero.io/v1", **more: Any) -> JsonDict:
        """Store an object in the namespace velero."""
        meta = {"name": name, "namespace": "velero"} | more.pop("metadata", {})
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": meta, **more})

    def put_config(self, document: str) -> None:
        self.put("ConfigMap", "node-agent-config", "v1", data={"config.json": document})

    def put_agent(self, node: str, *, ready: bool = True, config: str | None = DIGEST) -> None:
        meta = {"labels": {"role": "node-agent"}, "annotations": {CONFIG_ANNOTATION: config}}
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"conditions": conditions}
        self.put("Pod", f"agent-{node}", "v1", metadata=meta, spec={"nodeName": node}, status=status)

    def put_lease(self, renewed: str = "2026-11-21T11:59:55.000000Z", holder: str = "a_1") -> None:
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}
        self.put("Lease", "node-agent-dispatcher", "coordination.k8s.io/v1", spec=spec)

    def put_report(self, **report: Any) -> None:
        """Let this be what retention has reported last."""
        text = RetentionReport(at=NOON, **report).to_json()
        self.put("ConfigMap", DELETIONS_CONFIGMAP, "v1", data={REPORT_KEY: text})

    def put_old_schedule(self, name: str) -> None:
        """Store a CronJob that deletes by older rules."""
        pod = {"containers": [{"image": "agent:0", "args": [SCHEDULE_COMMAND, "--ttl=720h"]}]}
        spec = {"schedule": "@daily", "jobTemplate": {"spec": {"template": {"spec": pod}}}}
        self.put("CronJob", name, "batch/v1", metadata={"labels": {SCHEDULE_LABEL: name}}, spec=spec)

    def put_transfers(self) -> None:
        """Store one that moves, one that waits for a slot, three in the queue, and one that has ended."""
        moving = {"node": "a", "startTimestamp": "2026-11-21T11:58:20Z", "acceptedTimestamp": "2026-11-21T11:58:00Z"}
        progress = {"totalBytes": 500 * _MIB, "bytesDone": 100 * _MIB}
        self.kube.put(transfer("DataUpload", "moving", "InProgress", progress=progress, **moving))
        waiting = {"reason": "WaitingForSlot", "message": "slots in use", "node": "b"}
        self.kube.put(transfer("PodVolumeBackup", "ready", "Prepared", **waiting))
        for name in ("second", "first", "third"):
            self.kube.put(transfer("DataUpload", name, reason="Queued", message="queued at position 1"))
        self.kube.put(transfer("DataDownload", "done", "Completed", completionTimestamp="2026-11-21T11:00:00Z"))

    def answer(self, **more: Any) -> None:
        """Let the leader's status page have these parts."""
        queue = [{"kind": "DataUpload", "name": name} for name in ("first", "second", "third")]
        places = [one | {"position": position} for position, one in enumerate(queue, start=1)]
        page = {"version": "0.1.0", "dispatcher": {"holder": "a_1", "leading": True}, "maintenance": {}}
        page |= {"queue": {"queued": 3, "queue": places, "lastError": ""}}
        page |= {"config": {"hash": DIGEST, "rejected": [], "warnings": []}}
        self.kube.pages["velero", f"{LEADER_POD}:8085", "/status"] = page | more

    def go_away(self) -> None:
        """Let the API server answer nothing, and end all watches, until `kube.fulfill`."""
        for method in ("GET", "WATCH"):
            self.kube.fail_next(method, "/", "lost", times=10**9)
        self.kube.watches.cut()

    def hush(self) -> None:
        """Let the API server refuse each request to a pod."""
        self.kube.fail_next("GET", "/proxy/", 403, message="pods/proxy is forbidden", times=99)

    @property
    def client(self) -> KubeClient:
        return KubeClient(self.kube, Retry(HandClock(), attempts=1))

    @property
    def reader(self) -> StatusReader:
        return StatusReader(self.client, "velero", now=lambda: NOON)
