"""One watch of Events serves all running transfers of a node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from functools import partial

import pytest

from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS, EVENTS, PODS
from core.kube.retry import Retry
from core.models.base import JsonDict
from core.models.names import NODE_LABEL, OWNER_UID_LABEL
from nodeagent.node.lifecycle import Site
from nodeagent.node.progress import Followed, ProgressFollower
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.status import StatusWriter
from tests.nodeagent.node.test_progress import NOT_READY, event, message_of
from tests.nodeagent.support.harness import World, accepted, build_agent, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

__all__: list[str] = []

pytestmark = pytest.mark.looptime


def watches_of_events(kube: FakeKube) -> list[str]:
    """Return the selectors of all watches of Events, in order."""
    queries = [r.query for r in kube.requests if r.path.endswith("/events") and "watch" in r.query]
    return [query.get("labelSelector", "") + query.get("fieldSelector", "") for query in queries]


def unlabeled(transfer: JsonDict, message: str) -> JsonDict:
    """Return an Event of Velero's mover, which has no label."""
    found = event(transfer, "Progress", message)
    del found["metadata"]["labels"]
    return found


async def test_twenty_running_transfers_need_one_watch() -> None:
    kube, clock = FakeKube(), LoopClock()
    transfers = [data_upload(f"du-{n}", node=NODE, status={"phase": "InProgress"}) for n in range(20)]
    client, kind = KubeClient(kube, Retry(clock)), build_agent(kube)._kinds["DataUpload"]
    status = StatusWriter(client, clock)
    follower = ProgressFollower(client, clock, Site(NODE, NAMESPACE), status=status, metrics=Metrics(NODE))
    task = asyncio.create_task(follower.run(), name="progress")
    for transfer in transfers:
        cr = kind.parse(kube.put(transfer))
        follower.follow(cr, Followed(kind, partial(copy, cr)), labeled=True)
    await asyncio.sleep(1)
    for number, transfer in enumerate(transfers):
        kube.put(event(transfer, "Progress", f'{{"totalBytes":1000,"doneBytes":{number + 1}}}'))
    await asyncio.sleep(2)
    shown = {o["metadata"]["name"]: o["status"]["progress"]["bytesDone"] for o in kube.objects(DATA_UPLOADS)}
    assert shown == {f"du-{number}": number + 1 for number in range(20)}
    assert watches_of_events(kube) == [f"{NODE_LABEL}={NODE}"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_event_that_precedes_the_transfer_in_the_watches_counts() -> None:
    """It may be the only one for long: what the mover is pending for."""
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        world.kube.put(event(transfer, "Waiting", NOT_READY))
        async with world.agent():
            await world.until(lambda: message_of(world, "DataUpload") == NOT_READY, seconds=60)


async def test_a_mover_of_this_project_gets_no_watch_of_its_own() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        world.kube.put(event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":700}'))
        shown = {"totalBytes": 1000, "bytesDone": 700}
        await world.until(lambda: world.transfer()["status"].get("progress") == shown, seconds=5)
        assert watches_of_events(world.kube) == [f"{NODE_LABEL}={NODE}"]


async def test_a_mover_of_velero_gets_a_watch_of_its_own_while_it_runs() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        (pod,) = world.kube.objects(PODS)
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if key != OWNER_UID_LABEL}
        world.kube.put(pod | {"metadata": pod["metadata"] | {"labels": labels}})
        own = f"involvedObject.uid={transfer['metadata']['uid']}"
        await world.until(lambda: own in watches_of_events(world.kube), seconds=10)
        world.kube.put(unlabeled(transfer, '{"totalBytes":1000,"doneBytes":700}'))
        shown = {"totalBytes": 1000, "bytesDone": 700}
        await world.until(lambda: world.transfer()["status"].get("progress") == shown, seconds=5)
        world.cluster.mover.stubborn = False
        await world.until(world.done)
        await asyncio.sleep(1)
        assert len(world.kube.watches) == len({r.path for r in world.kube.requests if "watch" in r.query})


@asynccontextmanager
async def _finished_with_an_event() -> AsyncIterator[tuple[World, ProgressFollower]]:
    """Run an agent whose progress follower has read an Event of a finished transfer."""
    transfer = accepted(data_upload())
    async with open_world(transfer) as world, world.agent() as agent:
        await world.until(world.done)
        world.kube.put(event(transfer, "Progress", "{}", number=9))
        follower = agent._tools.progress
        await world.until(lambda: transfer["metadata"]["uid"] in follower._readings)
        yield world, follower


async def _delete_events(world: World) -> None:
    for found in world.kube.objects(EVENTS):
        await world.cluster.client.delete(EVENTS, "velero", found["metadata"]["name"])


async def test_the_events_of_a_finished_transfer_are_forgotten_when_they_expire() -> None:
    async with _finished_with_an_event() as (world, follower):
        await _delete_events(world)
        await world.until(lambda: follower._readings == {}, seconds=5)


async def test_the_events_of_a_finished_transfer_are_forgotten_when_a_list_lacks_them() -> None:
    async with _finished_with_an_event() as (world, follower):
        world.kube.watches.silent = True
        await _delete_events(world)
        world.kube.compact()
        world.kube.watches.cut()
        world.kube.watches.silent = False
        await world.until(lambda: follower._readings == {}, seconds=60)
