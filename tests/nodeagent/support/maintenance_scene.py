"""A fake API server with one Ready repository, its controller, and what Job controller and kubelet do."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DATA_UPLOADS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PODS,
)
from core.kube.transport import Retry, Transport
from core.models.base import format_time
from core.models.storage import RepositoryKey
from core.models.verification import VERIFIED_LINE, SnapshotVerification, VerificationOutcome, VerifiedSnapshot
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.config.windows import VerificationPlan
from nodeagent.leader.maintenance.controller import MaintenanceController
from nodeagent.leader.maintenance.steps import MaintenanceSources
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.clusters import build_cluster
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.job_output import seal
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running, until

MINUTE = 60.0
_NAME = "app-default-kopia"


def result(mode: str = "quick", **fields: object) -> str:
    """Return the termination message of a maintenance that succeeded."""
    return json.dumps({"mode": mode, "seconds": 3.0, "indexBlobs": 7, "contents": 70, "peakBytes": 2**27} | fields)


def repository_object(name: str = _NAME, *, frequency: str = "1h0m0s", **status: object) -> JsonDict:
    """Return a BackupRepository that is Ready since noon."""
    namespace = name.removesuffix("-default-kopia")
    spec = {
        "backupStorageLocation": "default",
        "maintenanceFrequency": frequency,
        "repositoryType": "kopia",
        "volumeNamespace": namespace,
    }
    ready: JsonDict = {"phase": "Ready", "lastMaintenanceTime": "2026-11-21T12:00:00Z"} | status
    return build_object(BACKUP_REPOSITORIES, name, "velero", spec=spec, status=ready)


def velero_job(**status: object) -> JsonDict:
    """Return a Job of a Velero server, which maintains that repository."""
    labels = {"labels": {"velero.io/repo-name": _NAME}}
    name = f"{_NAME}-maintain-job-1"
    return build_object(JOBS, name, "velero", metadata=labels, spec={"template": {}}, status=status)


def words_of(job: JsonDict) -> list[str]:
    words: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return words


@dataclass
class MaintenanceSetting:
    """What a controller is built with; `backups` are the UIDs of finished backups, `unread` is why no settings are."""

    switch: MaintenanceSwitch = MaintenanceSwitch.AUTO
    settings: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    backups: list[str] = field(default_factory=list)
    inputs: str = "inputs"
    unread: KubeError | None = None
    verification: VerificationPlan | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics("node-a"))

    def backups_of(self, _: RepositoryKey) -> list[str]:
        """Return the UIDs of the finished backups of a repository: here all have the same."""
        return self.backups


def build_controller(
    setting: MaintenanceSetting, client: KubeClient, clock: Clock, *, namespace: str = "velero"
) -> MaintenanceController:
    """Return a controller, as a new leader has it."""
    cluster, sources = build_cluster(client, clock, metrics=setting.metrics), build_sources(setting, client, clock)
    return MaintenanceController(cluster, sources, namespace=namespace, switch=setting.switch)


def build_sources(setting: MaintenanceSetting, client: KubeClient, clock: Clock) -> MaintenanceSources:
    """Return what a leader's maintenance depends on."""

    async def settings(_: RepositoryKey) -> MaintenanceSettings:
        if setting.unread is not None:
            raise setting.unread
        return setting.settings

    async def inputs(_: str) -> str:
        return setting.inputs

    return MaintenanceSources(
        expose_settings=lambda: ExposeSettings(AgentTemplate(image="mover:1")),
        causes=CauseFinder(client, clock),
        settings=settings,
        inputs=inputs,
        backups=setting.backups_of,
        verification=lambda: setting.verification,
    )


@dataclass
class MaintenanceScene(MaintenanceSetting):
    """The server, and what the controller is built with."""

    kube: FakeKube = field(default_factory=FakeKube)
    clock: Clock = field(default_factory=LoopClock)
    controller: MaintenanceController = field(init=False)

    def __post_init__(self) -> None:
        self.kube.put(repository_object())
        location = {"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "keys", "key": "cloud"}}
        self.kube.put(build_object(BACKUP_STORAGE_LOCATIONS, "default", "velero", spec=location))

    def put_backup(self, name: str, claim: str, **status: str) -> None:
        """Put a complete backup of a PVC of namespace `app`, with more of its status."""
        snapshot = {"volumeSnapshot": "s", "storageClass": "", "snapshotClass": ""}
        spec = {"sourceNamespace": "app", "sourcePVC": claim, "snapshotType": "CSI", "csiSnapshot": snapshot}
        spec |= {"backupStorageLocation": "default", "operationTimeout": "10m"}
        done = {"phase": "Completed", "snapshotID": f"id-{name}"} | status
        marks = {"annotations": {"nodeagent.io/backup": f"backup-{name}"}}
        self.kube.put(build_object(DATA_UPLOADS, name, "velero", metadata=marks, spec=spec, status=done))

    def build(self, transport: Transport | None = None) -> MaintenanceController:
        """Return a controller, as a new leader has it; its requests go through `transport`."""
        return build_controller(self, KubeClient(transport or self.kube, Retry(self.clock)), self.clock)

    @asynccontextmanager
    async def running(self, transport: Transport | None = None) -> AsyncIterator[Self]:
        self.controller = self.build(transport)
        async with running(self.controller.run()):
            yield self

    def report(self) -> JsonDict:
        return self.controller.report()

    @property
    def client(self) -> KubeClient:
        return self.kube.client

    async def remove_server(self) -> None:
        await self.client.delete(DEPLOYMENTS, "velero", "velero")

    @property
    def jobs(self) -> list[JsonDict]:
        return self.kube.objects(JOBS)

    def repository(self, name: str = _NAME) -> JsonDict:
        return next(one for one in self.kube.objects(BACKUP_REPOSITORIES) if one["metadata"]["name"] == name)

    @property
    def history(self) -> list[JsonDict]:
        return list(self.repository()["status"].get("recentMaintenance", []))

    @property
    def record(self) -> JsonDict:
        annotations = self.repository()["metadata"].get("annotations") or {}
        return dict(json.loads(annotations.get("nodeagent.io/maintenance", "{}")))

    def events(self) -> list[tuple[str, str]]:
        return [(event["reason"], event["message"]) for event in self.kube.objects(EVENTS)]

    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.events()]

    async def until_job(self, *, seconds: float, but: int = 0) -> JsonDict:
        """Return the newest Job once there are more than `but`."""
        # Each look costs as much as the agent's own work of an hour.
        await until(lambda: len(self.kube.stored(JOBS)) > but, seconds=seconds, every=max(1.0, seconds / 720))
        return self.jobs[-1]

    def start_pod(self, job: JsonDict, phase: str = "Running") -> None:
        """Create the pod of the Job as the Job controller does, and let its kubelet start it."""
        template = job["spec"]["template"]
        name = job["metadata"]["name"]
        labels = (template["metadata"].get("labels") or {}) | {"job-name": name}
        meta, status = {"labels": labels}, {"phase": phase}
        self.kube.put(build_object(PODS, f"{name}-x", "velero", metadata=meta, spec=template["spec"], status=status))

    def current(self, job: JsonDict) -> JsonDict:
        return next(one for one in self.jobs if one["metadata"]["name"] == job["metadata"]["name"])

    def labeled(self, job: JsonDict) -> bool:
        return "velero.io/repo-name" in self.current(job)["metadata"]["labels"]

    async def until_labeled(self, job: JsonDict) -> None:
        await until(lambda: self.labeled(job))

    async def start_job(self, *, seconds: float = 2 * 3600, but: int = 0) -> JsonDict:
        """Let the next Job start until it is labeled; return it."""
        job = await self.until_job(seconds=seconds, but=but)
        self.start_pod(job)
        await self.until_labeled(job)
        return job

    def end(self, job: JsonDict, exit_code: int, message: str, *, reason: str = "") -> None:
        """End the container of the Job's pod, and the Job."""
        job = self.current(job)
        pod = next(
            one
            for one in self.kube.objects(PODS)
            if one["metadata"]["labels"].get("job-name") == job["metadata"]["name"]
        )
        self.end_pod(job, pod, exit_code, message, reason=reason)

    def end_pod(self, job: JsonDict, pod: JsonDict, exit_code: int, message: str, *, reason: str = "") -> None:
        terminated: JsonDict = {"exitCode": exit_code, "message": message} | ({"reason": reason} if reason else {})
        name = pod["spec"]["containers"][0]["name"]
        state = [{"name": name, "state": {"terminated": terminated}}]
        self.kube.put(pod | {"status": {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": state}})
        now = format_time(self.clock.now())
        done = {"failed": 1} if exit_code else {"succeeded": 1, "completionTime": now}
        self.kube.put(job | {"status": done})

    async def run_once(self, message: str, *, exit_code: int = 0, seconds: float = 2 * 3600) -> JsonDict:
        """Let the next Job start, run and end so; return it."""
        job = await self.start_job(seconds=seconds, but=len(self.jobs))
        self.end(job, exit_code, message)
        await asyncio.sleep(12)
        return job


class VerificationScene(MaintenanceScene):
    """The same, where the repository is verified."""

    async def next_job(self, *, seconds: float = 2 * MINUTE) -> JsonDict:
        """Return the Job that has not ended, once there is one."""
        await self.until_job(seconds=seconds, but=sum("status" in one for one in self.jobs))
        return next(one for one in self.jobs if "status" not in one)

    async def finish(self, job: JsonDict, *lines: str, exit_code: int = 0, message: str | None = None) -> None:
        """Let the Job start, write these lines and end."""
        self.start_pod(job)
        self.kube.logs["velero", f"{job['metadata']['name']}-x"] = "\n".join(["a line of the log", *lines, ""])
        sealed = seal(SnapshotVerification(snapshots=0), *lines)
        self.end(job, exit_code, sealed if message is None else message)
        await asyncio.sleep(20)

    @property
    def stored(self) -> JsonDict:
        """What is recorded on the repository."""
        annotations = self.repository()["metadata"].get("annotations") or {}
        return dict(json.loads(annotations.get("nodeagent.io/verification", "{}")))

    def verified(self, key: str = "outcome") -> dict[str, str]:
        """Return the outcomes on the transfers, or what else is recorded there."""
        transfers = [one["metadata"] for one in self.kube.objects(DATA_UPLOADS)]
        texts = {meta["name"]: meta["annotations"].get("nodeagent.io/verification") for meta in transfers}
        return {name: json.loads(text)[key] for name, text in texts.items() if text}


def verified_line(name: str, outcome: VerificationOutcome | None, *faults: str) -> str:
    """Return what a Job writes about the snapshot of that backup."""
    found = VerifiedSnapshot(
        id=f"id-{name}", outcome=outcome, files=3, bytes=7, faults=list(faults), fault_count=len(faults)
    )
    return VERIFIED_LINE.format(found)
