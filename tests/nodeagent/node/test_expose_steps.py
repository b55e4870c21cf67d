"""What an expose checks before each create: that the transfer still is this agent's, and has not ended."""

from collections.abc import Callable
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, PODS
from exposer.model import Guard, NotOwnerError
from nodeagent.node.expose_steps import build_guard
from nodeagent.node.lifecycle import Observation, Site, Timeouts, build_case
from nodeagent.transfers.kinds.base import Kind
from tests.nodeagent.support.harness import World, accepted, build_agent, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

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
