"""The metrics of volumes as backups complete, and when another agent leads."""

import asyncio
from datetime import UTC, datetime

import pytest

from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS
from core.kube.retry import Retry
from nodeagent.leader.volumes.plans import PlanReader
from nodeagent.leader.volumes.view import VolumeView
from nodeagent.runtime.metrics import Metrics
from tests.nodeagent.leader.volumes.test_plans import an_object
from tests.nodeagent.leader.volumes.test_states import backup
from tests.nodeagent.support.dispatching import open_scene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

__all__: list[str] = []

pytestmark = pytest.mark.looptime


def shown(metrics: Metrics, name: str = "nodeagent_volume") -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith(name)]


async def test_a_completed_backup_is_shown_soon_and_nothing_once_another_agent_leads() -> None:
    metrics, clock, entries = Metrics("node-a"), LoopClock(), [backup(1, bytes_=5)]
    plans = PlanReader(KubeClient(FakeKube(), Retry(clock)), "velero", lambda: datetime(2026, 11, 1, tzinfo=UTC))
    view = VolumeView(metrics, clock, plans, lambda: entries)
    task = asyncio.create_task(view.run(), name="view")
    await asyncio.sleep(1)
    labels = '{claim="data",node="node-a",volume_namespace="app"}'
    assert f"nodeagent_volume_last_backup_bytes{labels} 5.0" in shown(metrics)
    entries.append(backup(2, bytes_=6))
    view.observe(entries[-1])
    await asyncio.sleep(5)
    assert f"nodeagent_volume_last_backup_bytes{labels} 6.0" in shown(metrics)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shown(metrics) == []


async def test_plans_are_read_again_every_five_minutes() -> None:
    kube, clock = FakeKube(), LoopClock()
    plans = PlanReader(KubeClient(kube, Retry(clock)), "velero", lambda: datetime(2026, 11, 1, tzinfo=UTC))
    view = VolumeView(Metrics("node-a"), clock, plans, list)
    task = asyncio.create_task(view.run(), name="view")
    await asyncio.sleep(901)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(request.path.endswith("/persistentvolumeclaims") for request in kube.requests) == 4


async def test_the_dispatcher_shows_the_backups_of_its_transfers() -> None:
    scene = open_scene("node-a")
    status = {"phase": "Completed", "progress": {"totalBytes": 7, "bytesDone": 7}}
    transfer = scene.add("du-1", status=status)
    source = transfer["spec"]["sourcePVC"]
    claim = an_object(PERSISTENT_VOLUME_CLAIMS, source, {})
    scene.kube.put(claim)
    metrics = scene.metrics
    async with scene.dispatching():
        await scene.until(lambda: bool(shown(metrics, "nodeagent_volume_last_backup_bytes")))
        (line,) = shown(metrics, "nodeagent_volume_last_backup_bytes")
        assert line.endswith(f'{{claim="{source}",node="node-a",volume_namespace="app"}} 7.0')
    assert shown(metrics) == []


async def test_an_accepted_transfer_is_counted_with_its_time_in_the_queue() -> None:
    scene = open_scene("node-a")
    scene.add("du-1")
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du-1") == "Accepted")
        await scene.until(
            lambda: shown(scene.metrics, 'nodeagent_queue_seconds_count{kind="DataUpload"')[0].endswith(" 1.0")
        )
