"""The life of a transfer of each kind, to each of its ends: every write of an agent, with its Events and messages.

The agent is built as `serve` builds it, so it is the leader and the owning agent; the rest of the cluster is simulated.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest

from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.kube.transport import Request, Response, Retry
from core.models.phases import FINAL_PHASES
from exposer.template import AgentTemplate
from nodeagent.app import Agent, build_agent
from nodeagent.config.parse import parse_config
from nodeagent.runtime.settings import MaintenanceSwitch, RepositoryControllerMode, Settings
from nodeagent.startup import AgentSpec
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.harness import World, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS
from tests.support.clock import LoopClock
from tests.support.golden import assert_golden_text
from tests.support.tasks import running
from tests.support.transports import Around

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from core.models.base import JsonDict

pytestmark = pytest.mark.looptime

_AGENT_POD = socket.gethostname().lower()
_MASKS = {
    rf"\b{re.escape(_AGENT_POD)}\b": "AGENT-POD",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "UID",
    r"\b\d{4}-\d\d-\d\dT[0-9:.]+Z": "TIME",
    r"\b[0-9a-f]{32}\b": "RANDOM",
    r'"resourceVersion": "\d+"': '"resourceVersion": "VERSION"',
    r"^/apis?/(\S+/)?v\d\w*/": "",
}
_LEFT_OUT = ("/leases", "/configmaps/node-agent-admissions")
"""What the leader writes for itself, at times of its own."""

_COUNTED = re.compile(r"(?!nodeagent_api_)(nodeagent|podVolume)_\w+_(total|count)\{.* (?!0\.0$)")
"""Counters that have counted something, except of requests."""

_SLOW = "force-canceled"
"""It takes an hour, and is the same for each kind."""


class _End(NamedTuple):
    """How a mover ends; `stopped` is how a person ends the transfer, in the phase `during`."""

    mover: Mover
    stopped: str = ""
    during: str = ""


_ENDS = {
    "completed": _End(Mover(seconds=1)),
    "failed": _End(Mover(seconds=1, exit_code=11, message="no space left")),
    "interrupted": _End(Mover(seconds=1, interrupted=1)),
    "interrupted-too-often": _End(Mover(seconds=1, interrupted=99)),
    "rejected": _End(Mover(seconds=1, rejected="OutOfcpu", rejections=1)),
    "evicted": _End(Mover(evicted=True)),
    "not-prepared": _End(Mover(starts=False)),
    "canceled": _End(Mover(seconds=1000), "cancel", "InProgress"),
    "canceled-early": _End(Mover(starts=False), "cancel", "Accepted"),
    "deleted": _End(Mover(seconds=1000), "deletion", "InProgress"),
    _SLOW: _End(Mover(stubborn=True), "cancel", "InProgress"),
}


@dataclass
class _Recorder(Around):
    """Keeps what the agent writes, one line for each request."""

    lines: list[str] = field(default_factory=list)

    async def request(self, request: Request) -> Response:
        if request.method != "GET" and not any(part in request.path for part in _LEFT_OUT):
            self.lines.append(_describe(request))
        return await self.inner.request(request)


def _describe(request: Request) -> str:
    body = json.loads(request.body or b"{}")
    line = f"{request.path} {request.method.lower()}"
    if body.get("kind") == "Event":
        line = f"{body['involvedObject']['kind']} {body['type']} {body['reason']}: {body['message']}"
    elif request.method == "POST":
        line += f" {body['metadata']['name']}"
    elif body:
        line += f" {json.dumps(body, sort_keys=True)}"
    return _mask(line)


def _mask(text: str) -> str:
    for pattern, shown in _MASKS.items():
        text = re.sub(pattern, shown, text)
    return text


@asynccontextmanager
async def _run_agent(world: World, recorder: _Recorder, config: JsonDict | None = None) -> AsyncIterator[Agent]:
    spec = {"provider": "aws", "objectStorage": {"bucket": "b"}}
    meta = {"name": "default", "namespace": NAMESPACE}
    location = {"apiVersion": BACKUP_STORAGE_LOCATIONS.api_version, "kind": BACKUP_STORAGE_LOCATIONS.kind}
    for obj in (location | {"metadata": meta, "spec": spec}, cluster_node(NODE), agent_pod(NODE, name=_AGENT_POD)):
        world.kube.put(obj)
    clock = LoopClock()
    settings = Settings(
        NODE,
        namespace=NAMESPACE,
        prepare_timeout=timedelta(minutes=2),
        repository_controller=RepositoryControllerMode.OFF,
        maintenance=MaintenanceSwitch.OFF,
    )
    template = AgentTemplate("mover:1", host_pods="/host_pods")
    agent = build_agent(
        KubeClient(recorder, Retry(clock)),
        clock,
        AgentSpec(settings, NAMESPACE, parse_config(json.dumps(config or {})), template),
    )
    async with running(agent.run()):
        yield agent


@pytest.mark.parametrize(
    ("kind", "end"), [(kind, end) for kind in TRANSFERS for end in _ENDS if end != _SLOW or kind == "DataUpload"]
)
async def test_the_life_of(kind: str, end: str) -> None:
    mover, stopped, during = _ENDS[end]
    async with open_world(TRANSFERS[kind](), mover=mover) as world:
        world.cluster.tick_seconds = 0.25
        recorder = _Recorder(world.kube)
        async with _run_agent(world, recorder) as agent:
            if stopped:
                await world.until(lambda: world.phase(kind) == during, every=0.25)
                await world.stop(world.transfer(kind), stopped)
            if mover.stubborn:
                # The cancel times out after an hour.
                world.cluster.tick_seconds = 60
            await world.until(lambda: _is_over(world, kind), seconds=10_000, every=5)
            counted = filter(_COUNTED.match, agent.parts.metrics.render().decode().splitlines())
    assert_golden_text(f"lives/{kind}-{end}", "".join(f"{line}\n" for line in [*recorder.lines, "", *counted]))


def _is_over(world: World, kind: str) -> bool:
    """Whether the transfer has its final phase, and nothing is left to clean up."""
    return not world.transfer(kind) or (world.phase(kind) in FINAL_PHASES and world.done(kind))


async def test_the_status_page_of_an_agent() -> None:
    """One transfer moves data, one waits for its slot, and the others are in the queue."""
    config: JsonDict = {"loadConcurrency": {"globalConfig": 1, "prepareQueueLength": 1}}
    transfers = [build() for build in TRANSFERS.values()]
    async with (
        open_world(*transfers, mover=Mover(seconds=1000)) as world,
        _run_agent(world, _Recorder(world.kube), config) as agent,
    ):
        await world.until(lambda: sorted(map(world.phase, TRANSFERS)) == ["", "", "InProgress", "Prepared"])
        await asyncio.sleep(10)
        page = agent.report() | {"confinement": "as the kernel can"}
    assert_golden_text("status-page", _mask(json.dumps(page, indent=2, sort_keys=True)) + "\n")
