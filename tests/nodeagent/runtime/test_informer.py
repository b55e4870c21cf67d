"""The informer: its cache and callbacks reflect every change across broken connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError
from core.kube.resources import PODS
from core.kube.transport import Retry
from nodeagent.runtime.informer import Informer
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


def pod(name: str, *, namespace: str = "velero", phase: str = "Pending", **metadata: object) -> JsonDict:
    meta = {"namespace": namespace, "name": name, "annotations": {"large": "x" * 1000}} | metadata
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"phase": phase}}


def trim(obj: JsonDict) -> JsonDict:
    """Return another shape: a cache may hold anything."""
    return {"name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"], "phase": obj["status"]["phase"]}


def reject_b(obj: JsonDict) -> JsonDict:
    if obj["metadata"]["name"] == "b":
        raise OverflowError("too much")
    return trim(obj)


class Watched:
    """An informer and its callbacks: name, phase, and whether the cache still has the object."""

    def __init__(self, kube: FakeKube, selection: Selection) -> None:
        self.kube = kube
        self.client = KubeClient(kube, Retry(LoopClock(), attempts=1))
        self.changes: list[tuple[str, str, bool]] = []
        self.informer = Informer(self.client, selection, clock=LoopClock(), trim=trim, on_change=self._on_change)

    def _on_change(self, obj: JsonDict) -> None:
        kept = self.informer.get("velero", obj["name"])
        self.changes.append((obj["name"], obj["phase"], kept is not None and kept["uid"] == obj["uid"]))

    def take(self) -> list[tuple[str, str, bool]]:
        changes, self.changes = self.changes, []
        return changes


@asynccontextmanager
async def watched(kube: FakeKube, selection: Selection | None = None) -> AsyncIterator[Watched]:
    """Run an informer of the pods; on entering it is synced."""
    watching = Watched(kube, selection or Selection(PODS, "velero"))
    async with running(watching.informer.run()):
        await watching.informer.synced.wait()
        await asyncio.sleep(0.1)
        yield watching


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    kube.put(pod("a"))
    kube.put(pod("elsewhere", namespace="other"))
    return kube


async def test_each_change_is_reported_after_the_cache_is_updated(kube: FakeKube) -> None:
    async with watched(kube) as watching:
        assert watching.take() == [("a", "Pending", True)]
        (kept,) = watching.informer.items()
        assert kept == {"name": "a", "uid": kept["uid"], "phase": "Pending"}
        assert watching.informer.get("velero", "elsewhere") is None
        kube.put(pod("b"))
        await asyncio.sleep(0.1)
        kube.put(pod("b", phase="Running"))
        await asyncio.sleep(0.1)
        await watching.client.delete(PODS, "velero", "b")
        await asyncio.sleep(0.1)
        assert watching.take() == [("b", "Pending", True), ("b", "Running", True), ("b", "Running", False)]
        assert len(watching.informer.items()) == 1


async def test_a_relist_reports_differences_only(kube: FakeKube) -> None:
    for name in ("gone", "changed", "unchanged"):
        kube.put(pod(name))
    async with watched(kube) as watching:
        watching.take()
        kube.watches.cut()
        for name in ("a", "gone"):
            await watching.client.delete(PODS, "velero", name)
        for name in ("a", "changed"):
            kube.put(pod(name, phase="Running"))
        kube.put(pod("new"))
        kube.compact()
        await asyncio.sleep(5)
        assert sorted(watching.take()) == [
            # Recreated between the watches: both are reported.
            ("a", "Pending", False),
            ("a", "Running", True),
            ("changed", "Running", True),
            ("gone", "Pending", False),
            ("new", "Pending", True),
        ]


async def test_an_interrupted_list_removes_nothing(kube: FakeKube) -> None:
    for number in range(600):
        kube.put(pod(f"p{number}"))
    async with watched(kube) as watching:
        watching.take()
        kube.fail_next("GET", "/pods", 500)
        kube.watches.cut()
        kube.put(pod("late"))
        kube.compact()
        await asyncio.sleep(1)
        assert len(watching.informer.items()) >= 601
        await asyncio.sleep(30)
        assert watching.take() == [("late", "Pending", True)]


async def test_a_forbidden_first_list_ends_the_informer(kube: FakeKube) -> None:
    kube.fail_next("GET", "/pods", 403)
    watching = Watched(kube, Selection(PODS, "velero"))
    with pytest.raises(ForbiddenError):
        await watching.informer.run()
    assert not watching.informer.synced.is_set()


class Fallible:
    """An informer whose `trim` fails for the pod b, and whose callback fails for the pod c."""

    def __init__(self, kube: FakeKube) -> None:
        self.skipped: list[str] = []
        self.handled: list[str] = []
        client = KubeClient(kube, Retry(LoopClock(), attempts=1), on_skipped=self.skipped.append)
        selection = Selection(PODS, "velero")
        self.informer = Informer(client, selection, clock=LoopClock(), trim=reject_b, on_change=self._on_change)

    def _on_change(self, obj: JsonDict) -> None:
        if obj["name"] == "c":
            raise KeyError("labels")
        self.handled.append(obj["name"])


async def test_an_object_that_cannot_be_handled_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    for name in "abcd":
        kube.put(pod(name))
    fallible = Fallible(kube)
    async with running(fallible.informer.run()):
        await fallible.informer.synced.wait()
        kube.put(pod("e"))
        await asyncio.sleep(0.1)
    assert fallible.handled == ["a", "d", "e"]
    assert fallible.skipped == ["Pod", "Pod"]
    assert fallible.informer.get("velero", "b") is None
    faults = [(vars(record)["fields"]["name"], record.exc_info is not None) for record in caplog.records]
    assert faults == [("b", True), ("c", True)]


async def test_a_malformed_object_stays_as_it_was_last_read() -> None:
    kube = FakeKube()
    for name in "abc":
        kube.put(pod(name))
    async with watched(kube) as watching:
        watching.take()
        kube.put(pod("b") | {"status": "none"})
        kube.put(pod("c", phase="Running"))
        await asyncio.sleep(0.1)
        assert watching.take() == [("c", "Running", True)]
        kube.compact()
        kube.watches.cut()
        await asyncio.sleep(5)
        assert watching.take() == []
        assert len(watching.informer.items()) == 3
        kube.put(pod("b", phase="Running"))
        await asyncio.sleep(0.1)
        assert watching.take() == [("b", "Running", True)]
        kube.put(pod("b") | {"status": "none"})
        await watching.client.delete(PODS, "velero", "b")
        await asyncio.sleep(0.1)
        assert watching.take() == [("b", "Running", False)]
