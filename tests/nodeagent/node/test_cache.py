"""An agent acts on its cache: what that lacks must not cause a wrong step, nor a create for another's transfer."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, PODS
from core.models.names import NODE_LABEL
from core.models.transfers import DataUpload
from exposer.model import Guard, NotOwnerError
from nodeagent.node.expose_steps import build_guard
from nodeagent.node.lifecycle import Observation, Site, Timeouts, build_case
from nodeagent.transfers.kinds.base import Kind
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import World, accepted, build_agent, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

KEY = ("DataUpload", NAMESPACE, "du-1")


async def change(world: World, patch: JsonDict) -> JsonDict:
    return await world.cluster.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", patch)


async def test_a_cancel_request_that_no_watch_delivered_prevents_the_start() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0) as agent:
        await world.until(lambda: world.phase() == "Prepared")
        await asyncio.sleep(1)
        world.kube.watches.silent = True
        await change(world, {"spec": {"cancel": True}})
        agent.set_slots(1)
        await world.until(lambda: world.phase() == "Canceled", seconds=5)
        assert "Started" not in world.reasons()


@pytest.mark.parametrize(
    "patch",
    [
        {"status": {"phase": "Failed", "message": "its agent was unavailable"}},
        {"metadata": {"labels": {NODE_LABEL: "node-b"}}},
    ],
    ids=["final", "reassigned"],
)
async def test_an_expose_notices_a_change_of_its_transfer_that_no_watch_delivered(patch: JsonDict) -> None:
    async with open_world(accepted(data_upload())) as world:
        gate = Gate(world.kube, lambda request: request.method == "POST" and request.path.endswith("/pods"))
        async with world.agent(gate):
            await world.until(lambda: gate.waiting == 1)
            world.kube.watches.silent = True
            await change(world, patch)
            gate.open.set()
            await asyncio.sleep(2)
            ended = "status" in patch
            assert [pod["metadata"]["name"] for pod in world.kube.objects(PODS)] == ([] if ended else ["du-1"])


async def test_a_transfer_that_is_deleted_during_a_read_holds_no_slot() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        gate = Gate(world.kube, lambda one: one.method == "GET" and one.path.endswith("/du-1"), answers=True)
        gate.open.set()
        async with world.agent(gate) as agent:
            slots = agent._tools.slots
            await world.until(lambda: slots.used == 1 and world.phase() == "InProgress")
            gate.open.clear()
            step = asyncio.create_task(agent._step(KEY, reread=True), name="step")
            await world.until(lambda: gate.waiting > 0)
            await change(world, {"metadata": {"finalizers": None}})
            await world.cluster.client.delete(DATA_UPLOADS, NAMESPACE, "du-1")
            await world.until(lambda: agent._cache.raw(KEY) is None)
            gate.open.set()
            await step
            assert slots.used == 0


async def test_a_cached_transfer_is_current_unless_it_is_older_than_the_last_write() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0) as agent:
        await world.until(lambda: world.phase() == "Prepared")
        await asyncio.sleep(1)
        cache = agent._cache
        assert cache.current(KEY) == world.transfer()
        world.kube.watches.silent = True
        seen = world.transfer()
        by_others = await change(world, {"metadata": {"labels": {"a": "1"}}})
        assert cache.current(KEY) == seen
        cache.observe_written(DataUpload.parse(by_others))
        assert cache.current(KEY) is None
        world.kube.watches.silent = False
        world.kube.watches.wake()
        await world.until(lambda: cache.current(KEY) == by_others, seconds=1)
        later = await change(world, {"metadata": {"labels": {"a": "2"}}})
        await asyncio.sleep(1)
        # The answer to a write may come after a later version was observed.
        cache.observe_written(DataUpload.parse(by_others))
        assert cache.current(KEY) == later


async def test_a_deleted_transfer_is_forgotten() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent() as agent:
        await world.until(world.done)
        await asyncio.sleep(1)
        cache = agent._cache
        assert cache.current(KEY) is None
        cache.observe_written(DataUpload.parse(world.transfer()))
        assert cache._written == {}


_SITE = Site(NODE, NAMESPACE)


def upload_kind(world: World) -> Kind[Any]:
    return build_agent(world.kube)._kinds["DataUpload"]


def guard_of(world: World, transfer: JsonDict, *, cached: Callable[[], JsonDict | None]) -> Guard:
    """Return the guard of a transfer whose cached version is `cached`."""
    kind = upload_kind(world)
    seen = Observation(kind.parse(transfer), None, None)
    case = build_case(kind, seen, _SITE, Timeouts())
    return build_guard(world.kube.client, case, _SITE, current=cached)


def earlier(transfer: JsonDict, **status: str) -> JsonDict:
    return transfer | {"metadata": transfer["metadata"] | {"uid": "uid-of-an-earlier-one"}, "status": status}


@pytest.mark.parametrize("phase", ["Accepted", "Completed"])
async def test_an_earlier_transfer_in_the_cache_ends_no_expose(phase: str) -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world:
        await guard_of(world, transfer, cached=lambda: earlier(transfer, phase=phase))(sure=False)


@pytest.mark.parametrize("stored", ["deleted", "recreated", "final"])
async def test_the_end_is_known_from_the_api_server(stored: str) -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world:
        if stored == "final":
            world.kube.put(transfer | {"status": {"phase": "Canceled"}})
        else:
            await world.cluster.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", {"metadata": {"finalizers": None}})
            await world.cluster.client.delete(DATA_UPLOADS, NAMESPACE, "du-1")
        if stored == "recreated":
            world.kube.put(earlier(transfer, phase="New"))
        with pytest.raises(NotOwnerError) as caught:
            await guard_of(world, transfer, cached=lambda: None)(sure=False)
        assert caught.value.ended


async def test_an_earlier_transfer_in_the_cache_lets_nothing_be_deleted() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(starts=False)) as world:
        async with world.agent():
            await world.until(lambda: bool(world.kube.objects(PODS)))
        (pod,), claims = world.kube.objects(PODS), world.kube.objects(PERSISTENT_VOLUME_CLAIMS)
        await world.cluster.client.delete(PODS, NAMESPACE, pod["metadata"]["name"])
        await world.until(lambda: not world.kube.objects(PODS))
        guard = guard_of(world, transfer, cached=lambda: earlier(transfer, phase="Accepted"))
        kind = upload_kind(world)
        await kind.ensure_exposed(kind.parse(world.transfer()), guard)
        assert len(world.kube.objects(PODS)) == 1
        assert world.kube.objects(PERSISTENT_VOLUME_CLAIMS) == claims
