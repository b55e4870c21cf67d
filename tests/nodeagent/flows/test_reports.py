"""What is reported of pending transfers and what they do not delay; the requests of a healthy one (docs/scaling.md)."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import pytest

from core.kube.resources import PODS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import Fuse, accepted, open_world
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES, Mover
from tests.nodeagent.support.transfers import NAMESPACE, TRANSFERS, data_upload

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_request_that_is_never_answered_delays_its_own_transfer_only(kind: str, method: str) -> None:
    silent, quick = accepted(TRANSFERS[kind]("silent")), accepted(data_upload("quick"))
    async with open_world(silent, quick, mover=Mover(seconds=1)) as world:
        gate = Gate(world.kube, lambda one: one.method == method and "silent" in one.path + (one.body or b"").decode())
        async with world.agent(gate, slots=2):
            await world.until(lambda: gate.waiting > 0, seconds=60)
            await world.until(lambda: world.done(name="quick"), seconds=60)
            await asyncio.sleep(30)
            assert not world.done(kind, name="silent")
    assert world.phase(name="quick") == "Completed"


@dataclass
class Tally(Fuse):
    """Counts the requests of an agent, and the rejected ones."""

    requests: list[Request] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    async def request(self, request: Request) -> Response:
        self.requests.append(request)
        response = await super().request(request)
        self.statuses.append(response.status)
        return response

    def count(self) -> dict[str, int]:
        """Return the number of requests: reads in one sum, writes by verb and resource, progress apart."""
        return dict(Counter(map(what, self.requests)))


def what(request: Request) -> str:
    if request.method == "GET":
        return "reads"
    body: JsonDict = json.loads(request.body or b"{}")
    if request.method == "PATCH" and set(body.get("status", {})) == {"progress"}:
        return "progress"
    plural = request.path.split("/")[-1 if request.method == "POST" else -2]
    return f"{request.method} {plural}"


ON_THE_TRANSFER = 5
"""Prepared, InProgress, the outcome, the final status and the release; the dispatcher's accept is not included."""

EVENTS = 3
"""Prepared, Started, Completed; Accepted is the dispatcher's."""

WRITES = {
    "DataUpload": {
        "POST volumesnapshotcontents": 1,
        "POST volumesnapshots": 1,
        "POST persistentvolumeclaims": 1,
        "POST pods": 1,
        # The source's is set to Retain; ours names the volume that must be deleted before it.
        "PATCH volumesnapshotcontents": 2,
        "DELETE volumesnapshots": 2,
        "DELETE volumesnapshotcontents": 2,
        "DELETE persistentvolumeclaims": 1,
        "DELETE pods": 1,
    },
    "DataDownload": {
        "POST persistentvolumeclaims": 1,
        "POST pods": 1,
        # Retain, the claimRef, and the original policy.
        "PATCH persistentvolumes": 3,
        "PATCH persistentvolumeclaims": 1,
        "DELETE persistentvolumeclaims": 1,
        "DELETE pods": 1,
    },
    "PodVolumeBackup": {"POST pods": 1, "DELETE pods": 1},
    "PodVolumeRestore": {"POST pods": 1, "DELETE pods": 1},
}
MOST_READS = {"DataUpload": 50, "DataDownload": 29, "PodVolumeBackup": 17, "PodVolumeRestore": 17}


@pytest.mark.parametrize("seconds", [3, 240])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_healthy_transfer_costs_a_fixed_number_of_requests_however_long_it_takes(
    kind: str, seconds: int
) -> None:
    async with open_world(accepted(TRANSFERS[kind]()), mover=Mover(seconds=seconds)) as world:
        tally = Tally(world.kube)
        async with world.agent(tally):
            await world.until(lambda: world.done(kind), seconds=300)
    spent = tally.count()
    assert spent.pop("reads") <= MOST_READS[kind]
    # As many as the mover reported.
    assert spent.pop("progress") == 1
    assert spent == WRITES[kind] | {f"PATCH {TRANSFER_RESOURCES[kind].plural}": ON_THE_TRANSFER, "POST events": EVENTS}
    assert not {409, 422} & set(tally.statuses)


@pytest.mark.parametrize(("kind", "reads"), [("DataUpload", 0), ("PodVolumeBackup", 5)])
async def test_a_transfer_pending_for_a_slot_is_not_read_at_each_change_of_its_pod(kind: str, reads: int) -> None:
    transfer = accepted(TRANSFERS[kind]())
    name = transfer["metadata"]["name"]
    async with open_world(transfer) as world:
        tally = Tally(world.kube)
        async with world.agent(tally, slots=0) as agent:
            await world.until(lambda: world.phase(kind) == "Prepared")
            assert "free slot" in world.transfer(kind)["status"]["message"]
            tally.requests.clear()
            for number in range(20):
                change = {"metadata": {"annotations": {"changed": str(number)}}}
                await world.cluster.client.patch(PODS, NAMESPACE, name, change)
                await asyncio.sleep(2)
            # The volume of a workload pod may disappear: only that is checked.
            assert tally.count() == ({"reads": reads} if reads else {})
            agent.set_slots(1)
            await world.until(lambda: world.done(kind))
        assert world.phase(kind) == "Completed"
