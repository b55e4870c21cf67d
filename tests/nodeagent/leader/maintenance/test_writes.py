"""A maintenance that is disturbed at each of its writes: the leader stops, or a Velero server appears."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from core.kube.resources import PODS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from tests.nodeagent.support.maintenance_scene import MINUTE, MaintenanceScene, result
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

_MOST_WRITES = 30
_WRITES = frozenset({"POST", "PATCH", "DELETE"})


@dataclass
class _AtWrite:
    """A transport that calls `do` at the write number `at`, before or after it; then the write hangs, or goes on."""

    kube: FakeKube
    at: int
    do: Callable[[], None]
    after: bool
    hangs: bool
    writes: int = 0
    reached: bool = False

    async def request(self, request: Request) -> Response:
        """Send the request."""
        if request.method not in _WRITES or request.path.endswith("/events"):
            return await self.kube.request(request)
        self.writes += 1
        if self.writes != self.at:
            return await self.kube.request(request)
        response = await self.kube.request(request) if self.after else None
        self.reached = True
        self.do()
        if self.hangs:
            await asyncio.Event().wait()
        return response or await self.kube.request(request)

    async def close(self) -> None:
        """Do nothing: the server is shared."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""
        return self.kube.stream(request)


@asynccontextmanager
async def _kubelet(scene: MaintenanceScene) -> AsyncIterator[None]:
    """Run the pod of each Job, and end it well 20 seconds after its Job was labeled."""

    async def work() -> None:
        while True:
            await asyncio.sleep(2)
            names = {pod["metadata"]["labels"].get("job-name") for pod in scene.kube.objects(PODS)}
            for job in scene.jobs:
                if job["metadata"]["name"] not in names:
                    scene.start_pod(job)
                elif scene.labeled(job) and not job.get("status"):
                    await asyncio.sleep(20)
                    if any(one["metadata"]["uid"] == job["metadata"]["uid"] for one in scene.jobs):
                        scene.end(job, 0, result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-12-01T00:00:00Z"))

    task = asyncio.create_task(work(), name="kubelet")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(condition: Callable[[], bool], *, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(1)


def _has_history(scene: MaintenanceScene) -> bool:
    return bool(scene.history)


def _is_reached(transport: _AtWrite, scene: MaintenanceScene) -> bool:
    return transport.reached or _has_history(scene)


def _install_server(scene: MaintenanceScene) -> None:
    scene.kube.put(SERVER)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_leader_that_is_stopped_at_any_write_leaves_one_run_and_its_result(after: bool) -> None:
    for number in range(1, _MOST_WRITES):
        scene = MaintenanceScene()
        transport = _AtWrite(scene.kube, number, lambda: None, after=after, hangs=True)
        async with _kubelet(scene):
            async with scene.running(transport):
                await _until(partial(_is_reached, transport, scene), seconds=2 * 60 * MINUTE)
                await asyncio.sleep(30)
            async with scene.running():
                await _until(partial(_has_history, scene), seconds=2 * 60 * MINUTE)
                await asyncio.sleep(5 * MINUTE)
        assert [entry["result"] for entry in scene.history] == ["Succeeded"], number
        assert len(scene.jobs) == 1
        assert "running" not in scene.record
        if not transport.reached:
            break
    assert 4 <= number < _MOST_WRITES - 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_server_that_appears_at_any_write_never_waits_for_ever(after: bool) -> None:
    """Each Job that it can see has a pod, so it ends; and no Job that it can see was deleted before."""
    for number in range(1, _MOST_WRITES):
        scene = MaintenanceScene()
        seen: list[JsonDict] = []
        transport = _AtWrite(scene.kube, number, partial(_install_server, scene), after=after, hangs=False)
        async with _kubelet(scene), scene.running(transport):
            await _until(partial(_is_reached, transport, scene), seconds=2 * 60 * MINUTE)
            for _ in range(300):
                seen += [job for job in scene.jobs if scene.labeled(job)]
                await asyncio.sleep(1)
        left = {job["metadata"]["uid"]: job for job in scene.jobs}
        assert all(scene.labeled(job) for job in left.values()), number
        for job in seen:
            assert left[job["metadata"]["uid"]].get("status"), number
        if not transport.reached:
            break
    assert 4 <= number < _MOST_WRITES - 1
