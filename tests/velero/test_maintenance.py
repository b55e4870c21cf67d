"""A Velero server and this agent maintain the same repositories, one after the other.

Jobs and pods are simulated; what server and leader do is their own code, on a real API server.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.base import format_time
from tests.crash.maintenance import MaintenanceWorld, end_job
from tests.nodeagent.support.maintenance_scene import result
from tests.support.apiserver import ApiServer, run_apiserver
from tests.support.objects import JsonDict
from tests.testbed.processes import Component
from tests.velero.server import apply_definitions, running_server

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

_MINUTE = 60
_LABEL = "velero.io/repo-name"


@pytest.fixture(scope="module", params=["1.17.2", "1.18.3"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def apiserver(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with run_apiserver() as server:
        apply_definitions(version, server, tmp_path_factory.mktemp("velero"))
        yield server


class _World(MaintenanceWorld):
    """A world whose server is a real one."""

    apiserver: ApiServer
    version: str
    folder: Path

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Component]:
        """Install the server, and run it until the end of the block."""
        await self.install_server()
        with running_server(self.version, self.apiserver, self.folder, self.namespace) as server:
            yield server

    async def until_log(self, server: Component, text: str) -> None:
        """Return once the server has written `text` to its log."""
        async with asyncio.timeout(_MINUTE):
            while text not in (log := server.log.read_text(errors="replace")):
                assert server.process.poll() is None, log
                await asyncio.sleep(0.2)

    async def until_looked(self, server: Component) -> None:
        """Return once the server has looked at the repository, and found nothing to do or done it."""
        await self.until_log(server, "Starting workers")
        await self.until_log(server, "Checking repository for stale locks")


@pytest.fixture
def world(client: KubeClient, apiserver: ApiServer, version: str, tmp_path: Path) -> _World:
    world = _World(client)
    world.apiserver, world.version, world.folder = apiserver, version, tmp_path / "server"
    return world


def _ago(**since: float) -> str:
    return format_time(SystemClock().now() - timedelta(**since))


async def _first_job(world: MaintenanceWorld) -> JsonDict:
    """Return the only Job, once there is one."""
    async with asyncio.timeout(_MINUTE):
        while not (jobs := await world.jobs()):
            await asyncio.sleep(0.2)
    (job,) = jobs
    return job


async def _labeled_job(world: MaintenanceWorld) -> JsonDict:
    """Return our Job, once its pod runs and the leader has labeled it."""
    async with world.leading():
        await world.start_pod(await _first_job(world))
        async with asyncio.timeout(_MINUTE):
            while _LABEL not in (await _first_job(world))["metadata"]["labels"]:
                await asyncio.sleep(0.2)
    return await _first_job(world)


async def _has_history(world: MaintenanceWorld) -> bool:
    return bool(await world.history())


async def test_a_server_waits_for_our_job_and_takes_its_result(world: _World) -> None:
    await world.prepare()
    job = await _labeled_job(world)
    async with world.serving() as server:
        await world.until_looked(server)
        assert await world.history() == []
        await end_job(world.client, job, result("quick"), failed=False)
        await world.until(_has_history, seconds=_MINUTE)
        (entry,) = await world.history()
        ended = await _first_job(world)
        completed = ended["status"]["completionTime"]
        assert entry == {
            "result": "Succeeded",
            "startTimestamp": job["metadata"]["creationTimestamp"],
            "completeTimestamp": completed,
        }
        assert (await world.repository())["status"]["lastMaintenanceTime"] == completed


async def test_a_failed_job_of_ours_moves_no_time(world: _World) -> None:
    last = _ago(minutes=90)
    await world.prepare(lastMaintenanceTime=last)
    job = await _labeled_job(world)
    # It is due again later than this test takes.
    change: JsonDict = {"spec": {"maintenanceFrequency": "3h0m0s"}}
    await world.client.patch(BACKUP_REPOSITORIES, world.namespace, world.name, change)
    async with world.serving() as server:
        await world.until_looked(server)
        await end_job(world.client, job, "log\nRepo maintenance error: blob not found: p1", failed=True)
        await world.until(_has_history, seconds=_MINUTE)
        (entry,) = await world.history()
        assert entry == {
            "result": "Failed",
            "startTimestamp": job["metadata"]["creationTimestamp"],
            "message": "blob not found: p1",
        }
        assert (await world.repository())["status"]["lastMaintenanceTime"] == last
        assert len(await world.jobs()) == 1


async def test_a_server_keeps_the_newest_of_our_entries_and_starts_nothing_before_it_is_due(world: _World) -> None:
    entries = [
        {"result": "Succeeded", "startTimestamp": _ago(minutes=hour * 60 + 20), "completeTimestamp": _ago(hours=hour)}
        for hour in range(26, 1, -1)
    ]
    await world.prepare(recentMaintenance=entries, lastMaintenanceTime=_ago(hours=2))
    job = await _labeled_job(world)
    await end_job(world.client, job, result("full"), failed=False)
    async with world.serving() as server:
        async with asyncio.timeout(_MINUTE):
            while len(await world.history()) == len(entries):
                await asyncio.sleep(0.2)
        await world.until_looked(server)
        history = await world.history()
        assert [entry["startTimestamp"] for entry in history] == [
            *(entry["startTimestamp"] for entry in entries[-2:]),
            job["metadata"]["creationTimestamp"],
        ]
        assert len(await world.jobs()) == 1
    await world.remove_server()
    async with world.leading():
        await world.until(_is_settled, seconds=_MINUTE)
    assert await world.history() == history
    assert len(await world.jobs()) == 1


async def _is_settled(world: MaintenanceWorld) -> bool:
    """Whether the leader knows of no Job that has not ended."""
    return "running" not in await world.record()


async def test_we_wait_for_the_job_of_a_server_that_is_gone_and_keep_its_history(world: _World) -> None:
    await world.prepare()
    async with world.serving():
        job = await _first_job(world)
    await world.remove_server()
    assert job["metadata"]["labels"][_LABEL] == world.name
    async with world.leading():
        await world.start_pod(job)
        # Three looks of the leader, on its fast clock: a Job of its own would be there.
        await asyncio.sleep(18)
        assert len(await world.jobs()) == 1
        await end_job(world.client, job, "", failed=False)
        await world.until(_has_history, seconds=_MINUTE)
        (entry,) = await world.history()
        assert entry["result"] == "Succeeded"
        assert entry["startTimestamp"] == job["metadata"]["creationTimestamp"]
        await asyncio.sleep(18)
        assert len(await world.jobs()) == 1


async def test_a_job_that_the_server_does_not_see_does_not_block_it(world: _World) -> None:
    """Its pod never ran: the server starts its own."""
    await world.prepare()
    async with world.leading():
        ours = await _first_job(world)
    async with world.serving():
        async with asyncio.timeout(_MINUTE):
            while len(await world.jobs()) == 1:
                await asyncio.sleep(0.2)
    (theirs,) = [job for job in await world.jobs() if job["metadata"]["uid"] != ours["metadata"]["uid"]]
    assert theirs["metadata"]["labels"] == {_LABEL: world.name}
    assert theirs["spec"]["template"]["spec"]["containers"][0]["command"] == ["/velero"]
