"""One scenario running: its stage, and the processes that watch, simulate and serve.

Knows what is started in which order, and how to wait for what the watcher sees. Does not know
what is measured (`benchmarks.bench_scale`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.scale.doors import Doors
from benchmarks.scale.history import History
from benchmarks.scale.judge import Verdict, judge
from benchmarks.scale.manifests import CONFIG_MAP, node_name
from benchmarks.scale.stage import Stage, open_client
from core.kube.resources import LEASES
from core.models.names import DISPATCHER_LEASE, MOVER_SERVICE_ACCOUNT
from nodeagent.runtime.workqueue import work_in_parallel
from tests.support.children import Child, start_child, wait_until_ready
from tests.support.sockets import free_port

_POLL_SECONDS: Final = 0.1
_READY_SECONDS: Final = 120.0
_SECONDS_AN_AGENT: Final = 5.0
_AT_A_TIME: Final = 4


@dataclass
class Serving:
    """A real `serve` process, and the port of its status page."""

    child: Child
    node: str
    port: int


@dataclass
class Scene:
    """What runs in one stage; all of it ends with the scene."""

    stage: Stage
    folder: Path
    history: History
    lease_seconds: float = 15.0
    children: list[Child] = field(default_factory=list)

    async def watch(self) -> None:
        """Have everything seen from now on."""
        arguments = self._cluster_flags(self.stage.doors.others)
        await self._start("watcher", [*arguments, "--config-map", CONFIG_MAP, "--out", str(self.history.path)])

    async def simulate(self, *, seconds: float, reports: int = 1) -> None:
        """Have storage, kubelets and movers simulated; a mover takes so many seconds and reports so often."""
        arguments = self._cluster_flags(self.stage.doors.others)
        nodes = [word for number in range(self.stage.nodes) for word in ("--node", node_name(number))]
        kubelet = self.stage.doors.kubelet
        arguments += ["--kubelet-port", str(kubelet.port), "--certificate", str(kubelet.certificate)]
        arguments += ["--key", str(kubelet.key), "--pods", str(self.stage.doors.pods.root)]
        arguments += ["--seconds", str(seconds), "--reports", str(reports)]
        await self._start("world", [*arguments, *nodes])

    async def host_agents(self, nodes: Sequence[str], *, processes: int) -> None:
        """Have the agents of `nodes` run in so many processes."""
        arguments = self._cluster_flags(self.stage.agents)
        arguments += ["--config-map", CONFIG_MAP, "--lease-seconds", str(self.lease_seconds)]
        shares = [nodes[number::processes] for number in range(processes)]

        async def host(share: Sequence[str]) -> None:
            words = [word for node in share for word in ("--node", node)]
            await self._start("agents", [*arguments, *words], seconds=_READY_SECONDS + len(share) * _SECONDS_AN_AGENT)

        # All at once they would keep each other from being ready in time.
        await work_in_parallel(list(filter(None, shares)), host, at_a_time=_AT_A_TIME, name="agents")

    async def serve(self, node: str) -> Serving:
        """Start a real agent for `node`; it may not be ready yet."""
        port = free_port()
        arguments = ["serve", *self._cluster_flags(self.stage.agents)]
        arguments += ["--node-name", node, "--node-agent-configmap", CONFIG_MAP]
        arguments += ["--mover-service-account", MOVER_SERVICE_ACCOUNT]
        arguments += [f"--lease-duration={self.lease_seconds}s", f"--metrics-address=127.0.0.1:{port}"]
        log = self.folder / f"serve-{node}.log"
        arguments += ["--log-level", "warning"]
        child = await start_child(
            "nodeagent", arguments, name=f"the agent of {node}", log=log, environment=self.stage.doors.environment
        )
        self.children.append(child)
        return Serving(child, node, port)

    async def wait_ready(self, serving: Serving) -> None:
        """Return once the agent reports that it is ready."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await wait_until_ready(serving.port)
        except TimeoutError as e:
            raise serving.child.failed(f"was not ready within {_READY_SECONDS:.0f} s") from e

    async def read_holder(self) -> str:
        """Return the leader's identity; empty without a leader."""
        lease = await self.stage.client.read(LEASES, self.stage.namespace, DISPATCHER_LEASE)
        return (lease.get("spec") or {}).get("holderIdentity", "") if lease else ""

    async def wait_for_leader(self, *, other_than: str = "", seconds: float = _READY_SECONDS) -> str:
        """Return the leader's identity, once there is a leader that is not `other_than`."""
        async with asyncio.timeout(seconds):
            while True:
                holder = await self.read_holder()
                if holder not in {"", other_than}:
                    return holder
                await asyncio.sleep(_POLL_SECONDS)

    async def wait_until(self, condition: Callable[[History], bool], *, seconds: float) -> None:
        """Return once `condition` holds of what was seen.

        Raises:
            BenchmarkError: it did not within so many seconds, or a process that is needed ended.
        """
        until = time.monotonic() + seconds
        while True:
            self.history.read_on()
            if condition(self.history):
                return
            for child in self.children:
                child.check()
            if time.monotonic() > until:
                history = self.history
                reached = f"{history.transfers} transfers, {history.admitted} admitted, {history.done} done"
                raise BenchmarkError(
                    f"{self.stage.namespace}: timed out after {seconds:.0f} s: {reached}; see {self.folder}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def judge(self) -> Verdict:
        """Return the results of all transfers so far."""
        self.history.read_on()
        return judge(self.history.sights, self.history.limits)

    async def kill(self, child: Child) -> None:
        """End one process at once; that it ended is no failure."""
        self.children.remove(child)
        await child.kill()

    async def end(self, child: Child) -> None:
        """Let one process end by itself."""
        self.children.remove(child)
        await child.end()

    def _cluster_flags(self, kubeconfig: Path) -> list[str]:
        return ["--kubeconfig", str(kubeconfig), "--namespace", self.stage.namespace]

    async def _start(self, program: str, arguments: Sequence[str], *, seconds: float = _READY_SECONDS) -> Child:
        log = self.folder / f"{program}-{len(self.children)}.log"
        child = await start_child(f"benchmarks.scale.{program}", arguments, name=f"{program}", log=log)
        self.children.append(child)
        await child.wait_ready(seconds)
        return child


@asynccontextmanager
async def open_scene(doors: Doors, name: str, *, nodes: int, lease_seconds: float = 15.0) -> AsyncIterator[Scene]:
    """Open a scene in a namespace of its own; no process of it is left at the end."""
    client = await open_client(doors.others)
    folder = doors.folder / f"{name}-logs"
    folder.mkdir()
    scene = Scene(Stage(doors, name, client, nodes), folder, History(folder / "history.jsonl"), lease_seconds)
    try:
        yield scene
    finally:
        for child in scene.children:
            await child.kill()
        await client.transport.close()


async def warm_up(doors: Doors) -> None:
    """Have the agent's sources compiled as in the image, so that no measured process does it."""
    arguments = ["serve", "--kubeconfig", "/nowhere", "--node-name", "none"]
    log = doors.folder / "warm-up.log"
    child = await start_child("nodeagent", arguments, name="warm-up", log=log, environment=doors.environment)
    await child.process.wait()
