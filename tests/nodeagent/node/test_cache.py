"""An agent acts on what it saw last: what it has not seen yet must not lead it astray."""

import asyncio

import pytest

from core.kube.resources import DATA_UPLOADS, PODS
from core.models.base import JsonDict
from core.models.names import NODE_LABEL
from core.models.transfers import DataUpload
from nodeagent.node.cache import TransferCache
from nodeagent.node.reconciler import Reconciler
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.transfers import NAMESPACE, data_upload

__all__: list[str] = []

pytestmark = pytest.mark.looptime

KEY = ("DataUpload", NAMESPACE, "du-1")


def caches_of(agent: Reconciler) -> TransferCache:
    return agent._cache


async def change(world: World, patch: JsonDict) -> JsonDict:
    return await world.cluster.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", patch)


async def test_a_cancel_that_no_watch_has_shown_keeps_a_load_from_starting() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0) as agent:
        await world.until(lambda: world.phase() == "Prepared")
        await asyncio.sleep(1)
        world.kube.watches.silent = True
        await change(world, {"spec": {"cancel": True}})
        agent._tools.slots.set_limit(1)
        agent.slots_changed()
        await world.until(lambda: world.phase() == "Canceled", seconds=5)
        assert "Started" not in world.reasons()


@pytest.mark.parametrize(
    "patch",
    [
        {"status": {"phase": "Failed", "message": "its agent was away"}},
        {"metadata": {"labels": {NODE_LABEL: "node-b"}}},
    ],
    ids=["ended", "handed on"],
)
async def test_what_was_made_for_a_load_in_other_hands_is_seen_though_no_watch_shows_it(patch: JsonDict) -> None:
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


async def test_a_load_is_current_unless_something_that_we_wrote_is_missing() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0) as agent:
        await world.until(lambda: world.phase() == "Prepared")
        await asyncio.sleep(1)
        caches = caches_of(agent)
        assert caches.current(KEY) == world.load()
        world.kube.watches.silent = True
        seen = world.load()
        by_others = await change(world, {"metadata": {"labels": {"a": "1"}}})
        assert caches.current(KEY) == seen
        caches.observe_written(DataUpload.parse(by_others))
        assert caches.current(KEY) is None
        world.kube.watches.silent = False
        world.kube.watches.wake()
        await world.until(lambda: caches.current(KEY) == by_others, seconds=1)
        later = await change(world, {"metadata": {"labels": {"a": "2"}}})
        await asyncio.sleep(1)
        # The answer to a write may come after what others wrote next was seen.
        caches.observe_written(DataUpload.parse(by_others))
        assert caches.current(KEY) == later


async def test_nothing_is_remembered_of_a_load_that_went_away() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent() as agent:
        await world.until(world.done)
        await asyncio.sleep(1)
        caches = caches_of(agent)
        assert caches.current(KEY) is None
        caches.observe_written(DataUpload.parse(world.load()))
        assert caches._written == {}
