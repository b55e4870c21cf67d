"""The Events of a data path: when they are recorded."""

import asyncio
import json

import pytest

from core.kube.client import KubeClient
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import EVENTS
from core.kube.retry import Retry
from datamover.kopia.progress import Direction, Meter
from datamover.pod.reporting import Reporter
from tests.support.clock import NOON, LoopClock
from tests.support.fakekube import FakeKube

_ABOUT = ObjectRef("velero.io/v2alpha1", "DataUpload", "velero", "du-1", "uid-1")


@pytest.mark.looptime
async def test_the_start_of_the_snapshot_is_reported_at_once_and_from_then_on() -> None:
    """The agent must know it before the next scheduled Event, should the node be lost meanwhile."""
    kube, clock = FakeKube(), LoopClock()
    recorder = EventRecorder(KubeClient(kube, Retry(clock)), clock, component="du-1", host="node-a")
    meter = Meter(clock, Direction.BACKUP)

    def messages() -> list[dict[str, object]]:
        reasons = ("Data-Path-Progress",)
        return [json.loads(event["message"]) for event in kube.objects(EVENTS) if event["reason"] in reasons]

    following = asyncio.create_task(Reporter(recorder, _ABOUT, clock).follow(meter))
    await asyncio.sleep(9)
    before = messages()
    assert "snapshotStarted" not in before[-1]
    meter.snapshot_started = NOON
    await asyncio.sleep(0.5)
    after = messages()
    await asyncio.sleep(10)
    following.cancel()
    await asyncio.wait({following})
    assert len(after) == len(before) + 1
    assert {one["snapshotStarted"] for one in messages()[len(before) :]} == {"2026-11-21T12:00:00Z"}
    assert len(messages()) == len(after) + 1
