"""One scenario's cluster: a namespace with agents' permissions and configuration, nodes, volumes, transfers.

Knows what has to be there before transfers are created, and how many are created at a time. Does
not know who carries them out.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.scale.doors import Doors
from benchmarks.scale.manifests import (
    CONFIG_MAP,
    KINDS,
    Volume,
    app_namespace,
    build_agent_pod,
    build_claim,
    build_config,
    build_content,
    build_location,
    build_node,
    build_snapshot,
    build_transfer,
    build_workload,
    node_name,
)
from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    NAMESPACES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.kube.transport import Request, Retry
from nodeagent.runtime.transport import load_transport
from nodeagent.runtime.workqueue import work_in_parallel
from tests.crash.controllers import set_status
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.support.objects import JsonDict

_AT_A_TIME: Final = 24
_T = TypeVar("_T")


async def open_client(kubeconfig: Path) -> KubeClient:
    """Return a client; close its transport."""
    transport, _ = await load_transport(str(kubeconfig))
    return KubeClient(transport, Retry(SystemClock()))


@dataclass
class Stage:
    """A namespace in which transfers are carried out by agents on `nodes` nodes."""

    doors: Doors
    namespace: str
    client: KubeClient
    nodes: int
    agents: Path = field(default_factory=Path)
    _workloads: dict[tuple[str, int], JsonDict] = field(default_factory=dict)

    async def set_up(self, *, queue_length: int | None, slots: int, apps: int = 10) -> None:
        """Create everything that exists before a transfer."""
        api = self.doors.server.api
        for namespace in [self.namespace, *(app_namespace(self.namespace, number) for number in range(apps))]:
            api.create(NAMESPACES, {"metadata": {"name": namespace}})
            self.doors.server.create_account(namespace, "default")
        self.agents = self.doors.install_agents(self.namespace)
        config = build_config(self.namespace, queue_length=queue_length, slots=slots)
        await self.client.create(CONFIG_MAPS, config)
        await self.client.create(BACKUP_STORAGE_LOCATIONS, build_location(self.namespace))
        await self._each(range(self.nodes), self._add_node)
        await self._each(range(apps), self._add_source_claim)

    async def set_limits(self, *, queue_length: int | None, slots: int) -> None:
        """Change the agents' configuration."""
        data = build_config(self.namespace, queue_length=queue_length, slots=slots)["data"]
        await self.client.patch(CONFIG_MAPS, self.namespace, CONFIG_MAP, {"data": data})

    async def add_workloads(self) -> None:
        """Give each node a pod that runs and one that is waiting for its data."""
        await self._each([(kind, n) for kind in KINDS[2:] for n in range(self.nodes)], self._add_workload)

    async def add_volumes(self, count: int, *, first: int = 0) -> list[Volume]:
        """Make the volumes of so many transfers, all four kinds alternating, and return them."""
        volumes = [self._plan(number) for number in range(first, first + count)]
        await self._each(volumes, self._add_volume)
        return volumes

    async def create_transfers(self, volumes: Sequence[Volume]) -> None:
        """Create the transfers, as a backup does: as fast as possible."""
        await self._each(volumes, self._create_transfer)

    async def delete_transfers(self) -> None:
        """Delete all transfers."""
        for resource in TRANSFER_RESOURCES.values():
            await self.client.transport.request(Request("DELETE", resource.path(self.namespace)))

    def _plan(self, number: int) -> Volume:
        kind, count = KINDS[number % len(KINDS)], number // len(KINDS)
        workload = self._workloads.get((kind, count % self.nodes))
        app = workload["metadata"]["namespace"] if workload else app_namespace(self.namespace, count)
        # Contents of snapshots have no namespace: what another scenario left must not be in the way.
        return Volume(kind, f"{self.namespace}-{kind.lower()}-{number:05}", app, workload or {})

    async def _each(self, items: Sequence[_T], work: Callable[[_T], Awaitable[None]]) -> None:
        await work_in_parallel(items, work, at_a_time=_AT_A_TIME, name="set up")

    async def _add_node(self, number: int) -> None:
        node = node_name(number)
        with suppress(AlreadyExistsError):
            stored = await self.client.create(NODES, build_node(node))
            await set_status(self.client, NODES, stored, self.doors.kubelet.node_status)
        manifest, status = build_agent_pod(self.namespace, node)
        pod = await self.client.create(PODS, manifest)
        self.doors.pods.make(pod)
        await set_status(self.client, PODS, pod, status)

    async def _add_source_claim(self, number: int) -> None:
        claim = build_claim(app_namespace(self.namespace, number), "data", volume=f"pv-{self.namespace}-{number}")
        stored = await self.client.create(PERSISTENT_VOLUME_CLAIMS, claim)
        await set_status(self.client, PERSISTENT_VOLUME_CLAIMS, stored, {"phase": "Bound"})

    async def _add_workload(self, which: tuple[str, int]) -> None:
        kind, number = which
        app, node = app_namespace(self.namespace, number), node_name(number)
        pod, status = build_workload(app, f"{kind.lower()}-{number}", node, waits=kind == KINDS[3])
        self._workloads[which] = stored = await self.client.create(PODS, pod)
        self.doors.pods.make(stored)
        await set_status(self.client, PODS, stored, status)

    async def _add_volume(self, volume: Volume) -> None:
        if volume.kind == KINDS[0]:
            await self.add_snapshot(volume.app, volume.name)
        elif volume.kind == KINDS[1]:
            await self.client.create(PERSISTENT_VOLUME_CLAIMS, build_claim(volume.app, volume.name))

    async def add_snapshot(self, app: str, name: str) -> None:
        """Make a snapshot that is ready."""
        snapshot, status = build_snapshot(app, name)
        stored = await self.client.create(VOLUME_SNAPSHOTS, snapshot)
        await self.client.create(VOLUME_SNAPSHOT_CONTENTS, build_content(stored))
        await set_status(self.client, VOLUME_SNAPSHOTS, stored, status)

    async def _create_transfer(self, volume: Volume) -> None:
        transfer = build_transfer(volume, self.namespace)
        await self.client.create(TRANSFER_RESOURCES[volume.kind], transfer)
