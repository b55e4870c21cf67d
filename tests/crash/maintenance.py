"""A backup repository on a real API server: leaders that maintain it, and what Job controller, kubelet and pods do.

The clock of leaders is fast: what they wait for is simulated within a second.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.errors import ConflictError, NotFoundError
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    PODS,
    SERVICE_ACCOUNTS,
)
from core.models.base import format_time
from core.models.names import REPO_NAME_LABEL
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.crash.controllers import set_status
from tests.crash.worlds import beside
from tests.nodeagent.support.maintenance_scene import MaintenanceSetting, build_controller, repository_object, result
from tests.nodeagent.support.transfers import NODE
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict, build_object

_SPEED = 10.0
_TICK_SECONDS = 0.2
_KOPIA_SECONDS = 0.5
_ERROR = "Repo maintenance error: "


class FastClock(SystemClock):
    """A clock on which ten seconds pass in one; its time of day is the machine's."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return super().monotonic() * _SPEED

    async def sleep(self, seconds: float) -> None:
        """Return after a tenth of `seconds`."""
        await super().sleep(seconds / _SPEED)


@dataclass
class MaintenanceWorld:
    """One Ready repository that is due, in a namespace of its own.

    `runs` are the Jobs whose pod began to maintain it, `overlaps` those that began while another one ran, and `taken`
    what was deleted although a server waited for it.
    """

    client: KubeClient
    namespace: str = field(default_factory=lambda: f"upkeep-{secrets.token_hex(4)}")
    setting: MaintenanceSetting = field(default_factory=lambda: MaintenanceSetting(switch=MaintenanceSwitch.ON))
    runs: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    _running: dict[str, float] = field(default_factory=dict)
    _waited_for: set[str] = field(default_factory=set)
    name: str = "app-default-kopia"

    async def prepare(self, **status: object) -> None:
        """Create the repository, which was maintained last three hours ago unless `status` says otherwise."""
        await self.client.create(NAMESPACES, build_object(NAMESPACES, self.namespace))
        await self.client.create(SERVICE_ACCOUNTS, build_object(SERVICE_ACCOUNTS, "default", self.namespace))
        spec = {"provider": "velero.io/aws", "objectStorage": {"bucket": "none"}}
        location = build_object(BACKUP_STORAGE_LOCATIONS, "default", self.namespace, spec=spec)
        await self.client.create(BACKUP_STORAGE_LOCATIONS, location)
        late = format_time(SystemClock().now() - timedelta(hours=3))
        repository = repository_object(self.name)
        repository["status"] |= {"lastMaintenanceTime": late} | status
        repository["metadata"]["namespace"] = self.namespace
        repository["spec"]["resticIdentifier"] = ""
        await self.client.create(BACKUP_REPOSITORIES, repository)

    @asynccontextmanager
    async def leading(self, client: KubeClient | None = None) -> AsyncIterator[None]:
        """Run a leader's controller; its requests go through `client`, if given."""
        controller = build_controller(self.setting, client or self.client, FastClock(), namespace=self.namespace)
        async with beside(controller.run(), "leader"):
            yield

    async def repository(self) -> JsonDict:
        return await self.client.get(BACKUP_REPOSITORIES, self.namespace, self.name)

    async def history(self) -> list[JsonDict]:
        found: list[JsonDict] = (await self.repository())["status"].get("recentMaintenance", [])
        return found

    async def record(self) -> JsonDict:
        """Return what the leader keeps in the repository's annotation."""
        annotations = (await self.repository())["metadata"].get("annotations", {})
        found: JsonDict = json.loads(annotations.get("nodeagent.io/maintenance", "{}"))
        return found

    async def jobs(self) -> list[JsonDict]:
        return await self.client.list(Selection(JOBS, self.namespace))

    async def until(self, condition: Callable[["MaintenanceWorld"], Awaitable[bool]], *, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not await condition(self):
                await asyncio.sleep(_TICK_SECONDS)

    async def is_done(self) -> bool:
        """Whether one maintenance has succeeded, and no Job is left that has not ended."""
        history = await self.history()
        if not history or history[-1]["result"] != "Succeeded" or "running" in await self.record():
            return False
        return all(_has_ended(job) for job in await self.jobs())

    # -- a server -----------------------------------------------------------------------------------

    async def install_server(self) -> None:
        labels = {"component": "velero"}
        container = {"name": "velero", "image": "velero:1", "command": ["/velero"], "args": ["server"]}
        spec = {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        }
        server = build_object(DEPLOYMENTS, "velero", self.namespace, metadata={"labels": labels}, spec=spec)
        await self.client.create(DEPLOYMENTS, server)

    async def scale_server(self) -> None:
        await self.client.patch(DEPLOYMENTS, self.namespace, "velero", {"spec": {"replicas": 0}})

    async def remove_server(self) -> None:
        await self.client.delete(DEPLOYMENTS, self.namespace, "velero")

    async def has_server(self) -> bool:
        return await self.client.read(DEPLOYMENTS, self.namespace, "velero") is not None

    # -- Job controller, kubelet, pods -------------------------------------------------------------

    @asynccontextmanager
    async def kubelet(self) -> AsyncIterator[None]:
        """Start the pod of each Job; it begins once its Job has Velero's label, and ends well."""

        async def work() -> None:
            while True:
                with suppress(NotFoundError, ConflictError):
                    await self._pass()
                await asyncio.sleep(_TICK_SECONDS)

        async with beside(work(), "kubelet"):
            yield

    async def _pass(self) -> None:
        jobs = {job["metadata"]["name"]: job for job in await self.jobs()}
        pods = {pod["metadata"]["labels"]["job-name"]: pod for pod in await self._pods()}
        server = await self.has_server()
        gone = self._waited_for - {job["metadata"]["uid"] for job in jobs.values()}
        self.taken += sorted(gone) if server else []
        unfinished = {name: job for name, job in jobs.items() if not _has_ended(job)}
        self._waited_for = {job["metadata"]["uid"] for job in unfinished.values() if _is_labeled(job)}
        for name, pod in pods.items():
            if name not in jobs:
                self._running.pop(name, None)
                await force_delete(self.client, PODS, self.namespace, pod["metadata"]["name"])
        for name, job in unfinished.items():
            if name not in pods:
                await self.start_pod(job)
            elif _is_labeled(job):
                await self._work(job, server=server)

    async def _pods(self) -> list[JsonDict]:
        return await self.client.list(Selection(PODS, self.namespace, label_selector="job-name"))

    async def start_pod(self, job: JsonDict) -> None:
        """Create the Job's pod, and run it."""
        template, name = job["spec"]["template"], job["metadata"]["name"]
        labels = (template["metadata"].get("labels") or {}) | {"job-name": name}
        spec = template["spec"] | {"nodeName": NODE}
        pod = build_object(PODS, f"{name}-x", self.namespace, metadata={"labels": labels}, spec=spec)
        await self.client.create(PODS, pod)
        await set_status(self.client, PODS, pod, {"phase": "Running"})

    async def _work(self, job: JsonDict, *, server: bool) -> None:
        name = job["metadata"]["name"]
        if name not in self._running:
            if server:
                await end_job(
                    self.client, job, f"{_ERROR}a Velero server is in namespace {self.namespace}", failed=True
                )
                return
            self.overlaps += [name] if self._running else []
            self.runs.append(name)
            self._running[name] = time.monotonic()
        elif time.monotonic() - self._running[name] >= _KOPIA_SECONDS:
            later = format_time(SystemClock().now() + timedelta(days=1))
            await end_job(self.client, job, result("full", nextQuick=later, nextFull=later), failed=False)
            del self._running[name]


def _is_labeled(job: JsonDict) -> bool:
    return REPO_NAME_LABEL in job["metadata"].get("labels", {})


def _has_ended(job: JsonDict) -> bool:
    return any(one["type"] in {"Complete", "Failed"} for one in job.get("status", {}).get("conditions") or [])


async def end_job(client: KubeClient, job: JsonDict, message: str, *, failed: bool) -> None:
    """End the Job's pod with the termination message, and then the Job, as the kubelet and the Job controller do.

    Source: Kubernetes v1.34, pkg/controller/job/job_controller.go; the API server checks these conditions.
    """
    meta, now = job["metadata"], format_time(SystemClock().now())
    selection = Selection(PODS, meta["namespace"], label_selector=f"job-name={meta['name']}")
    for pod in await client.list(selection):
        terminated = {"exitCode": int(failed), "message": message, "finishedAt": now, "startedAt": now}
        container = pod["spec"]["containers"][0]
        state: JsonDict = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
        state |= {"restartCount": 0, "state": {"terminated": terminated}}
        phase = "Failed" if failed else "Succeeded"
        await set_status(client, PODS, pod, {"phase": phase, "containerStatuses": [state]})
    first, last = ("FailureTarget", "Failed") if failed else ("SuccessCriteriaMet", "Complete")
    reason = "BackoffLimitExceeded" if failed else "CompletionsReached"
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": now}
        for kind in (first, last)
    ]
    counted: JsonDict = {"failed": 1} if failed else {"succeeded": 1, "completionTime": now}
    status: JsonDict = {"startTime": meta["creationTimestamp"], "conditions": conditions, "terminating": 0, "ready": 0}
    await set_status(client, JOBS, job, status | counted)
