"""What the pages are made from: coalesced changes, and a state that is never shown as newer or better than it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from client.status.health import Health
from client.status.read import StatusReader
from client.ui.live import Live, State
from tests.client.support.status_scene import StatusScene, transfer
from tests.support.clock import NOON, LoopClock

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def _following(scene: StatusScene) -> AsyncIterator[Live]:
    clock = LoopClock()
    reader = StatusReader(scene.client, "velero", now=clock.now)
    live = Live(scene.client, "velero", reader, clock)
    task = asyncio.get_running_loop().create_task(live.run())
    try:
        while live.state is None:
            await live.wait(live.number, 1.0)
        yield live
    finally:
        task.cancel()
        await asyncio.wait({task})


def _state(live: Live) -> State:
    assert live.state is not None
    return live.state


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def scene() -> StatusScene:
    """A healthy cluster, also some minutes after noon."""
    scene = StatusScene()
    scene.put_lease("2026-11-21T12:30:00.000000Z")
    return scene


async def test_changes_lead_to_two_states_a_second_at_most(scene: StatusScene) -> None:
    async with _following(scene) as live:
        before, began = live.number, _now()
        for number in range(200):
            scene.kube.put(transfer("DataUpload", "busy", "InProgress", progress={"bytesDone": number}))
            await asyncio.sleep(0.05)
        assert 10 <= live.number - before <= 2 * (_now() - began) + 1
        while _state(live).snapshot.transfers[0].bytes_done != 199:
            await live.wait(live.number, 1.0)


async def test_a_state_that_nothing_changes_grows_older_by_seconds(scene: StatusScene) -> None:
    async with _following(scene) as live:
        before = live.number
        await asyncio.sleep(60.0)
        assert 8 <= live.number - before <= 12
        assert _state(live).view.health is Health.HEALTHY
        assert (_state(live).lost, _state(live).since) == (None, _state(live).snapshot.at)


async def test_while_the_cluster_does_not_answer_its_health_is_not_known(scene: StatusScene) -> None:
    async with _following(scene) as live:
        await asyncio.sleep(30.0)
        left = NOON + timedelta(seconds=_now())
        scene.go_away()
        while not _state(live).lost:
            await live.wait(live.number, 1.0)
        assert NOON + timedelta(seconds=_now()) - left <= timedelta(seconds=12)
        while not _state(live).error:
            assert _state(live).lost
            assert abs(_state(live).since - left) <= timedelta(seconds=2)
            await live.wait(live.number, 1.0)
        assert abs(_state(live).since - left) <= timedelta(seconds=2)
        view = _state(live).view
        assert view.health is Health.UNKNOWN
        assert "the cluster does not answer" in view.findings[-1].message
        await asyncio.sleep(300.0)
        assert abs(_state(live).since - left) <= timedelta(seconds=2)


async def test_it_goes_on_by_itself(scene: StatusScene) -> None:
    async with _following(scene) as live:
        scene.go_away()
        await asyncio.sleep(300.0)
        scene.kube.fulfill()
        scene.kube.put(transfer("DataUpload", "later"))
        async with asyncio.timeout(60.0):
            while _state(live).lost:
                await live.wait(live.number, 1.0)
        assert [one.name for one in _state(live).snapshot.transfers] == ["later"]
        assert _state(live).view.health is Health.HEALTHY


async def test_what_may_not_be_watched_is_no_outage(scene: StatusScene) -> None:
    for method in ("GET", "WATCH"):
        scene.kube.fail_next(method, "/backuprepositories", 403, message="you may not", times=999)
    async with _following(scene) as live:
        await asyncio.sleep(300.0)
        assert _state(live).lost is None
        assert _state(live).view.unread == ["repositories"]
        assert _state(live).view.health is Health.UNKNOWN
