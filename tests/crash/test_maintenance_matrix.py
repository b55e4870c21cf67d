"""Whichever write of a maintenance is disturbed, a repository is maintained once, before a real kube-apiserver.

`make test` has one good run; `make crash-matrix` disturbs each write in each way.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Request, Response
from tests.crash.maintenance import MaintenanceWorld
from tests.crash.worlds import is_write, open_client
from tests.nodeagent.support.harness import Fault, Fuse
from tests.support.apiserver import ApiServer

_AT_A_TIME = 12
_LEAST_WRITES = 4
_DONE_SECONDS = 600
_SERVER_SECONDS = 15


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    async with open_client(apiserver) as client:
        yield client


def _counts(request: Request) -> bool:
    """Whether a leader may be disturbed at a request; Events are recorded beside."""
    return is_write(request) and not request.path.endswith("/events")


async def _check_end(world: MaintenanceWorld, where: str) -> None:
    """Check that the repository was maintained by one Job at a time, and that the status has the last one's end."""
    history = await world.history()
    created = history[-1]["startTimestamp"]
    (job,) = [job for job in await world.jobs() if job["metadata"]["creationTimestamp"] == created]
    completed = job["status"]["completionTime"]
    assert history[-1] == {"result": "Succeeded", "startTimestamp": created, "completeTimestamp": completed}, where
    assert (await world.repository())["status"]["lastMaintenanceTime"] == completed, where
    assert (world.overlaps, world.taken) == ([], []), where


async def _all(plays: list[Coroutine[None, None, bool]]) -> None:
    """Run all, and check that enough return True: before a slow server, one run needs more writes than another."""
    slots = asyncio.Semaphore(_AT_A_TIME)

    async def play(one: Coroutine[None, None, bool]) -> bool:
        async with slots:
            return await one

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(play(one), name="play") for one in plays]
    assert sum(one.result() for one in running) >= _LEAST_WRITES


async def _play(apiserver: ApiServer, admin: KubeClient, fuse: Fuse) -> MaintenanceWorld:
    """Let a leader maintain a new repository behind the fuse, and another one after it if the fuse stops it."""
    world = MaintenanceWorld(admin)
    await world.prepare()
    async with open_client(apiserver, fuse) as client, world.kubelet():
        async with world.leading(client):
            while not (fuse.blown.is_set() and fuse.fault.stops) and not await world.is_done():
                await asyncio.sleep(0.2)
        async with world.leading():
            await world.until(MaintenanceWorld.is_done, seconds=_DONE_SECONDS)
    return world


@pytest.mark.integration
async def test_a_repository_is_maintained_once(apiserver: ApiServer, client: KubeClient) -> None:
    calm = Fuse(counts=_counts)
    world = await _play(apiserver, client, calm)
    await _check_end(world, "calm")
    assert len(world.runs) == len(await world.jobs()) == 1
    assert len(calm.counted) >= _LEAST_WRITES


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
async def test_a_leader_may_be_disturbed_at_every_write(apiserver: ApiServer, client: KubeClient, fault: Fault) -> None:
    calm = Fuse(counts=_counts)
    await _play(apiserver, client, calm)

    async def check(at: int) -> bool:
        fuse = Fuse(counts=_counts, at=at, fault=fault)
        world = await _play(apiserver, client, fuse)
        where = f"{fault.name} at {at}: {fuse.counted[at : at + 1]}"
        await _check_end(world, where)
        assert len(world.runs) == 1, where
        return fuse.blown.is_set()

    await _all([check(at) for at in range(len(calm.counted))])


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_two_leaders_run_one_job_at_a_time(apiserver: ApiServer, client: KubeClient) -> None:
    async def check() -> bool:
        world = MaintenanceWorld(client)
        await world.prepare()
        async with open_client(apiserver) as other, world.kubelet(), world.leading(), world.leading(other):
            await world.until(MaintenanceWorld.is_done, seconds=_DONE_SECONDS)
        await _check_end(world, "two leaders")
        assert len(world.runs) == 1
        return True

    await _all([check() for _ in range(12)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_server_may_appear_at_every_write_scale_to_0_and_vanish(
    apiserver: ApiServer, client: KubeClient, *, after: bool
) -> None:
    calm = Fuse(counts=_counts)
    await _play(apiserver, client, calm)

    async def check(at: int) -> bool:
        world = MaintenanceWorld(client)
        await world.prepare()
        fuse = _ServerFuse(world.install_server, after=after, at=at)
        where = f"a server {'after' if after else 'before'} {at}"
        async with open_client(apiserver, fuse) as leader, world.kubelet(), world.leading(leader):
            async with asyncio.timeout(_DONE_SECONDS):
                while not fuse.blown.is_set():
                    if await world.is_done():
                        return False
                    await asyncio.sleep(0.2)
            await _watch_beside_server(world, where)
            await world.scale_server()
            await _watch_beside_server(world, where)
            await world.remove_server()
            await world.until(_is_done_or_left_to_server, seconds=_DONE_SECONDS)
        assert (world.overlaps, world.taken) == ([], []), where
        if (await world.history())[-1]["result"] == "Succeeded":
            await _check_end(world, where)
        return True

    await _all([check(at) for at in range(len(calm.counted))])


async def _is_done_or_left_to_server(world: MaintenanceWorld) -> bool:
    """Whether a Job has succeeded, or its pod has met the server; the next attempt comes after minutes then."""
    history = await world.history()
    met = bool(history) and "a Velero server is in namespace" in history[-1].get("message", "")
    return met or await world.is_done()


async def _watch_beside_server(world: MaintenanceWorld, where: str) -> None:
    """Wait until every Job that the server sees has ended, and check that none is started meanwhile."""
    jobs = {job["metadata"]["uid"] for job in await world.jobs()}
    runs = len(world.runs)
    async with asyncio.timeout(_DONE_SECONDS):
        while any(not job.get("status", {}).get("conditions") for job in await world.jobs()):
            await asyncio.sleep(0.2)
    # Two looks of the leader, on its fast clock.
    await asyncio.sleep(_SERVER_SECONDS)
    assert {job["metadata"]["uid"] for job in await world.jobs()} <= jobs, where
    assert len(world.runs) <= runs + 1, where


class _ServerFuse(Fuse):
    """A transport that installs a server before or after the write number `at`, and fails nothing."""

    def __init__(self, install: Callable[[], Awaitable[None]], *, after: bool, at: int) -> None:
        super().__init__(counts=_counts, at=at)
        self._install = install
        self._after = after

    async def request(self, request: Request) -> Response:
        if not _counts(request):
            return await self.inner.request(request)
        self.counted.append(f"{request.method} {request.path}")
        if len(self.counted) - 1 != self.at:
            return await self.inner.request(request)
        if not self._after:
            await self._install()
        response = await self.inner.request(request)
        if self._after:
            await self._install()
        self.blown.set()
        return response
