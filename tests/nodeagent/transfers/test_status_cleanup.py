"""A blocked cleanup is reported and retried, and blocks no other transfer."""

import asyncio

import pytest

from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS
from core.models.base import JsonDict
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, data_download, data_upload

pytestmark = pytest.mark.looptime

TRANSFERS = {"DataUpload": data_upload, "DataDownload": data_download}
FOREIGN = "example.com/keep"


async def hold_claim(world: World, name: str, *, finalizers: list[str]) -> None:
    patch: JsonDict = {"metadata": {"finalizers": finalizers}}
    await world.cluster.client.patch(PERSISTENT_VOLUME_CLAIMS, NAMESPACE, name, patch)


def reported(world: World, reason: str = "CleanupBlocked") -> list[str]:
    return [event["message"] for event in world.kube.objects(EVENTS) if event["reason"] == reason]


@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.cause("cleanup-blocked")
async def test_a_blocked_cleanup_is_reported_once_and_continues_when_it_can(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    name = transfer["metadata"]["name"]
    async with (
        open_world(transfer, mover=Mover(exit_code=11, message="no space left")) as world,
        world.agent() as agent,
    ):
        await world.until(lambda: world.phase(kind) == "InProgress")
        await hold_claim(world, name, finalizers=[FOREIGN])
        await world.until(lambda: world.phase(kind) == "Failed")
        status = world.transfer(kind)["status"]
        world.cluster.tick_seconds = 5.0
        await asyncio.sleep(580)
        assert reported(world) == []
        await world.until(lambda: reported(world) != [], seconds=100, every=1)
        await asyncio.sleep(1800)
        claim = f"PersistentVolumeClaim velero/{name} is being deleted (finalizers: {FOREIGN})"
        assert reported(world) == [f"not cleaned up within 10m0s, will retry: {claim}"]
        assert [entry["pendingMessage"] for entry in agent.report()["transfers"]] == [claim]
        assert world.transfer(kind)["status"] == status
        await hold_claim(world, name, finalizers=[])
        await world.until(lambda: world.done(kind), seconds=100, every=1)


async def test_a_blocked_cleanup_does_not_block_other_transfers() -> None:
    blocked, others = accepted(data_upload("blocked")), [accepted(data_upload(f"du-{n}")) for n in range(3)]
    for transfer in (blocked, *others):
        source = {"volumeSnapshot": f"vs-{transfer['metadata']['name']}"}
        transfer["spec"] = transfer["spec"] | {"csiSnapshot": transfer["spec"]["csiSnapshot"] | source}
    async with open_world(blocked, *others, mover=Mover(seconds=1)) as world, world.agent(slots=1):
        await world.until(
            lambda: any(c["metadata"]["name"] == "blocked" for c in world.kube.objects(PERSISTENT_VOLUME_CLAIMS))
        )
        await hold_claim(world, "blocked", finalizers=[FOREIGN])
        await world.until(lambda: all(world.done(name=f"du-{n}") for n in range(3)), seconds=60)
        await world.until(lambda: world.phase(name="blocked") == "Completed", seconds=60)
        assert not world.done(name="blocked")


async def test_a_snapshot_of_a_group_that_is_not_deleted_within_the_operation_timeout_is_left_and_reported() -> None:
    transfer = accepted(data_upload())
    name = transfer["metadata"]["name"]
    async with open_world(transfer, mover=Mover(seconds=5)) as world:
        client = world.cluster.client
        in_group: JsonDict = {"status": {"volumeGroupSnapshotHandle": "group-1"}}
        await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", f"content-{name}", in_group)
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            held: JsonDict = {"metadata": {"finalizers": [FOREIGN]}}
            await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", name, held)
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: reported(world, "SnapshotInGroup") != [], seconds=800, every=10)
            await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", name, {"metadata": {"finalizers": []}})
            await world.until(world.done, seconds=100, every=1)
        (message,) = reported(world, "SnapshotInGroup")
        assert " is of the group group-1, whose snapshots driver " in message
        assert message.endswith(" stays on the storage")
