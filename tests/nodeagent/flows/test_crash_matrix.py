"""Whichever request fails, and however, a transfer ends in the same way.

The requests of a run without faults are counted; then the agent is stopped and started again at each
of them in turn, or the request fails. The matrix is built from that count.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from core.kube.transport import Request
from core.models.base import JsonDict
from core.models.phases import RetryRules
from tests.nodeagent.support.harness import NO_RETRIES, Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS
from tests.support.versions import built

pytestmark = pytest.mark.looptime

LEAST_REQUESTS = 8
THOROUGH = pytest.mark.thorough
STOPS_SAMPLED = [pytest.param(Fault.STOP_BEFORE, marks=THOROUGH), Fault.STOP_AFTER]
FAULTS = [f if f in {Fault.STOP_AFTER, Fault.SERVER_ERROR} else pytest.param(f, marks=THOROUGH) for f in Fault]
READ_FAULTS = [*STOPS_SAMPLED, *(pytest.param(fault, marks=THOROUGH) for fault in (Fault.SERVER_ERROR, Fault.LOST))]
"""A read has no conflicts, and one whose answer is lost equals one that is lost."""
STEP_SECONDS = 0.25

CHANGES = {
    "DataUpload": ([], ["VolumeSnapshot {source}", "VolumeSnapshotContent /content-du-1"]),
    "DataDownload": (["PersistentVolume /pvc-*"], []),
    "PodVolumeBackup": ([], []),
    "PodVolumeRestore": ([], []),
}
"""The objects that a Completed transfer leaves behind, and those that it deletes: a DataUpload deletes its snapshot."""


@dataclass(frozen=True)
class Scenario:
    """What happens to a transfer, and its final phase; `in_place`: a DataDownload restores into an existing volume.

    `by_block`: a DataUpload prefers the device of a volume with a file system, and a DataDownload needs it. `refused`:
    the storage has none.
    """

    end: str
    mover: Mover
    canceled: bool = False
    retries: RetryRules = NO_RETRIES
    in_place: bool = False
    by_block: bool = False
    refused: bool = False

    def build(self, kind: str) -> JsonDict:
        transfer: JsonDict = TRANSFERS[kind]()
        if self.in_place:
            transfer["spec"] |= built("datadownload")["spec"]
        if self.by_block:
            transfer["spec"]["datamover"] = "velero-block"
            transfer["metadata"].setdefault("annotations", {})["nodeagent.io/block-preferred"] = "true"
        return transfer


GOOD = Scenario("Completed", Mover(seconds=0.5))
BROKEN = Scenario("Failed", Mover(seconds=0.5, exit_code=11, message="no space left"))
LOST = Scenario("Completed", Mover(seconds=0.5, rejected="OutOfcpu", rejections=1))
INTERRUPTED = Scenario(
    "Completed", Mover(seconds=0.5, interrupted=1), retries=RetryRules(initial_backoff=timedelta(seconds=1))
)
CANCELED = Scenario("Canceled", Mover(seconds=1000), canceled=True)


def name_fault(fault: Fault) -> str:
    return fault.name.lower()


async def run_agents(kind: str, fuse: Fuse, world: World, retries: RetryRules) -> None:
    """Run agents until the transfer is done; a second one if the fuse has stopped the first."""
    host_pods = world.cluster.mover.host_pods or ""
    async with world.agent(fuse, retries=retries, host_pods=host_pods):
        await world.until(lambda: (fuse.blown.is_set() and fuse.fault.stops) or world.done(kind), every=STEP_SECONDS)
    async with world.agent(retries=retries, host_pods=host_pods):
        await world.until(lambda: world.done(kind), every=STEP_SECONDS)
        # The provisioner reclaims the volume a little later.
        await asyncio.sleep(1)


async def cancel_in_progress(kind: str, world: World) -> None:
    await world.until(lambda: world.phase(kind) == "InProgress", every=STEP_SECONDS)
    await world.stop(world.transfer(kind), "cancel")


async def play(kind: str, scenario: Scenario, fuse: Fuse) -> JsonDict:
    """Return the results of a run with that fuse that must not differ from run to run."""
    async with open_world(accepted(scenario.build(kind)), mover=scenario.mover) as world:
        world.cluster.tick_seconds = STEP_SECONDS
        world.cluster.grants = scenario.retries.enabled
        world.cluster.refuses_devices = scenario.refused
        fuse.inner = world.kube
        before = world.everything()
        with suppress(TimeoutError):
            # A transfer that is not done in time differs from what is expected.
            async with AsyncExitStack() as stack:
                if scenario.canceled:
                    canceler = asyncio.create_task(cancel_in_progress(kind, world), name="canceler")
                    stack.push_async_callback(asyncio.wait, {canceler})
                await run_agents(kind, fuse, world, scenario.retries)
        return summary(kind, world) | changes(before, world.everything())


def changes(before: list[str], after: list[str]) -> JsonDict:
    created, deleted = Counter(after) - Counter(before), Counter(before) - Counter(after)
    return {"created": sorted(created.elements()), "deleted": sorted(deleted.elements())}


def summary(kind: str, world: World) -> JsonDict:
    transfer = world.transfer(kind)
    status = {key: value for key, value in transfer["status"].items() if not key.endswith("Timestamp")}
    # What it waited for differs, too.
    status["activities"] = [one for one in status.get("activities", []) if not one.startswith("waited ")]
    if status["phase"] != "Completed":
        # The last progress before a failure differs from run to run.
        status.pop("progress", None)
    found: JsonDict = {
        "status": status,
        "stamps": sorted(key for key in transfer["status"] if key.endswith("Timestamp")),
        "finalizers": transfer["metadata"].get("finalizers"),
        "datamover": transfer["spec"].get("datamover"),
    }
    moved = world.cluster.moved.get(transfer["metadata"]["uid"], "")
    if kind == "DataDownload":
        claim, volume = world.target()
        found["target"] = (claim["status"]["phase"], volume.get("spec", {}).get("persistentVolumeReclaimPolicy"))
        # Its name differs from run to run: the PVC must have the volume that the mover wrote.
        handle = (volume.get("spec", {}).get("csi") or {}).get("volumeHandle")
        found["data"] = moved.removesuffix("-block") in {volume.get("metadata", {}).get("name"), handle}
    elif status["phase"] == "Completed":
        found["data"] = moved
    return found


def expected_changes(kind: str) -> JsonDict:
    spec = TRANSFERS[kind]()["spec"]
    source = f"{spec.get('sourceNamespace')}/{spec.get('csiSnapshot', {}).get('volumeSnapshot')}"
    created, deleted = CHANGES[kind]
    return {"created": created, "deleted": [name.format(source=source) for name in deleted]}


async def check_matrix(kind: str, scenario: Scenario, fault: Fault, *, reads: bool = False) -> None:
    def counts(request: Request) -> bool:
        return (request.method == "GET") is reads

    calm = Fuse(counts=counts)
    expected = await play(kind, scenario, calm)
    assert expected["status"]["phase"] == scenario.end
    if scenario.end == "Completed":
        assert expected["data"]
    if scenario.in_place:
        assert expected["target"] == ("Bound", "Delete")
        assert (expected["created"], expected["deleted"]) == ([], [])
    elif scenario.end == "Completed":
        created = [name.removesuffix("-fs") for name in expected["created"]]
        assert {"created": created, "deleted": expected["deleted"]} == expected_changes(kind)
    else:
        assert expected["created"] == []
    assert len(calm.counted) >= LEAST_REQUESTS
    for at, request in enumerate(calm.counted):
        found = await play(kind, scenario, Fuse(counts=counts, at=at, fault=fault))
        assert found == expected, f"{fault.name} at {at}: {request}"


@pytest.mark.sample("*-stop_after", "DataDownload-server_error")
@pytest.mark.parametrize("fault", FAULTS, ids=name_fault)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_write_may_fail(kind: str, fault: Fault) -> None:
    await check_matrix(kind, GOOD, fault)


@pytest.mark.sample("DataDownload-*", "PodVolumeBackup-*")
@pytest.mark.parametrize("fault", READ_FAULTS, ids=name_fault)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_read_may_fail(kind: str, fault: Fault) -> None:
    await check_matrix(kind, GOOD, fault, reads=True)


@pytest.mark.sample(
    "DataUpload-broken-*",
    "PodVolumeRestore-broken-*",
    "DataUpload-canceled-*",
    "DataDownload-canceled-*",
    "PodVolumeBackup-first mover lost-*",
    "DataDownload-first attempt interrupted-*",
    "PodVolumeBackup-first attempt interrupted-*",
)
@pytest.mark.parametrize("fault", STOPS_SAMPLED, ids=name_fault)
@pytest.mark.parametrize(
    "scenario",
    [BROKEN, CANCELED, LOST, INTERRUPTED],
    ids=["broken", "canceled", "first mover lost", "first attempt interrupted"],
)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_the_agent_may_stop_at_every_write_of_a_failing_run(kind: str, scenario: Scenario, fault: Fault) -> None:
    await check_matrix(kind, scenario, fault)


@pytest.mark.sample("*files-stop_after", "good-by block-stop_after")
@pytest.mark.parametrize("fault", FAULTS, ids=name_fault)
@pytest.mark.parametrize("by_block", [False, True], ids=["files", "by block"])
@pytest.mark.parametrize(
    "scenario", [GOOD, BROKEN, CANCELED, INTERRUPTED], ids=["good", "broken", "canceled", "first attempt interrupted"]
)
async def test_an_existing_volume_always_returns_to_its_pvc(scenario: Scenario, by_block: bool, fault: Fault) -> None:
    await check_matrix("DataDownload", replace(scenario, in_place=True, by_block=by_block), fault)


@pytest.mark.sample("DataUpload-*", "PodVolumeRestore-*")
@pytest.mark.parametrize("fault", STOPS_SAMPLED, ids=name_fault)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_the_agent_may_stop_at_any_write_if_results_come_early(kind: str, fault: Fault, tmp_path: Path) -> None:
    """One that starts again may see the end of the pod first, or the result that its mover has left."""
    await check_matrix(kind, Scenario("Completed", Mover(seconds=0.5, host_pods=tmp_path)), fault)


@pytest.mark.sample("DataUpload-device refused-stop_after", "DataDownload-good-stop_after", "DataUpload-good-lost")
@pytest.mark.parametrize("fault", FAULTS, ids=name_fault)
@pytest.mark.parametrize(
    ("kind", "scenario"),
    [
        pytest.param("DataUpload", GOOD, id="DataUpload-good"),
        pytest.param("DataUpload", replace(GOOD, refused=True), id="DataUpload-device refused"),
        pytest.param("DataDownload", GOOD, id="DataDownload-good"),
        pytest.param("DataDownload", replace(GOOD, end="Failed", refused=True), id="DataDownload-device refused"),
    ],
)
async def test_every_write_of_a_transfer_by_block_may_fail(kind: str, scenario: Scenario, fault: Fault) -> None:
    await check_matrix(kind, replace(scenario, by_block=True), fault)
