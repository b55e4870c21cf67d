"""An operation on the cluster that times out fails its transfer, and is named."""

from datetime import timedelta

import pytest

from core.errors import ContractError
from core.kube.resources import PODS, VOLUME_SNAPSHOTS
from core.models.base import JsonDict
from core.models.names import NOT_PREPARED_ANNOTATION, OWNER_UID_LABEL
from core.models.transfers import DataDownload, DataUpload
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.transfers import data_download, data_upload

pytestmark = pytest.mark.looptime

FOREIGN = "example.com/keep"


def with_timeout(transfer: JsonDict, timeout: str) -> JsonDict:
    transfer["spec"] = transfer["spec"] | {"operationTimeout": timeout}
    return transfer


def source_snapshot(world: World) -> JsonDict:
    return next(s for s in world.kube.objects(VOLUME_SNAPSHOTS) if s["metadata"]["namespace"] != "velero")


@pytest.mark.parametrize(
    ("timeout", "seconds", "shown"),
    [("2m0s", 120, "2m0s"), ("", 600, "10m0s"), ("0s", 600, "10m0s")],
    ids=["of the transfer", "of the agent", "zero counts as none"],
)
async def test_a_source_snapshot_that_is_not_deleted_in_time_fails_the_transfer(
    timeout: str, seconds: float, shown: str
) -> None:
    async with open_world(with_timeout(accepted(data_upload()), timeout)) as world:
        snapshot = source_snapshot(world)
        snapshot["metadata"]["finalizers"] = [FOREIGN]
        world.kube.put(snapshot)
        async with world.agent():
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: world.phase() == "Failed", seconds=seconds + 20, every=1)
    meta = snapshot["metadata"]
    name = f"VolumeSnapshot {meta['namespace']}/{meta['name']}"
    # Its cleanup is blocked too, so the mark for the leader is still there.
    assert world.transfer()["metadata"]["annotations"][NOT_PREPARED_ANNOTATION] == "OperationTimeout"
    assert world.transfer()["status"]["message"] == (
        f"timed out after {shown}: {name} is being deleted (finalizers: {FOREIGN})"
    )


@pytest.mark.cause("operation-too-long")
async def test_a_backup_snapshot_that_is_not_ready_in_time_fails_the_transfer() -> None:
    async with open_world(with_timeout(accepted(data_upload()), "90s")) as world:
        world.cluster.snapshots_become_ready = False
        async with world.agent():
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: world.phase() == "Failed", seconds=110, every=1)
    message = world.transfer()["status"]["message"]
    assert message == "timed out after 1m30s: VolumeSnapshot velero/du-1 is not ready yet"


async def test_a_handover_that_times_out_fails_the_transfer() -> None:
    async with open_world(with_timeout(accepted(data_download()), "90s")) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.cluster.binds = False
        await world.until(lambda: world.phase("DataDownload") == "Failed", seconds=110, every=1)
        message = world.transfer("DataDownload")["status"]["message"]
        assert message.startswith("data was moved, but not handed over within 1m30s: target PVC app3/data")


@pytest.mark.parametrize("build", [data_upload, data_download])
@pytest.mark.parametrize(
    ("timeout", "flag"), [("90s", "1m30s"), ("", "10m0s")], ids=["of the transfer", "of the agent"]
)
async def test_the_mover_gets_the_timeout_as_flag(build: object, timeout: str, flag: str) -> None:
    transfer = with_timeout(accepted(build()), timeout)  # type: ignore[operator] # one of the two factories
    async with open_world(transfer) as world, world.agent():
        await world.until(lambda: world.kube.objects(PODS) != [])
        (pod,) = world.kube.objects(PODS)
    assert pod["metadata"]["labels"][OWNER_UID_LABEL] == transfer["metadata"]["uid"]
    assert f"--resource-timeout={flag}" in pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(("timeout", "expected"), [("90s", timedelta(seconds=90)), ("0s", None), ("", None)])
def test_the_timeout_of_a_transfer_is_parsed(timeout: str, expected: timedelta | None) -> None:
    assert DataUpload.parse(with_timeout(data_upload(), timeout)).operation_timeout == expected
    assert DataDownload.parse(with_timeout(data_download(), timeout)).operation_timeout == expected


def test_an_invalid_timeout_names_its_field() -> None:
    with pytest.raises(ContractError, match="spec: operationTimeout: not a duration"):
        DataUpload.parse(with_timeout(data_upload(), "soon"))
