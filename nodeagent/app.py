"""The process of a node agent: builds the parts that both halves share, and runs both."""

import asyncio
import ctypes
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from core.clock import Clock, SystemClock
from core.kube.client import KubeClient
from core.kube.events import EventRecorder
from core.kube.transport import Retry
from core.landlock import landlock_abi
from core.models.base import JsonDict
from core.version import VERSION
from exposer.causes import CauseFinder
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.generic_restore import GenericRestoreExposer
from exposer.pod_volume import PodVolumeExposer
from exposer.settings import ExposeSettings
from nodeagent.config.current import LiveConfig
from nodeagent.config.expose_settings import build_defaults
from nodeagent.leader.wiring import Leader, build_leader
from nodeagent.metrics import API_REQUESTS, SKIPPED_OBJECTS, Metrics
from nodeagent.node.wiring import Node, build_node
from nodeagent.runtime.api_server import ClockSkew, LimitedTransport, Outages, RateLimit
from nodeagent.runtime.own_pod import AgentReport, OwnPod
from nodeagent.runtime.preflight import check_host_pods
from nodeagent.runtime.settings import DEFAULT_NAMESPACE, Settings
from nodeagent.runtime.transport import load_transport
from nodeagent.startup import AgentParts, AgentSpec, read_spec
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.status import EventLog
from nodeagent.web.server import WebPages, WebServer

_REST_SECONDS: Final = 10.0
"""Pause between two calls of malloc_trim; each takes a millisecond or two."""

_CONNECTIONS_END_SECONDS: Final = 20.0
"""Time after the last request until idle connections are closed. Source: aiohttp 3.13, TCPConnector:
`keepalive_timeout` is 15 s."""


class MemoryTrimmer:
    """Returns free memory during a burst of requests, and once more after it.

    Source: malloc_trim(3): since glibc 2.8 it returns whole free pages in all of the heap.
    """

    def __init__(self, clock: Clock, trim: Callable[[], object]) -> None:
        self._clock = clock
        self._trim = trim
        self._worked = asyncio.Event()

    def record_request(self) -> None:
        """Record that a request was made."""
        self._worked.set()

    async def run(self) -> None:
        """Return memory until canceled; idle while no request is made."""
        while True:
            await self._worked.wait()
            while self._worked.is_set():
                self._worked.clear()
                await self._clock.sleep(_REST_SECONDS)
                self._trim()
            await self._clock.sleep(_CONNECTIONS_END_SECONDS - _REST_SECONDS)
            self._trim()


def find_trim() -> Callable[[], object]:
    """Return a function that returns free memory; without malloc_trim it does nothing."""
    return partial(getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None), 0)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agent:
    """The agent of one node, built and not running."""

    parts: AgentParts
    node: Node
    leader: Leader
    memory: MemoryTrimmer

    async def run(self) -> None:
        """Work until canceled; then release the Lease."""
        await self.parts.live.refresh()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.parts.live.run(), name="own configuration")
            group.create_task(self.node.run(), name="node")
            group.create_task(self.leader.run(), name="leader election")
            group.create_task(self.memory.run(), name="memory")

    def report(self) -> JsonDict:
        """Return the content of `/status`."""
        return {
            "version": VERSION,
            "node": self.parts.spec.settings.node_name,
            "namespace": self.parts.spec.namespace,
            "confinement": _describe_confinement(),
            "config": self.parts.live.report(),
            **self.leader.report(),
            **self.node.report(),
        }


def _describe_confinement() -> str:
    try:
        return f"Landlock ABI {landlock_abi()}"
    except OSError as e:
        return f"a chroot jail, no Landlock ({e.strerror})"


def build_agent(client: KubeClient, clock: Clock, spec: AgentSpec) -> Agent:
    """Return the agent of one node, which sends its requests through the transport of `client`."""
    settings = spec.settings
    metrics = Metrics(settings.node_name)
    memory = MemoryTrimmer(clock, find_trim())
    outages = Outages()

    def on_answer(verb: str, status: int) -> None:
        metrics.inc(API_REQUESTS, verb, str(status))
        memory.record_request()
        outages.observe(status)

    limit = RateLimit(clock, per_second=settings.client_qps, burst=settings.client_burst)
    skew = ClockSkew(clock, metrics)
    limited = LimitedTransport(client.transport, limit, on_answer=on_answer, on_date=skew.observe)
    counting = KubeClient(limited, Retry(clock), on_skipped=partial(metrics.inc, SKIPPED_OBJECTS))
    parts = build_parts(counting, clock, spec, metrics, skew)
    node = build_node(parts)
    # The node's cache must also know what the leader's half of the same agent wrote.
    leader = build_leader(parts, on_stored=[node.cache.observe_written])
    # Orphans are scanned every few seconds anyway.
    for bring_forward in (node.reconciler.bring_forward, leader.repositories.bring_forward):
        outages.subscribe(bring_forward)
    return Agent(parts, node, leader, memory)


def build_parts(client: KubeClient, clock: Clock, spec: AgentSpec, metrics: Metrics, skew: ClockSkew) -> AgentParts:
    """Return the parts that both halves share."""
    settings, namespace = spec.settings, spec.namespace
    recorder = EventRecorder(client, clock, component="node-agent", host=settings.node_name)
    pod = OwnPod(
        client, recorder, spec.pod, namespace=namespace, node=settings.node_name, hostname=socket.gethostname()
    )
    live = LiveConfig(
        client,
        clock,
        place=(namespace, settings.config_map_name),
        repository_config_map=settings.backup_repository_config_map,
        parsed=spec.config,
        expose_defaults=build_defaults(settings, spec.template, spec.cluster),
        report=AgentReport(pod, metrics),
    )
    causes = CauseFinder(client, clock)
    return AgentParts(
        spec=spec,
        client=client,
        clock=clock,
        metrics=metrics,
        events=EventLog(recorder),
        own_pod=pod,
        live=live,
        causes=causes,
        skew=skew,
        kinds=build_kinds(client, causes, live.expose_settings, settings.datamover_names, node=settings.node_name),
    )


def build_kinds(
    client: KubeClient,
    causes: CauseFinder,
    settings: Callable[[], ExposeSettings],
    datamovers: frozenset[str],
    *,
    node: str,
) -> list[Kind[Any]]:
    """Return the adapter of each kind; `settings` is called for each request."""
    pod_volumes = PodVolumeExposer(client, causes, node=node)
    return [
        DataUploadKind(CSISnapshotExposer(client, causes), settings, datamovers),
        DataDownloadKind(GenericRestoreExposer(client, causes), settings, datamovers),
        PodVolumeBackupKind(pod_volumes, settings, datamovers),
        PodVolumeRestoreKind(pod_volumes, settings, datamovers),
    ]


async def serve(settings: Settings) -> int:
    """Run the agent until SIGTERM or SIGINT, and return the exit code; raise ConfigError if it cannot start."""
    clock = SystemClock()
    transport, context_namespace = await load_transport(settings.kubeconfig, settings.kubecontext)
    client = KubeClient(transport, Retry(clock))
    try:
        spec = await read_spec(client, settings, settings.namespace or context_namespace or DEFAULT_NAMESPACE)
        await check_host_pods(client, clock, settings.node_name, spec.template.host_pods)
        agent = build_agent(client, clock, spec)
        pages = WebPages(agent.parts.metrics, agent.node.not_ready, agent.report)
        web = WebServer(settings.metrics_address, pages, clock, status_address=settings.status_address)
        await web.start()
        _log.info("node agent %s serves node %s in namespace %s", VERSION, settings.node_name, spec.namespace)
        try:
            await _run_until_signal(agent)
        finally:
            await web.stop()
    finally:
        await transport.close()
    _log.info("node agent stopped")
    return 0


async def _run_until_signal(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(agent.run(), name="agent")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
