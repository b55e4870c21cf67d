"""The leader's half of an agent: builds its parts, and runs them while the agent holds the Lease."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.velero_server import VeleroServerCheck
from core.models.base import JsonDict
from core.models.storage import BlockHash
from core.models.transfers import Transfer
from nodeagent.config.repositories import MaintenanceConfig
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.election import LeaderElection
from nodeagent.leader.maintenance.controller import MaintenanceController
from nodeagent.leader.maintenance.steps import MaintenanceSources
from nodeagent.leader.repositories.controller import RepositoryController
from nodeagent.leader.repositories.init_pod import InitPods
from nodeagent.leader.repositories.inputs import LocationInputs
from nodeagent.leader.repositories.locations import LocationController, LocationProbes, ValidationProcess
from nodeagent.metrics import LEADER, LOCATION_AVAILABLE, MAINTENANCE_GAUGES, REPOSITORY_READY, Metrics
from nodeagent.runtime.own_pod import OwnPod
from nodeagent.runtime.preflight import DefinitionReport, judge_definitions, read_definitions
from nodeagent.startup import AgentParts
from nodeagent.transfers.status import StatusWriter

_log = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 300.0
"""Between two checks of the definitions."""

_INPUTS_SECONDS: Final = 60.0
"""Between two reads of what decides whether a repository can be maintained."""


class DefinitionCheck:
    """What the definitions drop, as last read; a change is logged, and reported if it needs action."""

    def __init__(self, client: KubeClient, clock: Clock, pod: OwnPod) -> None:
        self._client = client
        self._clock = clock
        self._pod = pod
        self.report, self._read = DefinitionReport(), False

    async def run(self) -> None:
        """Check again and again, until canceled."""
        while True:
            await self.refresh()
            await self._clock.sleep(_CHECK_SECONDS)

    async def refresh(self) -> DefinitionReport:
        """Return what they drop now, or did when they could last be read."""
        try:
            report = judge_definitions(await read_definitions(self._client))
        except AgentError as e:
            # At start, a warning names a missing permission.
            level = logging.DEBUG if isinstance(e, ForbiddenError) else logging.WARNING
            _log.log(level, "could not check the custom resource definitions, will retry: %s", e)
            return self.report
        before, self.report, self._read = self.report, report, True
        if report.message != before.message and report.warning:
            await self._pod.report("FieldsDropped", report.message, warning=True)
        elif report.message != before.message:
            _log.info("%s", report.message or "the custom resource definitions have all fields of this version")
        return report

    async def new_block_hash(self) -> BlockHash | None:
        """Return the hash of repositories of Velero 1.19 if the definitions are its own; None: kopia's default.

        Source: github.com/velero-io/velero/pull/10576.
        """
        report = self.report if self._read else await self.refresh()
        return BlockHash.HMAC_SHA256_128 if report.next_velero else None


@dataclass(frozen=True)
class Leader:
    """The leader's half of an agent."""

    metrics: Metrics
    election: LeaderElection
    dispatcher: Dispatcher
    repositories: RepositoryController
    locations: LocationController
    maintenance: MaintenanceController
    definitions: DefinitionCheck

    async def run(self) -> None:
        """Compete for the Lease, and lead while holding it, until canceled; then release it."""
        await self.election.run(self._lead)

    def report(self) -> JsonDict:
        """Return the leader's part of `/status`."""
        return {
            "dispatcher": {"holder": self.election.holder or "", "leading": self.election.may_write},
            "queue": self.dispatcher.report(),
            "maintenance": self.maintenance.report(),
            "definitions": self.definitions.report.to_wire(),
        }

    async def _lead(self) -> None:
        self.metrics.set(LEADER, 1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.dispatcher.run(), name="dispatcher")
                group.create_task(self.repositories.run(), name="repository controller")
                group.create_task(self.locations.run(), name="location controller")
                group.create_task(self.maintenance.run(), name="maintenance controller")
                group.create_task(self.definitions.run(), name="definitions")
        finally:
            self.metrics.set(LEADER, 0)
            # Another agent shows them.
            self.metrics.forget(REPOSITORY_READY, LOCATION_AVAILABLE, *MAINTENANCE_GAUGES)


def build_leader(parts: AgentParts, *, on_stored: Sequence[Callable[[Transfer], None]] = ()) -> Leader:
    """Return the leader's half, not running; `on_stored` are called with each custom resource that it has written."""
    settings, live = parts.spec.settings, parts.live
    election = LeaderElection(
        parts.client,
        parts.clock,
        namespace=parts.spec.namespace,
        identity=f"{settings.node_name}_{uuid.uuid4()}",
        duration=settings.lease_duration,
    )
    cluster = Cluster(
        client=parts.client,
        clock=parts.clock,
        status=StatusWriter(parts.client, parts.skew.now, on_stored=on_stored),
        events=parts.events,
        metrics=parts.metrics,
        check_leading=election.check,
        now=parts.skew.now,
    )
    server = VeleroServerCheck(parts.client, parts.clock, parts.spec.namespace)
    definitions = DefinitionCheck(parts.client, parts.clock, parts.own_pod)

    async def block_hash() -> BlockHash | None:
        return live.current.config.own.block_hash or await definitions.new_block_hash()

    repositories = RepositoryController(
        cluster,
        InitPods(cluster, live.expose_settings, parts.causes),
        server=server,
        mode=settings.repository_controller,
        new_settings=live.repositories.settings,
        block_hash=block_hash,
        frequency=settings.maintenance_frequency,
    )
    probes = LocationProbes(parts.clock)
    locations = LocationController(
        cluster,
        InitPods(cluster, live.expose_settings, parts.causes),
        server=server,
        mode=settings.repository_controller,
        validate=ValidationProcess(parts.clock, os.environ).validate,
        probes=probes,
    )
    dispatcher = Dispatcher(
        cluster,
        DispatchRules(
            namespace=parts.spec.namespace,
            kinds=parts.kinds,
            config=lambda: live.current.config,
            prepare_timeout=settings.prepare_timeout,
            resource_timeout=settings.resource_timeout,
            node_gone_after=settings.node_gone_after,
            retry_rules=live.current.retry_rules,
            location_answers=probes.answers,
        ),
        on_accepted=lambda cr: repositories.request(cr.repository_namespace, cr.spec.backup_storage_location),
        own_pod=parts.own_pod,
    )
    live.current.subscribe(dispatcher.request_pass)
    probes.on_answer = dispatcher.request_pass
    maintenance = _build_maintenance(parts, cluster, dispatcher)
    return Leader(parts.metrics, election, dispatcher, repositories, locations, maintenance, definitions)


def _build_maintenance(parts: AgentParts, cluster: Cluster, dispatcher: Dispatcher) -> MaintenanceController:
    settings, namespace = parts.spec.settings, parts.spec.namespace
    inputs = LocationInputs(parts.client, parts.clock, namespace, lambda _: None)
    sources = MaintenanceSources(
        expose_settings=parts.live.expose_settings,
        causes=parts.causes,
        settings=MaintenanceConfig(parts.client, namespace, settings.maintenance_config_map).settings_for,
        inputs=partial(inputs.of, within_seconds=_INPUTS_SECONDS),
        backups=dispatcher.finished_backups,
        verification=lambda: parts.live.current.config.own.verification_plan,
    )
    return MaintenanceController(cluster, sources, namespace=namespace, switch=settings.maintenance)
