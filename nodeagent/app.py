"""Wires the agent: the only place that builds objects and hands them to each other.

Knows what exists and who needs whom. Does not decide anything: configuration comes from
`nodeagent.runtime.settings` and `nodeagent.config.parse`, every rule from the module that owns it.
"""

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from core.clock import Clock, SystemClock
from core.kube.client import KubeClient
from core.kube.events import EventRecorder
from core.kube.retry import Retry
from core.models.base import JsonDict
from core.models.transfers import Transfer
from core.version import VERSION
from exposer.causes import CauseFinder
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.generic_restore import GenericRestoreExposer
from exposer.pod_volume import PodVolumeExposer
from exposer.settings import ExposeSettings, MoverOptions
from nodeagent.config.live import ConfigSources, InitialConfig, LiveConfig
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.election import LeaderElection
from nodeagent.leader.live_agents import ConfigAgreement
from nodeagent.leader.repositories.controller import RepositoryController, RepositoryTools
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.node.reconciler import Reconciler
from nodeagent.node.slots import OwnSlots, Slots
from nodeagent.node.steps import Tools
from nodeagent.runtime.memory import MemoryTrimmer, find_trim
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.own_pod import AgentReport, OwnPod
from nodeagent.runtime.rate_limit import LimitedTransport, RateLimit
from nodeagent.runtime.settings import DEFAULT_NAMESPACE, Settings
from nodeagent.runtime.transport import load_transport
from nodeagent.startup import Plan, prepare
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.data_download import DataDownloadKind
from nodeagent.transfers.kinds.data_upload import DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.status import StatusWriter
from nodeagent.web.server import WebPages, WebServer

__all__ = ["Agent", "build_agent", "serve"]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agent:
    """One node's agent, wired and not yet running."""

    plan: Plan
    metrics: Metrics
    own: LiveConfig
    reconciler: Reconciler
    own_slots: OwnSlots
    election: LeaderElection
    lead: Callable[[], Awaitable[None]]
    dispatcher: Dispatcher
    memory: MemoryTrimmer

    async def run(self) -> None:
        """Work until canceled; the Lease is given back on the way out.

        Raises:
            ExceptionGroup: of what a part could not go on after.
        """
        await self.own.look()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.own.run(), name="own configuration")
            group.create_task(self.own_slots.run(), name="labels of the node")
            group.create_task(self._reconcile(), name="reconciler")
            group.create_task(self.election.run(self._lead), name="leader election")
            group.create_task(self.memory.run(), name="memory")

    def not_ready(self) -> list[str]:
        """Return what the agent still waits for, in words."""
        return self.reconciler.not_synced()

    def report(self) -> JsonDict:
        """Return what `/status` shows."""
        return {
            "version": VERSION,
            "node": self.plan.settings.node_name,
            "namespace": self.plan.namespace,
            "config": self.own.report(),
            "dispatcher": {"holder": self.election.holder, "leading": self.election.may_write},
            "queue": self.dispatcher.report(),
            **self.reconciler.report(),
        }

    async def _reconcile(self) -> None:
        await self.own_slots.wait_known()
        await self.reconciler.run()

    async def _lead(self) -> None:
        self.metrics.leader(is_leader=True)
        try:
            await self.lead()
        finally:
            self.metrics.leader(is_leader=False)


def build_agent(client: KubeClient, clock: Clock, plan: Plan) -> Agent:
    """Return the agent of one node, wired on `client`; nothing runs yet."""
    settings, namespace = plan.settings, plan.namespace
    metrics = Metrics(settings.node_name)
    limit = RateLimit(clock, per_second=settings.client_qps, burst=settings.client_burst)
    memory = MemoryTrimmer(clock, find_trim())

    def note_answer(verb: str, status: int) -> None:
        metrics.request(verb, status)
        memory.note()

    client = KubeClient(LimitedTransport(client.transport, limit, on_answer=note_answer), Retry(clock))
    recorder = EventRecorder(client, clock, component="node-agent", host=settings.node_name)
    events = EventLog(recorder)
    pod = OwnPod(client, recorder, namespace=namespace, node=settings.node_name, hostname=socket.gethostname())
    places = ConfigSources(namespace, settings.config_map_name, settings.backup_repository_config_map)
    initial = InitialConfig(plan.config, _expose_defaults(plan))
    own = LiveConfig(client, clock, sources=places, initial=initial, report=AgentReport(pod, metrics))
    current = own.current
    causes = CauseFinder(client, clock)
    kinds = _build_kinds(client, own, causes, settings.datamover_names)
    site = Site(node=settings.node_name, namespace=namespace)
    cache = TransferCache(client, clock, site, kinds=kinds)
    status = StatusWriter(client, clock, on_stored=[cache.observe_written])
    slots = Slots(current.config.load_concurrency.global_config)
    reconciler = Reconciler(
        Tools(
            client=client,
            clock=clock,
            status=status,
            events=events,
            logs=MoverLogs(client),
            progress=ProgressFollower(client, clock, status=status, metrics=metrics),
            slots=slots,
            metrics=metrics,
        ),
        site,
        limits=Timeouts(prepare=settings.prepare_timeout, resource=settings.resource_timeout),
        kinds=kinds,
        cache=cache,
    )

    def set_slots(number: int) -> None:
        slots.set_limit(number)
        reconciler.slots_changed()

    own_slots = OwnSlots(
        client,
        clock,
        settings.node_name,
        concurrency=lambda: current.config.load_concurrency,
        on_number=set_slots,
    )
    current.subscribe(own_slots.refresh)
    election = LeaderElection(
        client,
        clock,
        namespace=namespace,
        identity=f"{settings.node_name}_{uuid.uuid4()}",
        duration=settings.lease_duration,
    )
    repositories = RepositoryController(
        RepositoryTools(
            client, clock, events, metrics, own.expose_settings, own.repositories.settings, election.check, causes
        ),
        namespace=namespace,
        mode=settings.repository_controller,
    )
    dispatcher = Dispatcher(
        DispatchTools(client, clock, status, events, metrics, election.check),
        DispatchRules(
            namespace=namespace,
            kinds=kinds,
            concurrency=lambda: current.config.load_concurrency,
            prepare_timeout=settings.prepare_timeout,
            resource_timeout=settings.resource_timeout,
            node_gone_after=settings.node_gone_after,
        ),
        on_accepted=lambda cr: _request_repository(repositories, cr),
        agreement=ConfigAgreement(clock, pod),
    )
    current.subscribe(dispatcher.request_pass)

    async def lead() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(dispatcher.run(), name="dispatcher")
            group.create_task(repositories.run(), name="repository controller")

    return Agent(plan, metrics, own, reconciler, own_slots, election, lead, dispatcher, memory)


async def serve(settings: Settings) -> int:
    """Run the agent until SIGTERM or SIGINT, and return the exit code.

    Raises:
        ConfigError: it cannot start; one line says why.
    """
    transport, context_namespace = await load_transport(settings.kubeconfig)
    clock = SystemClock()
    client = KubeClient(transport, Retry(clock))
    try:
        plan = await prepare(client, settings, settings.namespace or context_namespace or DEFAULT_NAMESPACE)
        agent = build_agent(client, clock, plan)
        web = WebServer(settings.metrics_address, WebPages(agent.metrics, agent.not_ready, agent.report))
        await web.start()
        _log.info("node agent %s serves node %s in namespace %s", VERSION, settings.node_name, plan.namespace)
        try:
            await _run_until_signal(agent)
        finally:
            await web.stop()
    finally:
        await transport.close()
    _log.info("node agent stopped")
    return 0


async def _run_until_signal(agent: Agent) -> None:
    """Run the agent; return once a signal asked for its end and it has ended."""
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


def _expose_defaults(plan: Plan) -> ExposeSettings:
    settings = plan.settings
    options = MoverOptions(
        resource_timeout=settings.resource_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    return ExposeSettings(plan.template, mover=options)


def _build_kinds(client: KubeClient, own: LiveConfig, causes: CauseFinder, names: frozenset[str]) -> list[Kind[Any]]:
    return [
        DataUploadKind(client, CSISnapshotExposer(client, causes), own.expose_settings, names),
        DataDownloadKind(client, GenericRestoreExposer(client, causes), own.expose_settings, names),
        PodVolumeBackupKind(client, PodVolumeExposer(client, causes), own.expose_settings, names),
        PodVolumeRestoreKind(client, PodVolumeExposer(client, causes), own.expose_settings, names),
    ]


def _request_repository(repositories: RepositoryController, cr: Transfer) -> None:
    repositories.request(cr.repository_namespace, cr.spec.backup_storage_location)
