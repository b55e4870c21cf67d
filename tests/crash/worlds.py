"""Worlds on one API server: each has two namespaces, one transfer, and agents that may be stopped.

The agent is the whole one, as `serve` wires it, so the dispatcher's writes are among those it is
stopped at. Left out are the Lease's, whose number time decides, and the repository controller.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    DAEMON_SETS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    SERVICE_ACCOUNTS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Request, Retry
from core.models.names import NODE_LABEL
from core.models.transfers import PLAIN_RESTORE
from nodeagent.app import build_agent
from nodeagent.runtime.settings import RepositoryControllerMode, Settings
from nodeagent.runtime.transport import load_transport
from nodeagent.startup import AgentSpec, read_spec
from tests.crash.controllers import set_status
from tests.nodeagent.support.dispatching import agent_pod
from tests.nodeagent.support.harness import Fuse
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.nodeagent.support.transfers import NODE, TRANSFERS, workload_pod
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object

_CLOCK = SystemClock()
_DAEMON_SET = Path(__file__).parents[2] / "deploy" / "agent" / "daemonset.yaml"
CONFIG_MAP = "node-agent-config"
LEASE_SECONDS = 6
"""A stopped agent does not release its Lease: the next one waits for so long."""

_DONE_SECONDS = 900
_STOP_SECONDS = 300
_LOOK_SECONDS = 0.2


def is_write(request: Request) -> bool:
    """Whether an agent may be stopped at a request."""
    return request.method != "GET" and "/leases" not in request.path and "/authorization.k8s.io/" not in request.path


@asynccontextmanager
async def open_client(
    apiserver: ApiServer, fuse: Fuse | None = None, *, kubeconfig: Path | None = None
) -> AsyncIterator[KubeClient]:
    """A client with the permissions of the administrator, or of a kubeconfig; its requests go through `fuse`."""
    transport, _ = await load_transport(str(kubeconfig or apiserver.kubeconfig))
    if fuse is not None:
        fuse.inner = transport
    try:
        yield KubeClient(fuse or transport, Retry(_CLOCK))
    finally:
        await transport.close()


@dataclass
class World:
    """One transfer of a kind; its volume has its own namespace, and so have its agents unless `namespace` is set.

    `config` is the document of the agents' ConfigMap: by default a mover that is interrupted costs no minutes.
    """

    apiserver: ApiServer
    client: KubeClient
    kind: str
    name: str = field(default_factory=lambda: f"crash-{secrets.token_hex(4)}")
    namespace: str = ""
    config: str = json.dumps({"nodeagent.io": {"retry": {"initialBackoff": "1s"}}})
    lease_seconds: int = LEASE_SECONDS
    transfer: JsonDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.namespace = self.namespace or self.name

    @property
    def space(self) -> str:
        return f"{self.name}-app"

    async def prepare(self) -> None:
        """Make all that a transfer needs, and an agent."""
        await self.prepare_agents()
        await self.prepare_volume()

    async def prepare_volume(self) -> None:
        await self._create_namespace(self.space)

    async def prepare_agents(self) -> None:
        """Make all that agents need, and the pod of one."""
        await self._create_namespace(self.namespace)
        daemon_set: JsonDict = yaml.safe_load(_DAEMON_SET.read_text())
        await self.client.create(DAEMON_SETS, self._put(daemon_set, self.namespace))
        spec = {"provider": "velero.io/aws", "objectStorage": {"bucket": "none"}}
        location = build_object(BACKUP_STORAGE_LOCATIONS, "default", self.namespace, spec=spec)
        await self.client.create(BACKUP_STORAGE_LOCATIONS, location)
        config = build_object(CONFIG_MAPS, CONFIG_MAP, self.namespace, data={"config.json": self.config})
        await self.client.create(CONFIG_MAPS, config)
        agent = self._put(agent_pod(NODE), self.namespace)
        agent["spec"]["containers"] = [{"name": "agent", "image": "none"}]
        await self._create(PODS, agent)

    async def begin(self) -> None:
        """Make the transfer's volume, and the transfer."""
        # A VolumeSnapshotContent has no namespace, and its name is the transfer's.
        self.transfer = self._put(TRANSFERS[self.kind](self.name), self.namespace)
        spec = self.transfer["spec"]
        if "pod" in spec:
            pod = self._put(workload_pod(self.transfer), self.space)
            for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
                container["image"] = "none"
            spec["pod"] |= {"namespace": self.space, "uid": (await self._create(PODS, pod))["metadata"]["uid"]}
        elif "targetVolume" in spec:
            spec["targetVolume"]["namespace"] = self.space
            await self._create(PERSISTENT_VOLUME_CLAIMS, self._claim(spec["targetVolume"]["pvc"]))
        else:
            await self._make_snapshot(spec)
        if "sourceNamespace" in spec:
            spec["sourceNamespace"] = self.space
        if "snapshotID" in spec:
            # As a server of Velero 1.19; earlier definitions drop it.
            spec |= PLAIN_RESTORE
        self.transfer = await self.client.create(TRANSFER_RESOURCES[self.kind], self.transfer)

    async def play(self, fuse: Fuse) -> None:
        """Run agents until the transfer is done: one behind the fuse, then another one."""
        async with self.agent(fuse):
            while not (fuse.blown.is_set() and fuse.fault.stops) and not await self.is_done():
                await asyncio.sleep(_LOOK_SECONDS)
        async with self.agent():
            while not await self.is_done():
                await asyncio.sleep(_LOOK_SECONDS)

    @asynccontextmanager
    async def agent(self, fuse: Fuse | None = None) -> AsyncIterator[None]:
        """Run an agent until the end of the block, whose requests go through `fuse`, if given."""
        spec = await read_spec(self.client, self._settings, self.namespace)
        async with open_client(self.apiserver, fuse) as client, running(client, spec):
            yield

    async def is_done(self) -> bool:
        """Whether the agent has cleaned the transfer up and released it."""
        meta = self.transfer["metadata"]
        self.transfer = await self.client.get(TRANSFER_RESOURCES[self.kind], meta["namespace"], meta["name"])
        labels = self.transfer["metadata"].get("labels", {})
        return "completionTimestamp" in self.transfer.get("status", {}) and NODE_LABEL not in labels

    async def target(self) -> tuple[JsonDict, JsonDict]:
        """The claim that a DataDownload restores into, and its volume (empty: none)."""
        name = self.transfer["spec"]["targetVolume"]["pvc"]
        claim = await self.client.get(PERSISTENT_VOLUME_CLAIMS, self.space, name)
        volume = await self.client.read(PERSISTENT_VOLUMES, "", claim["spec"].get("volumeName", "none"))
        return claim, volume or {}

    @property
    def _settings(self) -> Settings:
        return Settings(
            node_name=NODE,
            namespace=self.namespace,
            config_map_name=CONFIG_MAP,
            repository_controller=RepositoryControllerMode.OFF,
            lease_duration=timedelta(seconds=self.lease_seconds),
        )

    async def _create_namespace(self, name: str) -> None:
        await self.client.create(NAMESPACES, build_object(NAMESPACES, name))
        for account in ("default", "node-agent"):
            await self.client.create(SERVICE_ACCOUNTS, build_object(SERVICE_ACCOUNTS, account, name))

    async def _make_snapshot(self, spec: JsonDict) -> None:
        claim = self._claim(spec["sourcePVC"]) | {"status": {"phase": "Bound"}}
        claim["spec"]["volumeName"] = f"pv-of-{self.name}"
        await self._create(PERSISTENT_VOLUME_CLAIMS, claim)
        name, content_name = spec["csiSnapshot"]["volumeSnapshot"], f"content-of-{self.name}"
        source = {"source": {"persistentVolumeClaimName": spec["sourcePVC"]}}
        status = {"readyToUse": True, "restoreSize": "1Gi", "boundVolumeSnapshotContentName": content_name}
        snapshot = build_object(VOLUME_SNAPSHOTS, name, self.space, spec=source, status=status)
        stored = await self._create(VOLUME_SNAPSHOTS, snapshot)
        content = {
            "deletionPolicy": "Delete",
            "driver": "hostpath.csi.k8s.io",
            "source": {"volumeHandle": "v"},
            "volumeSnapshotRef": {"namespace": self.space, "name": name, "uid": stored["metadata"]["uid"]},
        }
        ready = {"readyToUse": True, "snapshotHandle": f"handle-of-{self.name}"}
        taken = build_object(VOLUME_SNAPSHOT_CONTENTS, content_name, spec=content, status=ready)
        await self._create(VOLUME_SNAPSHOT_CONTENTS, taken)

    def _claim(self, name: str) -> JsonDict:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
        return build_object(PERSISTENT_VOLUME_CLAIMS, name, self.space, spec=spec)

    async def _create(self, resource: Resource, obj: JsonDict) -> JsonDict:
        stored = await self.client.create(resource, obj)
        if "status" in obj:
            await set_status(self.client, resource, obj, obj["status"])
        return stored

    @staticmethod
    def _put(obj: JsonDict, namespace: str) -> JsonDict:
        """An object as a user creates it in a namespace."""
        kept = {key: obj["metadata"][key] for key in ("name", "labels", "annotations") if key in obj["metadata"]}
        return obj | {"metadata": kept | {"namespace": namespace}}


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Have `work` run until the end of the block; what it raised before is raised then."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(client: KubeClient, spec: AgentSpec) -> AsyncIterator[None]:
    agent = build_agent(client, _CLOCK, spec)
    task = asyncio.create_task(agent.run(), name="agent")
    try:
        async with asyncio.timeout(_DONE_SECONDS):
            yield
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_STOP_SECONDS)
        if not task.done():
            raise AssertionError(f"an agent does not stop: {_where(asyncio.all_tasks())}")


def _where(tasks: set[asyncio.Task[object]]) -> list[str]:
    """Where canceled tasks are that still run."""
    found = []
    for task in tasks:
        if task.cancelling() and task is not asyncio.current_task():
            frames = task.get_stack(limit=2)
            found.append(f"{task.get_name()}: {[f'{f.f_code.co_filename}:{f.f_lineno}' for f in frames]}")
    return found
