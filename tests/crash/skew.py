"""Node agents of two versions around transfers of all kinds, as processes of their own.

A `Site` is one namespace with one transfer of each kind, and with the agents that a test
starts in it. Both versions run in the same virtual environment.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.resources import LEASES, NODES, PODS
from core.kube.watch import watch_objects
from core.models.names import DISPATCHER_LEASE, OWNER_UID_LABEL
from tests.crash.controllers import RealCluster, set_status
from tests.crash.listing import Listing, list_everything
from tests.crash.matrix import open_cluster
from tests.crash.stoppable import FOLLOWER
from tests.crash.worlds import CONFIG_MAP, World, open_client
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.nodeagent.support.transfers import NODE, TRANSFERS
from tests.support.apiserver import ApiServer
from tests.support.children import Child, start_child, wait_until_ready
from tests.support.objects import JsonDict
from tests.support.sockets import free_port
from tests.support.tools import previous_sources

_LEADER_NODE = "node-of-leader"
"""It has no agent pod, so no transfer is assigned to it."""

_LEASE_SECONDS = 6
_READY_SECONDS = 300
_CHECK_SECONDS = 0.1


class Version(StrEnum):
    """Which source tree an agent runs from."""

    CURRENT = "current"
    PREVIOUS = "previous"

    @property
    def other(self) -> "Version":
        return Version.PREVIOUS if self is Version.CURRENT else Version.CURRENT

    @property
    def tree(self) -> Path:
        return previous_sources() if self is Version.PREVIOUS else Path(__file__).parents[2]


async def wait_for(what: str, holds: Callable[[], Awaitable[bool]], *, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await holds():
                await asyncio.sleep(_CHECK_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"not within {seconds:g} s: {what}") from error


@dataclass
class Agent:
    """The process of one agent, of a `version`, for a `node`."""

    child: Child
    version: Version
    node: str
    port: int

    async def wait_ready(self) -> None:
        async with asyncio.timeout(_READY_SECONDS):
            await wait_until_ready(self.port)

    async def wait_stopped(self, writes: int, *, seconds: float) -> list[str]:
        """Return the first so many different writes that the agent stopped after."""
        seen: set[str] = set()
        assert self.child.process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                while len(seen) < writes and (line := await self.child.process.stdout.readline()):
                    seen.add(line.decode().strip())
        except TimeoutError:
            pass
        if len(seen) < writes:
            raise AssertionError(str(self.child.failed(f"stopped after {sorted(seen)}, not after {writes} writes")))
        return sorted(seen)

    async def end(self) -> None:
        """End it as a kubelet does, and expect exit code 0."""
        await self.child.end()
        if self.child.process.returncode:
            raise AssertionError(str(self.child.failed(f"ended with {self.child.process.returncode}")))


@dataclass
class Bench:
    """What all sites of a test share.

    `seen` has every state of every transfer in order, by uid, each as custom resource.
    """

    apiserver: ApiServer
    client: KubeClient
    cluster: RealCluster
    folder: Path
    seen: dict[str, list[JsonDict]] = field(default_factory=lambda: defaultdict(list))

    async def record(self, kind: str) -> None:
        """Follow all transfers of a kind until canceled."""
        watch = watch_objects(self.client, Selection(TRANSFER_RESOURCES[kind]), clock=SystemClock())
        async with aclosing(watch) as changes:
            async for change in changes:
                if change.obj:
                    self.seen[change.obj["metadata"]["uid"]].append(change.obj)


@asynccontextmanager
async def open_bench(apiserver: ApiServer, folder: Path, *, interrupted: int = 0) -> AsyncIterator[Bench]:
    """Run the controllers of an API server with one Node, and record what becomes of all transfers.

    The first `interrupted` attempts of each are interrupted.
    """
    async with open_client(apiserver) as client, open_cluster(client, interrupted=interrupted) as cluster:
        if await client.read(NODES, "", NODE) is None:
            node = cluster_node(NODE)
            await client.create(NODES, node)
            await set_status(client, NODES, node, node["status"])
        bench = Bench(apiserver, client, cluster, folder)
        recorders = [asyncio.create_task(bench.record(kind), name=f"record {kind}") for kind in TRANSFERS]
        try:
            yield bench
        finally:
            for task in recorders:
                task.cancel()
            await asyncio.gather(*recorders, return_exceptions=True)


@dataclass
class Site:
    """One namespace with agents and a transfer of each kind.

    `before` is everything that was there, in all namespaces, before an agent did anything to a transfer.
    """

    bench: Bench
    config: str
    namespace: str = field(default_factory=lambda: f"skew-{secrets.token_hex(4)}")
    worlds: list[World] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    before: Listing = field(default_factory=dict)

    async def prepare(self) -> None:
        worlds = [self._build_world(kind) for kind in TRANSFERS]
        await worlds[0].prepare_agents()
        for world in worlds:
            await self._begin(world)
        self.before = await list_everything(self.bench.apiserver.api)

    async def add_transfer(self, kind: str) -> None:
        """Create one more transfer of a kind, which has to wait."""
        world = self._build_world(kind)
        await self._begin(world)
        self.before[world.space] = (await list_everything(self.bench.apiserver.api))[world.space]
        self.before[self.namespace][f"{TRANSFER_RESOURCES[kind].plural} {world.name}"] += 1

    async def read(self) -> None:
        for world in self.worlds:
            await world.is_done()

    async def start_leader(self, version: Version, *, stop: str = "none") -> Agent:
        """Start an agent, and return once it is the leader."""
        agent = await self._start(version, _LEADER_NODE, stop, {})
        before = await self._holder()
        await wait_for("the agent is the leader", lambda: self._has_leader_other_than(before), seconds=_READY_SECONDS)
        return agent

    async def start_node_agent(self, version: Version, *, stop: str = "none") -> Agent:
        """Start the agent of the node; it never is the leader."""
        return await self._start(version, NODE, stop, {FOLLOWER: "1"})

    async def set_agent_ready(self, *, ready: bool) -> None:
        """Set whether the pod of the node's agent is Ready."""
        pod = agent_pod(NODE, ready=ready)
        pod["metadata"] |= {"namespace": self.namespace}
        await set_status(self.bench.client, PODS, pod, pod["status"])

    @property
    def last_node_agent(self) -> Agent:
        return next(agent for agent in reversed(self.agents) if agent.node == NODE)

    async def end_agents(self) -> None:
        """End all agents that still run, as a kubelet does."""
        for agent in self.agents:
            if agent.child.process.returncode is None:
                await agent.end()

    async def kill_agents(self) -> None:
        for agent in self.agents:
            await agent.child.kill()

    async def mover_pods(self) -> list[JsonDict]:
        return await self.bench.client.list(Selection(PODS, self.namespace, label_selector=OWNER_UID_LABEL))

    def states(self, world: World) -> list[JsonDict]:
        return self.bench.seen[world.transfer["metadata"]["uid"]]

    async def are_done(self) -> bool:
        """Whether all transfers are final and cleaned up."""
        return all([await world.is_done() for world in self.worlds])

    def _build_world(self, kind: str) -> World:
        name = f"{self.namespace}-{kind.lower()}-{len(self.worlds)}"
        bench = self.bench
        return World(bench.apiserver, bench.client, kind, name=name, namespace=self.namespace, config=self.config)

    async def _begin(self, world: World) -> None:
        await world.prepare_volume()
        await world.begin()
        self.worlds.append(world)

    async def _start(self, version: Version, node: str, stop: str, environment: dict[str, str]) -> Agent:
        port = free_port()
        arguments = [
            "serve",
            f"--kubeconfig={self.bench.apiserver.kubeconfig}",
            f"--node-name={node}",
            f"--namespace={self.namespace}",
            f"--node-agent-configmap={CONFIG_MAP}",
            f"--metrics-address=127.0.0.1:{port}",
            f"--lease-duration={_LEASE_SECONDS}s",
            "--repository-controller=off",
            "--log-level=debug",
        ]
        name = f"{self.namespace}-{len(self.agents)}-{version}-{node}"
        child = await start_child(
            "tests.crash.stoppable",
            [str(version.tree), stop, *arguments],
            name=name,
            log=self.bench.folder / f"{name}.log",
            environment=environment,
        )
        agent = Agent(child, version, node, port)
        self.agents.append(agent)
        return agent

    async def _holder(self) -> str:
        lease = await self.bench.client.read(LEASES, self.namespace, DISPATCHER_LEASE)
        return (lease.get("spec") or {}).get("holderIdentity", "") if lease else ""

    async def _has_leader_other_than(self, before: str) -> bool:
        return await self._holder() not in {"", before}
