"""What each of ten thousand waiting loads costs the dispatcher, measured on fewer of them."""

import asyncio
import gc
import tracemalloc

import pytest

from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, agent_pod, open_scene
from tests.support.fakekube import FakeKube

__all__: list[str] = []

LOADS = 200
MOST_BYTES_A_LOAD = 2048
WAITS = Admission(
    AdmissionState.PENDING,
    "SnapshotNotReady",
    "VolumeSnapshot team-1/velero-data-x7k2p is not ready yet",
    indefinite=True,
)


class Forgetful(FakeKube):
    """Keeps no notes of what it was asked, which would count as the dispatcher's memory."""

    async def request(self, request: Request) -> Response:
        try:
            return await super().request(request)
        finally:
            self.requests.clear()


def weigh() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def settle(scene: Scene, loads: int) -> None:
    """Return once every load but the first was told why it waits, and nothing changes any more."""
    store = scene.kube._store
    async with asyncio.timeout(500):
        while sum(bool(load["status"].get("message")) for load in store.all(DATA_UPLOADS)) < loads:
            await asyncio.sleep(1)
    await asyncio.sleep(10)


async def weigh_dispatcher(scene: Scene, loads: int) -> int:
    """Return the bytes that are free again once the dispatcher of so many waiting loads is gone."""
    async with scene.dispatching():
        await settle(scene, loads)
        with_it = weigh()
    # Timers that were canceled hold on to what they were for until they are due.
    await asyncio.sleep(1000)
    return with_it - weigh()


@pytest.mark.looptime
@pytest.mark.parametrize("what", ["queue", "snapshot"])
async def test_a_waiting_load_takes_two_kibibytes_at_most(what: str) -> None:
    scene = open_scene("node-a", limit=1)
    scene.kube = Forgetful()
    scene.kube.put(agent_pod("node-a"))
    scene.add("first")
    names = [f"nightly-backup-20261121-{number:05}" for number in range(LOADS)]
    if what == "snapshot":
        scene.kind.answers.update(dict.fromkeys(names, WAITS))
    tracemalloc.start()
    try:
        await weigh_dispatcher(scene, 0)
        alone = await weigh_dispatcher(scene, 0)
        for number, name in enumerate(names):
            scene.add(name, queue=f"team-{number % 7}", uid=f"8cd3b3a4-4f4e-4b7a-9c4a-{number:012}")
        full = await weigh_dispatcher(scene, LOADS)
    finally:
        tracemalloc.stop()
    a_load = (full - alone) / LOADS
    assert 500 < a_load <= MOST_BYTES_A_LOAD
