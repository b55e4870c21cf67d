"""The leader's writes of the history: after backups that ended, once for each, and whatever the API server answers."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from core.kube.resources import CONFIG_MAPS
from core.models.phases import Phase
from nodeagent.coverage.history import VolumeHistory
from nodeagent.leader.election import NotLeaderError
from nodeagent.leader.index import Entry, VolumeCopy
from nodeagent.leader.volumes.states import HistoryKeeper
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.dispatching import entry, open_scene
from tests.support.clock import NOON, LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

DAY = timedelta(days=1)


def backup(name: str, days: int = 0, *, complete: bool = True) -> Entry:
    """A backup that ended so many days before NOON."""
    at = NOON - days * DAY
    return entry(
        name, phase=Phase.COMPLETED, copy=VolumeCopy("data", at, 100, "", None, complete, completed=at, new_bytes=1)
    )


@asynccontextmanager
async def keeping(kube: FakeKube, *entries: Entry, lost: Sequence[str] = ()) -> AsyncIterator[HistoryKeeper]:
    """Run a leader that finds the entries; with `lost`, it has lost the Lease when it is to write."""

    def check() -> None:
        if lost:
            raise NotLeaderError(lost[0])

    cluster = build_cluster(kube.client, LoopClock(), check_leading=check)
    keeper = HistoryKeeper(cluster, "velero", entries=lambda: entries)
    task = asyncio.create_task(keeper.run(), name="keeper")
    try:
        yield keeper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def counted(kube: FakeKube) -> list[float]:
    """How many backups each day with some has, the oldest first: each had one new byte."""
    stored = [base64.b64decode(one["binaryData"]["days"]) for one in kube.objects(CONFIG_MAPS)]
    history = VolumeHistory(stored, NOON.toordinal())
    return [one.new_bytes for one in history.of(("app", "data")) if one.new_bytes is not None]


async def test_what_ended_before_and_what_ends_later_is_counted_once_by_all_leaders() -> None:
    kube = FakeKube()
    first = [backup("a"), backup("b", 1), backup("c", 40), backup("older", 100), backup("failed", complete=False)]
    async with keeping(kube, *first) as keeper:
        await asyncio.sleep(1)
        assert counted(kube) == [1, 1, 1]
        keeper.observe(backup("d"))
        # It was deleted before the history is written.
        keeper.observe(backup("d"))
        await asyncio.sleep(61)
        assert counted(kube) == [1, 1, 2]
        sent = len(kube.requests)
        for one in (backup("a"), backup("d"), backup("c", 40)):
            keeper.observe(one)
        await asyncio.sleep(600)
        assert len(kube.requests) == sent
    async with keeping(kube, backup("a"), backup("d"), backup("e")):
        await asyncio.sleep(1)
    assert counted(kube) == [1, 1, 3]


async def test_without_permission_nothing_is_lost_and_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.fail_next("POST", "/configmaps", 403, message="no", times=3)
    async with keeping(kube, backup("a")) as keeper:
        await asyncio.sleep(30)
        keeper.observe(backup("b"))
        await asyncio.sleep(3600)
        assert counted(kube) == [2]
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.partition(":")[0] for text in warnings] == ["cannot write the history of backups, will retry"]


async def test_a_write_of_another_leader_is_merged_and_a_leader_without_the_lease_writes_nothing() -> None:
    kube = FakeKube()
    async with keeping(kube, backup("a")):
        await asyncio.sleep(1)
    kube.fail_next("PATCH", "/configmaps", 409)
    async with keeping(kube, backup("b")):
        await asyncio.sleep(1)
        assert counted(kube) == [1]
        await asyncio.sleep(120)
    assert counted(kube) == [2]
    async with keeping(kube, backup("c"), lost=["gone"]):
        await asyncio.sleep(600)
    assert counted(kube) == [2]


async def test_the_dispatcher_keeps_the_history_of_its_transfers() -> None:
    scene = open_scene("node-a")
    times = {"startTimestamp": "2026-11-21T11:00:00Z", "completionTimestamp": "2026-11-21T11:00:30Z"}
    status = {"phase": "Completed", "progress": {"totalBytes": 7, "bytesDone": 7}, "incrementalBytes": 3, **times}
    source = scene.add("du-1", status=status)["spec"]["sourcePVC"]

    def stored() -> list[bytes]:
        found = scene.kube.objects(CONFIG_MAPS)
        return [base64.b64decode(one["binaryData"]["days"]) for one in found if "binaryData" in one]

    async with scene.dispatching():
        await scene.until(lambda: bool(stored()))
    last = VolumeHistory(stored(), NOON.toordinal()).of(("app", source))[-1]
    assert (last.new_bytes, last.total_bytes, last.seconds) == (3, 7, 30)
