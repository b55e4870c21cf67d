"""Probes of locations: one for all transfers that wait, with and without a Velero server."""

import asyncio
import json

import pytest

from nodeagent.leader.repositories.locations import LocationProbes, Verdict
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.location_scene import NAME, LocationScene
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import LoopClock
from tests.support.tasks import until

pytestmark = pytest.mark.looptime

SILENT = Verdict("the storage does not answer")
WITH_SERVER = pytest.mark.parametrize(
    "mode", [RepositoryControllerMode.AUTO, RepositoryControllerMode.OFF], ids=["server", "off"]
)


async def ask(scene: LocationScene, *, seconds: float, transfers: int = 1) -> bool:
    """Return the last answer, asking as passes for so many transfers do."""
    answers = False
    for _ in range(int(seconds)):
        for _ in range(transfers):
            answers = scene.probes.answers(NAME)
        await asyncio.sleep(1)
    return answers


def server_scene(mode: RepositoryControllerMode, verdict: Verdict | None = None) -> LocationScene:
    """Return a scene in which the controller writes no status."""
    scene = LocationScene(verdict, mode=mode)
    if mode is RepositoryControllerMode.AUTO:
        scene.kube.put(SERVER)
    return scene


async def until_answer(scene: LocationScene, *, seconds: float) -> None:
    await until(lambda: scene.probes.answers(NAME), seconds=seconds, every=1)


@WITH_SERVER
async def test_transfers_share_a_probe_each_half_minute_that_writes_nothing(mode: RepositoryControllerMode) -> None:
    async with server_scene(mode, SILENT).running() as scene:
        await asyncio.sleep(10)
        assert not await ask(scene, seconds=100, transfers=50)
        assert len(scene.validated_at) == 4
        scene.verdict = Verdict()
        await until_answer(scene, seconds=40)
        assert len(scene.validated_at) == 5
        await asyncio.sleep(200)
    # No caller waits any more.
    assert len(scene.validated_at) == 5
    assert (scene.status, scene.metric) == ({}, None)


async def test_without_a_server_a_probe_is_a_validation_like_others() -> None:
    scene = LocationScene()
    scene.put_location(validationFrequency="1h")
    async with scene.running():
        await asyncio.sleep(100)
        scene.verdict = SILENT
        assert not await ask(scene, seconds=5)
        assert scene.status["phase"] == "Unavailable"
        scene.verdict = Verdict()
        await until_answer(scene, seconds=40)
        assert scene.status["phase"] == "Available"
    assert len(scene.validated_at) == 3


@WITH_SERVER
async def test_a_pod_probes_what_the_agent_cannot_and_is_deleted(mode: RepositoryControllerMode) -> None:
    async with server_scene(mode).running() as scene:
        assert not scene.probes.answers(NAME)
        await scene.until_pod(seconds=8)
        scene.end_pod(12, "no answer within 60 s")
        assert not await ask(scene, seconds=20)
        assert scene.pod is None
        await asyncio.sleep(20)
        assert not scene.probes.answers(NAME)
        await scene.until_pod(seconds=8)
        scene.end_pod(0, json.dumps({"needsPod": False}))
        await until_answer(scene, seconds=8)
    assert scene.status == {}


@pytest.mark.parametrize("fault", ["rejected", "never starts"])
async def test_a_probe_that_cannot_be_carried_out_delays_no_transfer(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = server_scene(RepositoryControllerMode.AUTO)
    if fault == "rejected":
        scene.kube.fail_next("POST", "/pods", 403)
    async with scene.running():
        if fault == "never starts":
            scene.probes.answers(NAME)
            await scene.until_pod(seconds=8)
            scene.block_pod()
            await asyncio.sleep(60)
            assert not scene.probes.answers(NAME)
        await until_answer(scene, seconds=60)
    assert f"BackupStorageLocation {NAME} cannot be probed, transfers do not wait: " in caplog.text


@pytest.mark.parametrize("cause", ["it does not exist", "spec"])
async def test_a_location_gone_or_invalid_delays_no_transfer(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    async with server_scene(RepositoryControllerMode.OFF, SILENT).running() as scene:
        assert not await ask(scene, seconds=50)
        if cause == "spec":
            scene.put_location(accessMode=["ReadOnly"])
        else:
            await scene.delete_location()
        await until_answer(scene, seconds=40)
    (line,) = [one for one in caplog.messages if "transfers do not wait" in one]
    assert cause in line.partition("transfers do not wait: ")[2]


async def test_an_answer_is_announced_and_a_new_term_probes_what_is_still_wanted() -> None:
    probes, requested, answered = LocationProbes(LoopClock()), list[str](), list[bool]()
    probes.on_answer = lambda: answered.append(probes.answers("s3"))
    assert not probes.answers("s3")
    probes.serve(requested.append)
    assert requested == ["s3"]
    probes.end("s3", Verdict())
    assert answered == [True]
    # A validation without a request is none of its business.
    probes.end("s3", SILENT)
    assert probes.answers("s3")
    await asyncio.sleep(20)
    assert probes.answers("s3")
    await asyncio.sleep(11)
    # The last answer counts until the next one.
    assert probes.answers("s3")
    assert requested == ["s3", "s3"]
    probes.end("s3", SILENT)
    assert not probes.answers("s3")


async def test_an_old_answer_does_not_count() -> None:
    probes = LocationProbes(LoopClock())
    probes.answers("s3")
    probes.end("s3", Verdict())
    for _ in range(5):
        await asyncio.sleep(20)
        assert probes.answers("s3")
    await asyncio.sleep(20)
    assert not probes.answers("s3")
    # Nor does the one of an earlier outage.
    probes.end("s3", Verdict())
    assert probes.answers("s3")
    await asyncio.sleep(60)
    assert not probes.answers("s3")
