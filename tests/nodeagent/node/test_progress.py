"""What a running mover waits for stands in its load's message, for as long as it does."""

import asyncio
import json

import pytest

from core.contract import ProgressMessage
from core.models.base import JsonDict
from nodeagent.node.progress import MoverWait
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import LOADS, data_upload

pytestmark = pytest.mark.looptime

UNMADE = "waiting for BackupRepository velero/app-default-kopia: its controller has not made it ready yet"
STUCK = "waiting for BackupRepository velero/app-default-kopia: no node takes its pod"


def event(load: JsonDict, reason: str, message: str, *, number: int = 1) -> JsonDict:
    """Return an Event of the load's mover, the one of that number."""
    meta = load["metadata"]
    at = f"2026-11-21T12:00:{number:02}Z"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": meta["namespace"], "name": f"{meta['name']}.{number:03}"},
        "involvedObject": {"kind": load["kind"], "name": meta["name"], "uid": meta["uid"]},
        "reason": f"Data-Path-{reason}",
        "message": message,
        "lastTimestamp": at,
    }


def message_of(world: World, kind: str) -> str | None:
    message = world.load(kind)["status"].get("message")
    return None if message is None else str(message)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.cause("repository-not-made")
async def test_a_wait_of_the_mover_is_the_loads_message_until_it_is_over(kind: str) -> None:
    load = accepted(LOADS[kind]())
    async with open_world(load, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase(kind) == "InProgress")
        for number, text in enumerate((UNMADE, STUCK, UNMADE), start=1):
            world.kube.put(event(load, "Waiting", text, number=number))
            await asyncio.sleep(2)
            assert message_of(world, kind) == text
        world.kube.put(event(load, "Progress", "{}", number=4))
        await asyncio.sleep(2)
        assert message_of(world, kind) == UNMADE
        world.kube.put(event(load, "Ready", "it is there", number=5))
        await world.until(lambda: message_of(world, kind) is None, seconds=2)
        world.cluster.mover.stubborn = False
        await world.until(lambda: world.done(kind))
    assert (world.phase(kind), message_of(world, kind)) == ("Completed", None)


async def test_data_that_moves_ends_a_wait_too() -> None:
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        world.kube.put(event(load, "Waiting", UNMADE))
        await world.until(lambda: message_of(world, "DataUpload") == UNMADE, seconds=2)
        moved = json.dumps({"totalBytes": 10, "doneBytes": 5})
        world.kube.put(event(load, "Progress", moved, number=2))
        await world.until(lambda: message_of(world, "DataUpload") is None, seconds=2)
        assert world.load()["status"]["progress"] == {"totalBytes": 10, "bytesDone": 5}


async def test_an_agent_that_starts_anew_neither_tells_a_wait_that_is_over_nor_leaves_its_message() -> None:
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(stubborn=True)) as world:
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(load, "Waiting", UNMADE))
            await world.until(lambda: message_of(world, "DataUpload") == UNMADE, seconds=2)
        world.kube.put(event(load, "Ready", "it is there", number=2))
        async with world.agent():
            await world.until(lambda: message_of(world, "DataUpload") is None, seconds=5)
        tally = Fuse(world.kube, lambda request: request.method == "PATCH")
        async with world.agent(tally):
            await asyncio.sleep(10)
        assert tally.counted == []


async def test_a_wait_that_could_not_be_written_is_written_later() -> None:
    """No other Event may follow for a long time."""
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(stubborn=True)) as world:
        fuse = Fuse(world.kube, lambda request: b"waiting for Backup" in (request.body or b""), at=0)
        fuse.fault = Fault.CONFLICT
        async with world.agent(fuse):
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(load, "Waiting", UNMADE))
            await world.until(lambda: message_of(world, "DataUpload") == UNMADE, seconds=5)
    assert len(fuse.counted) == 2


async def test_a_wait_does_not_get_into_the_way_of_the_end() -> None:
    """What is being written while the mover ends is finished first, and nothing follows it."""
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(stubborn=True)) as world:
        gate = Gate(world.kube, lambda request: b"waiting for Backup" in (request.body or b""))
        async with world.agent(gate):
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(load, "Waiting", UNMADE))
            await world.until(lambda: gate.waiting == 1)
            world.cluster.mover = Mover(seconds=0, exit_code=12, message="BackupRepository x is not ready: no bucket")
            await asyncio.sleep(5)
            assert world.phase() == "InProgress"
            gate.open.set()
            await world.until(world.done)
    assert message_of(world, "DataUpload") == "BackupRepository x is not ready: no bucket"


@pytest.mark.parametrize(
    ("shown", "events", "written"),
    [
        pytest.param("", [("Waiting", "a")], "a", id="news"),
        pytest.param("a", [("Waiting", "a")], None, id="told already"),
        pytest.param("a", [("Waiting", "a"), ("Waiting", "b")], "b", id="another cause"),
        pytest.param("a", [("Waiting", "a"), ("Ready", "")], "", id="over"),
        pytest.param("", [("Waiting", "a"), ("Ready", "")], None, id="over before it was told"),
        pytest.param("of somebody else", [("Waiting", "a"), ("Ready", "")], None, id="not ours to take back"),
        pytest.param("of somebody else", [("Warning", "a")], None, id="about no wait"),
    ],
)
async def test_the_message_follows_the_events(shown: str, events: list[tuple[str, str]], written: str | None) -> None:
    wait = MoverWait()
    for number, (reason, text) in enumerate(events):
        wait.take(event(data_upload(), reason, text, number=number))
    assert wait.correct(shown) == written


async def test_an_event_that_comes_late_changes_nothing() -> None:
    wait = MoverWait()
    wait.take(event(data_upload(), "Ready", "", number=2))
    wait.take(event(data_upload(), "Waiting", "a", number=1))
    wait.take_progress(ProgressMessage())
    assert wait.correct("") is None
