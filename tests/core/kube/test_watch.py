"""Watches of a selection through every fault of a connection."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.resources import PODS
from core.kube.transport import Retry
from core.kube.watch import ChangeKind, WatchChange, WatchState, watch_objects, watch_one
from core.models.base import JsonDict
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.tasks import running

pytestmark = pytest.mark.looptime

_PODS = Selection(PODS, "velero")


def pod(name: str, **metadata: object) -> JsonDict:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "velero", "name": name} | metadata}


class Follower:
    """Records the changes of a watch."""

    def __init__(self, kube: FakeKube) -> None:
        self.kube = kube
        self.client = KubeClient(kube, Retry(LoopClock(), attempts=1))
        self.changes: list[WatchChange] = []

    async def run(self) -> None:
        async for change in watch_objects(self.client, _PODS, clock=LoopClock()):
            self.changes.append(change)

    def take(self) -> list[tuple[str, str]]:
        """Return the changes since the last call: kinds and names."""
        found = [(str(change.kind), change.obj.get("metadata", {}).get("name", "")) for change in self.changes]
        self.changes.clear()
        return found

    def count(self) -> Counter[str]:
        """Return the number of lists and watches."""
        return Counter("watch" if "watch" in request.query else "list" for request in self.kube.requests)


@asynccontextmanager
async def following(kube: FakeKube) -> AsyncIterator[Follower]:
    """Watch the pods; on entering, the list is complete."""
    follower = Follower(kube)
    async with running(follower.run(), lead_seconds=0.1):
        yield follower


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.put(pod("a"))
    return kube


async def test_list_is_framed_and_watch_follows(kube: FakeKube) -> None:
    async with following(kube) as follower:
        kube.put(pod("b", managedFields=[{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]))
        await asyncio.sleep(0.1)
        assert "managedFields" not in follower.changes[-1].obj["metadata"]
        assert follower.take() == [("LISTING", ""), ("ADDED", "a"), ("LISTED", ""), ("ADDED", "b")]
        # The list is a quorum read.
        assert "resourceVersion" not in kube.requests[0].query


async def test_watch_continues_where_a_connection_broke(kube: FakeKube) -> None:
    async with following(kube) as follower:
        follower.take()
        kube.watches.cut()
        kube.put(pod("b"))
        await asyncio.sleep(5)
        assert follower.take() == [("ADDED", "b")]
        assert follower.count() == {"list": 1, "watch": 2}


async def test_bookmark_advances_the_version_to_continue_from(kube: FakeKube) -> None:
    async with following(kube) as follower:
        kube.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}})
        kube.watches.bookmark()
        await asyncio.sleep(0.1)
        kube.compact()
        kube.watches.cut()
        await asyncio.sleep(5)
        assert follower.count() == {"list": 1, "watch": 2}


async def test_compacted_history_is_listed_again(kube: FakeKube) -> None:
    async with following(kube) as follower:
        follower.take()
        kube.put(pod("b"))
        kube.watches.cut()
        await follower.client.delete(PODS, "velero", "a")
        kube.compact()
        await asyncio.sleep(5)
        assert follower.take() == [("LISTING", ""), ("ADDED", "b"), ("LISTED", "")]


@pytest.mark.parametrize(("fault", "times"), [(410, 1), ("lost", 5)], ids=["pages expire", "unreachable"])
async def test_first_list_is_restarted(kube: FakeKube, fault: Any, times: int) -> None:
    kube.fail_next("GET", "/pods", fault, times=times)
    async with following(kube) as follower:
        await asyncio.sleep(120)
        assert follower.take() == [*[("LISTING", "")] * (times + 1), ("ADDED", "a"), ("LISTED", "")]


async def test_idle_watch_is_ended_by_the_server_and_continues(kube: FakeKube) -> None:
    async with following(kube) as follower:
        await asyncio.sleep(3600)
        kube.put(pod("b"))
        await asyncio.sleep(1)
        assert follower.take()[-1] == ("ADDED", "b")
        assert follower.count()["list"] == 1
        assert 9 <= follower.count()["watch"] <= 13
        seconds = {one.query["timeoutSeconds"] for one in kube.requests if "watch" in one.query}
        assert len(seconds) > 1


async def test_silent_connection_is_closed(kube: FakeKube) -> None:
    async with following(kube) as follower:
        kube.watches.silent = True
        kube.put(pod("b"))
        await asyncio.sleep(600)
        kube.watches.silent = False
        kube.watches.wake()
        await asyncio.sleep(60)
        assert follower.take()[-1] == ("ADDED", "b")


async def test_invalid_line_is_a_broken_connection(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(kube) as follower:
        follower.take()
        with monkeypatch.context() as broken:
            broken.setattr("tests.support.fakewatch.json.dumps", lambda _: '{"type": "ADD')
            kube.watches.bookmark()
            await asyncio.sleep(0.1)
        kube.put(pod("b"))
        await asyncio.sleep(5)
        assert follower.take() == [("ADDED", "b")]


@pytest.mark.parametrize("what", [500, 403, 429, "lost", "ends at once"])
async def test_failing_watch_is_retried_with_backoff(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    if what == "ends at once":
        monkeypatch.setattr("core.kube.watch._WATCH_SECONDS", (0.0, 0.0))
    else:
        kube.fail_next("WATCH", "/pods", what, times=100_000)
    async with following(kube) as follower:
        await asyncio.sleep(3600)
        assert follower.count()["watch"] < 300


@pytest.mark.parametrize(("status", "times", "seconds"), [(410, 1, 5), (500, 3, 60)], ids=["gone", "failures"])
async def test_collection_is_listed_again_after(kube: FakeKube, status: int, times: int, seconds: int) -> None:
    async with following(kube) as follower:
        kube.fail_next("WATCH", "/pods", status, times=times)
        kube.watches.cut()
        await asyncio.sleep(seconds)
        assert follower.count()["list"] == 2
        assert len(kube.watches) == 1


async def test_collection_is_listed_again_after_a_version_that_the_server_rejects(kube: FakeKube) -> None:
    event = {"type": "MODIFIED", "object": pod("a", resourceVersion="x" * 1000)}
    kube.fail_next("WATCH", "/pods", json.dumps(event).encode())
    async with following(kube) as follower:
        await asyncio.sleep(60)
        assert follower.count()["list"] == 2
        follower.take()
        kube.put(pod("b"))
        await asyncio.sleep(1)
        assert follower.take() == [("ADDED", "b")]


@pytest.mark.parametrize(("status", "expected"), [(403, ForbiddenError), (404, NotFoundError)])
async def test_first_list_that_fails_permanently_raises(kube: FakeKube, status: int, expected: type[Exception]) -> None:
    kube.fail_next("GET", "/pods", status)
    with pytest.raises(expected, match="list Pod velero"):
        await Follower(kube).run()


async def test_later_list_that_is_rejected_is_retried(kube: FakeKube, caplog: pytest.LogCaptureFixture) -> None:
    async with following(kube) as follower:
        follower.take()
        kube.compact()
        kube.put(pod("b"))
        kube.watches.cut()
        kube.compact()
        kube.fail_next("GET", "/pods", 403, times=3)
        await asyncio.sleep(120)
        assert follower.take()[-3:] == [("ADDED", "a"), ("ADDED", "b"), ("LISTED", "")]
    assert "watch of pods in velero interrupted, will retry: list Pod velero: 403" in caplog.text


async def test_an_object_that_is_malformed_after_an_interrupted_list_still_exists(kube: FakeKube) -> None:
    client = KubeClient(kube, Retry(LoopClock(), attempts=1))
    async with aclosing(watch_one(client, PODS, "velero", name="a", clock=LoopClock())) as states:
        before = await anext(states)
        kube.put(pod("a") | {"status": "none"})
        kube.compact()
        kube.fail_next("GET", "/pods", 500, times=2)
        assert before == await anext(states)


async def test_closing_ends_the_watch_at_once(kube: FakeKube) -> None:
    changes = watch_objects(KubeClient(kube, Retry(LoopClock())), _PODS, clock=LoopClock())
    while (await anext(changes)).kind is not ChangeKind.LISTED:
        pass
    kube.put(pod("b"))
    await anext(changes)
    assert len(kube.watches) == 1
    await changes.aclose()
    assert len(kube.watches) == 0


async def test_the_state_tells_since_when_a_watch_is_closed_and_why() -> None:
    kube = FakeKube()
    client, state = KubeClient(kube, Retry(LoopClock(), attempts=1)), WatchState(LoopClock())

    async def follow() -> None:
        async for _ in watch_objects(client, _PODS, clock=LoopClock(), state=state):
            pass

    seen = []
    async with running(follow()):
        for seconds in (0, 700, 1, 99, 31):
            if seconds == 31:
                kube.fulfill()
            await asyncio.sleep(seconds)
            seen.append((round(state.closed_seconds), type(state.error)))
            if seconds == 700:
                for method in ("GET", "WATCH"):
                    kube.fail_next(method, "/pods", 403, times=1000)
                kube.watches.cut()
    assert seen == [(0, type(None)), (0, type(None)), (1, ForbiddenError), (100, ForbiddenError), (0, type(None))]
