"""Following a cluster: a change is seen without another list, and a lost watch is never healthy."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import pytest

from client.status.follow import StatusFollower, pause_after
from client.status.health import Health, judge, worst
from client.status.records import ClusterSnapshot, TransferRecord, UnreadPart
from core.kube.errors import UnauthorizedError, UnreachableError
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.volume_scene import a_claim
from tests.support.clock import NOON, LoopClock

pytestmark = pytest.mark.looptime

_DEADLINE_SECONDS = 60.0


async def _run(scene: StatusScene, work: Callable[[StatusFollower], Coroutine[Any, Any, None]]) -> None:
    follower = StatusFollower(scene.client, "velero", scene.reader, LoopClock())
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await follower.run(lambda: work(follower))


async def _until(follower: StatusFollower, condition: Callable[[ClusterSnapshot], bool]) -> ClusterSnapshot:
    while not condition(found := follower.snapshot()):
        follower.changed.clear()
        await follower.changed.wait()
    return found


def _active(snapshot: ClusterSnapshot) -> list[TransferRecord]:
    """Return those that have not ended: a read has less of the others."""
    return sorted((one for one in snapshot.transfers if one.active), key=lambda one: one.name)


async def test_the_first_snapshot_is_what_a_read_returns(scene: StatusScene) -> None:
    expected = await scene.reader.read()

    async def work(follower: StatusFollower) -> None:
        found = follower.snapshot()
        assert _active(found) == _active(expected)
        assert len(found.transfers) == len(expected.transfers)
        assert found.agents == expected.agents
        for part in ("repositories", "locations", "page", "config", "lease"):
            assert getattr(found, part) == getattr(expected, part)
        assert found.unread == ()

    await _run(scene, work)


def test_a_view_of_many_transfers_stays_longer() -> None:
    one = TransferRecord(kind="DataUpload", namespace="velero", name="du")
    assert pause_after(ClusterSnapshot("velero", NOON, transfers=(one,) * 20_000), 1.0) == 3.0


async def test_a_change_is_seen_without_a_list_or_a_get(scene: StatusScene) -> None:
    async def work(follower: StatusFollower) -> None:
        before = len(scene.kube.requests)
        scene.kube.put(transfer("DataUpload", "new"))
        await _until(follower, lambda snapshot: any(one.name == "new" for one in snapshot.transfers))
        assert len(scene.kube.requests) == before
        watched = [one.path.rpartition("/")[2] for one in scene.kube.requests if "watch" in one.query]
        assert len(watched) == len(set(watched)) <= 7

    await _run(scene, work)


async def test_a_kind_that_may_not_be_watched_is_not_healthy() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/datadownloads", 403, message="cannot list datadownloads", times=99)

    async def work(follower: StatusFollower) -> None:
        snapshot = follower.snapshot()
        assert [one.part for one in snapshot.unread] == [UnreadPart.TRANSFERS]
        assert "cannot list datadownloads" in snapshot.unread[0].why
        assert worst(judge(snapshot)) is Health.UNKNOWN

    await _run(scene, work)


@pytest.mark.parametrize("spec", [{"volumeNamespace": 5}, {"volumeNamespace": "app"}], ids=["malformed", "incomplete"])
async def test_an_invalid_object_is_named(spec: dict[str, object]) -> None:
    scene = StatusScene()
    scene.put("BackupRepository", "odd", spec=spec)

    async def work(follower: StatusFollower) -> None:
        assert [one.part for one in follower.snapshot().unread] == [UnreadPart.REPOSITORIES]

    await _run(scene, work)


async def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def work(_: StatusFollower) -> None:
        raise UnauthorizedError("no")

    with pytest.raises(UnauthorizedError, match="no"):
        await _run(StatusScene(), work)


async def test_a_rejection_ends_with_a_list_and_a_broken_watch_is_never_healthy(scene: StatusScene) -> None:
    follower = StatusFollower(scene.client, "velero", scene.reader, LoopClock())
    scene.kube.fail_next("GET", "/datauploads", 403)

    async def work() -> None:
        await _until(follower, lambda snapshot: not snapshot.unread)
        scene.kube.fail_next("WATCH", "/datauploads", 500, times=999)
        scene.kube.watches.cut()
        await asyncio.sleep(20.0)
        found = follower.snapshot()
        assert [(one.part, one.passing) for one in found.unread] == [(UnreadPart.TRANSFERS, True)]
        assert worst(judge(found)) is Health.UNKNOWN

    await follower.run(work)


@pytest.mark.parametrize("patient", [True, False])
async def test_an_outage_is_no_error_for_those_who_wait(scene: StatusScene, *, patient: bool) -> None:
    """`status --wait-idle` goes on; a page says that the cluster does not answer."""
    follower = StatusFollower(scene.client, "velero", scene.reader, LoopClock(), patient=patient)

    async def work() -> None:
        scene.go_away()
        await asyncio.sleep(100)
        assert UnreadPart.LEASE in {one.part for one in follower.snapshot().unread}
        assert worst(judge(follower.snapshot())) is Health.UNKNOWN
        scene.kube.fulfill()
        await asyncio.sleep(100)
        assert follower.snapshot().unread == ()

    with nullcontext() if patient else pytest.raises(UnreachableError):
        await follower.run(work)


@pytest.mark.parametrize(("claims", "reads"), [(1, 4), (1200, 3)])
async def test_many_pvcs_are_read_less_often(claims: int, reads: int) -> None:
    scene = StatusScene()
    for number in range(claims):
        scene.kube.put(a_claim(f"data-{number}"))
    follower = StatusFollower(scene.client, "velero", scene.reader, LoopClock())
    await follower.run(lambda: asyncio.sleep(400))
    assert sum(one.path.endswith("/persistentvolumeclaims") for one in scene.kube.requests) == reads
