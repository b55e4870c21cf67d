"""Agents of this and of the previous version share the work on transfers, before a real kube-apiserver.

One of them is killed while data moves and the other version replaces it, as in an upgrade of
the DaemonSet, or in a rollback. `make crash-matrix-skew` runs this; PREVIOUS names the revision.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Protocol

import pytest

from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from tests.crash.controllers import set_status
from tests.crash.listing import Listing, list_everything
from tests.crash.matrix import CHANGES, LEDGER, compare, settle, summarize
from tests.crash.skew import Site, Version, open_bench, wait_for
from tests.crash.worlds import World
from tests.support.apiserver import ApiServer, run_apiserver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

_STEP_SECONDS = 600
_ALL_AT_ONCE = json.dumps({"loadConcurrency": {"globalConfig": 4}})
_ONE_AT_A_TIME = json.dumps({"loadConcurrency": {"globalConfig": 4, "prepareQueueLength": 1}})
_MOVERS_HAVE_ENDED = {"outcome-kept", "completed"}
_GOOD_PATH = [Phase.NEW, Phase.ACCEPTED, Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED]
_RESTORED: JsonDict = {"phase": "Completed", "progress": {"totalBytes": 1000, "bytesDone": 1000}, "path": ""}
_BACKED_UP = _RESTORED | {"path": "/*", "snapshotID": "kopia-1", "incrementalBytes": 600}
_RESULTS = {
    "DataUpload": _BACKED_UP | {"acceptedByNode": "node-a", "node": "node-a", "nodeOS": "linux"},
    "DataDownload": _RESTORED | {"acceptedByNode": "node-a", "node": "node-a"},
    "PodVolumeBackup": _BACKED_UP,
    "PodVolumeRestore": _RESTORED | {"node": "node-a"},
}


class _Play(Protocol):
    """What happens at a site until its transfers can complete; `leader` and `node` are the versions at the start."""

    async def __call__(self, site: Site, *, leader: Version, node: Version) -> None: ...


@pytest.fixture(scope="module")
def apiserver() -> Iterator[ApiServer]:
    """One kube-apiserver for all tests here: each site has namespaces of its own."""
    with run_apiserver() as server:
        yield server


async def _replace_node_agent(site: Site, stop: str, *, leader: Version, node: Version) -> None:
    """Replace the node's agent after its write `stop` to every transfer; a data mover that runs continues meanwhile."""
    moving = site.bench.cluster.not_ending
    if stop not in _MOVERS_HAVE_ENDED:
        moving.add(site.namespace)
    await site.start_leader(leader)
    agent = await site.start_node_agent(node, stop=stop)
    await agent.wait_stopped(len(site.worlds), seconds=_STEP_SECONDS)
    await agent.child.kill()
    successor = await site.start_node_agent(node.other)
    await successor.wait_ready()
    moving.discard(site.namespace)


async def _replace_node_agent_after_loss(site: Site, *, leader: Version, node: Version) -> None:
    """Replace the node's agent after it recorded that every mover pod was evicted before its start."""
    site.bench.cluster.not_starting.add(site.namespace)
    await site.start_leader(leader)
    agent = await site.start_node_agent(node, stop="mover-lost")
    await wait_for("all have a mover pod", lambda: _has_mover_pods(site), seconds=_STEP_SECONDS)
    for pod in await site.mover_pods():
        await set_status(site.bench.client, PODS, pod, {"phase": "Failed", "reason": "Evicted"})
    await agent.wait_stopped(len(site.worlds), seconds=_STEP_SECONDS)
    await agent.child.kill()
    successor = await site.start_node_agent(node.other)
    await successor.wait_ready()
    site.bench.cluster.not_starting.discard(site.namespace)


async def _has_mover_pods(site: Site) -> bool:
    return len(await site.mover_pods()) == len(site.worlds)


async def _replace_leader(site: Site, stop: str, *, leader: Version, node: Version) -> None:
    """Replace the leader after its write `stop`."""
    await site.start_node_agent(node)
    stopped = await site.start_leader(leader, stop=stop)
    await stopped.wait_stopped(1, seconds=_STEP_SECONDS)
    await stopped.child.kill()
    await site.start_leader(leader.other)


async def _replace_leader_of_queue(site: Site, *, leader: Version, node: Version) -> None:
    """Replace the leader after it reported all transfers but one as queued; the next one knows that they are."""
    site.bench.cluster.not_starting.add(site.namespace)
    await site.start_node_agent(node)
    old = await site.start_leader(leader)
    await wait_for("all but one are queued", lambda: _are_queued(site, len(site.worlds) - 1), seconds=_STEP_SECONDS)
    queued = [world for world in site.worlds if _is_queued(world)]
    await old.child.kill()
    before = {world.name: len(site.states(world)) for world in queued}
    await site.start_leader(leader.other)
    await site.add_transfer("DataUpload")
    # As that one is last, the new leader has checked the others by then.
    await wait_for("the last one is queued", lambda: _are_queued(site, len(queued) + 1), seconds=_STEP_SECONDS)
    for world in queued:
        states = [each.get("status") for each in site.states(world)[before[world.name] :]]
        assert len(states) <= 1, f"{world.kind} is reported more than once: {states}"
    site.bench.cluster.not_starting.discard(site.namespace)


async def _replace_both_while_agent_is_unavailable(site: Site, *, leader: Version, node: Version) -> None:
    """Replace leader and agent after the leader reported the agent as unavailable; the next leader withdraws that."""
    site.bench.cluster.not_ending.add(site.namespace)
    old = await site.start_leader(leader)
    agent = await site.start_node_agent(node)
    await _wait_all(site, "InProgress", lambda status: status.get("phase") == Phase.IN_PROGRESS)
    await agent.end()
    await site.set_agent_ready(ready=False)
    await _wait_all(site, "reported as without an agent", lambda status: bool(status.get("message")))
    await old.child.kill()
    await site.start_leader(leader.other)
    successor = await site.start_node_agent(node.other)
    await successor.wait_ready()
    await site.set_agent_ready(ready=True)
    await _wait_all(site, "no longer reported", lambda status: not status.get("message"))
    site.bench.cluster.not_ending.discard(site.namespace)


async def _replace_leader_after_interruptions(site: Site, *, leader: Version, node: Version) -> None:
    """Replace the leader once the next attempts of all transfers may begin, of which it knows nothing."""
    old = await site.start_leader(leader)
    await site.start_node_agent(node)
    await wait_for("all wait for the leader", lambda: _are_interrupted(site, "Ready"), seconds=_STEP_SECONDS)
    await old.child.kill()
    await site.start_leader(leader.other)


async def _are_interrupted(site: Site, stage: str) -> bool:
    await site.read()
    marks = [
        (world.transfer["metadata"].get("annotations") or {}).get(ATTEMPTS_ANNOTATION, "") for world in site.worlds
    ]
    return all(f'"stage":"{stage}"' in mark for mark in marks)


def _is_queued(world: World) -> bool:
    status = world.transfer.get("status") or {}
    return "prepareQueueLength" in status.get("message", "") and not status.get("phase")


async def _are_queued(site: Site, number: int) -> bool:
    await site.read()
    return sum(map(_is_queued, site.worlds)) == number


async def _wait_all(site: Site, what: str, holds: Callable[[JsonDict], bool]) -> None:
    async def do_all() -> bool:
        await site.read()
        return all(holds(world.transfer.get("status") or {}) for world in site.worlds)

    await wait_for(f"all transfers are {what}", do_all, seconds=_STEP_SECONDS)


async def _run_play(site: Site, play: _Play, leader: Version, node: Version) -> None:
    await site.prepare()
    try:
        await play(site, leader=leader, node=node)
        await wait_for("all transfers are done", site.are_done, seconds=_STEP_SECONDS)
        await site.end_agents()
        await _expect_all_completed(site)
    except Exception as error:
        error.add_note(f"leader {leader}, node agent {node}, namespace {site.namespace}, logs in {site.bench.folder}")
        raise
    finally:
        await site.kill_agents()


async def _expect_all_completed(site: Site) -> None:
    await settle(site.bench.client, site.worlds)
    after = await list_everything(site.bench.apiserver.api)
    assert compare(site.before[site.namespace], after[site.namespace], hide="*") == ([LEDGER], [])
    for world in site.worlds:
        await _expect_completed(site, world, after)


async def _expect_completed(site: Site, world: World, after: Listing) -> None:
    phases = [Phase((each.get("status") or {}).get("phase") or Phase.NEW) for each in site.states(world)]
    assert [phase for phase, _ in groupby(phases)] == _GOOD_PATH, f"{world.kind}: {world.transfer}"
    result = await summarize(world, site.bench.cluster)
    if result["status"]["path"] == "/uid":
        # An older one copies what its mover says.
        result["status"]["path"] = "/*"
    for field in ("sourceSize", "activities"):
        # An older one does not know them.
        result["status"].pop(field, None)
    assert result["status"] == _RESULTS[world.kind], world.kind
    assert result["data"], world.kind
    assert not world.transfer["metadata"].get("finalizers"), world.kind
    if site.last_node_agent.version is Version.CURRENT:
        # An older one leaves annotations that it does not know.
        marks = [*world.transfer["metadata"].get("annotations", {}), *world.transfer["metadata"].get("labels", {})]
        left = {mark for mark in marks if mark.startswith("nodeagent.io/")}
        assert left == ({ATTEMPTS_ANNOTATION} if site.bench.cluster.mover.interrupted else set()), world.kind
    assert compare(site.before[world.space], after[world.space], hide=world.name) == CHANGES[world.kind], world.kind


_PLAYS: dict[str, _Play] = {
    **{
        f"node agent replaced after {stop}": partial(_replace_node_agent, stop=stop)
        for stop in ("exposed", "prepared", "in-progress", "outcome-kept", "completed")
    },
    "node agent replaced after mover-lost": _replace_node_agent_after_loss,
    **{f"leader replaced after {stop}": partial(_replace_leader, stop=stop) for stop in ("reserved", "accepted")},
    "leader replaced with a queue": _replace_leader_of_queue,
    "leader and node agent replaced while the agent is unavailable": _replace_both_while_agent_is_unavailable,
}


@pytest.mark.parametrize("what", _PLAYS)
async def test_transfers_complete_with_agents_of_both_versions(apiserver: ApiServer, tmp_path: Path, what: str) -> None:
    """In each combination, at a site each."""
    config = _ONE_AT_A_TIME if what.endswith("queue") else _ALL_AT_ONCE
    async with open_bench(apiserver, tmp_path) as bench, asyncio.TaskGroup() as group:
        for leader, node in product(Version, Version):
            group.create_task(_run_play(Site(bench, config), _PLAYS[what], leader, node))


async def test_another_attempt_begins_once_a_leader_of_this_version_is_there(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    async with open_bench(apiserver, tmp_path, interrupted=1) as bench:
        site = Site(bench, _ALL_AT_ONCE)
        await _run_play(site, _replace_leader_after_interruptions, Version.PREVIOUS, Version.CURRENT)


async def test_an_agent_of_the_previous_version_fails_what_was_interrupted(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    async with open_bench(apiserver, tmp_path, interrupted=1) as bench:
        site = Site(bench, _ALL_AT_ONCE)
        await site.prepare()
        try:
            await site.start_leader(Version.CURRENT)
            agent = await site.start_node_agent(Version.CURRENT, stop="interrupted")
            await agent.wait_stopped(len(site.worlds), seconds=_STEP_SECONDS)
            await agent.child.kill()
            await site.start_node_agent(Version.PREVIOUS)
            await wait_for("all transfers are done", site.are_done, seconds=_STEP_SECONDS)
            await site.end_agents()
        finally:
            await site.kill_agents()
        await settle(bench.client, site.worlds)
        after = await list_everything(bench.apiserver.api)
        for world in site.worlds:
            status = world.transfer["status"]
            assert (status["phase"], bool(status["message"])) == ("Failed", True), world.kind
            assert not world.transfer["metadata"].get("finalizers"), world.kind
        assert compare(site.before[site.namespace], after[site.namespace], hide="*") == ([LEDGER], [])
