"""Leader election: who leads, how long after the last renewal, and that a paused leader harms nothing."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import LEASES
from core.kube.transport import Request, Retry, Transport
from nodeagent.leader.election import LeaderElection, NotLeaderError
from tests.nodeagent.support.dispatching import RESOURCES, Gate, Scene, ScriptedKind, most_held, open_scene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running, until
from tests.support.transports import Pause

pytestmark = pytest.mark.looptime


DAY = timedelta(hours=24)


@dataclass
class Candidate:
    """One candidate, and when it started and stopped to lead."""

    identity: str
    election: LeaderElection
    events: list[tuple[str, float]] = field(default_factory=list)

    async def lead(self) -> None:
        self.events.append(("began", asyncio.get_running_loop().time()))
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append(("ended", asyncio.get_running_loop().time()))

    @property
    def leads(self) -> bool:
        return bool(self.events) and self.events[-1][0] == "began"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Candidate"]:
        async with running(self.election.run(self.lead)):
            yield self


def candidate(transport: Transport, identity: str = "a", *, skew: timedelta = timedelta()) -> Candidate:
    clock = LoopClock(skew)
    client = KubeClient(transport, Retry(clock))
    election = LeaderElection(client, clock, namespace="velero", identity=identity, duration=timedelta(seconds=15))
    return Candidate(identity, election)


def lease(kube: FakeKube) -> JsonDict:
    return kube.objects(LEASES)[0]


async def until_one_leads(*candidates: Candidate, seconds: float = 60.0) -> Candidate:
    await until(lambda: any(one.leads for one in candidates), seconds=seconds)
    return next(one for one in candidates if one.leads)


async def test_the_first_candidate_creates_the_lease_and_keeps_it() -> None:
    kube = FakeKube()
    async with candidate(kube).running() as first:
        await until_one_leads(first)
        began = lease(kube)
        assert began["spec"]["holderIdentity"] == "a"
        assert began["spec"]["leaseDurationSeconds"] == 15
        assert began["spec"]["leaseTransitions"] == 0
        assert began["spec"]["acquireTime"].startswith("2026-11-21T12:00:0")
        assert len(began["spec"]["acquireTime"]) == len("2026-11-21T12:00:00.000000Z")
        await asyncio.sleep(300)
        assert first.leads
        assert first.election.may_write
        assert first.election.holder == "a"
    assert lease(kube)["spec"]["renewTime"] > began["spec"]["renewTime"]
    assert lease(kube)["spec"]["acquireTime"] == began["spec"]["acquireTime"]


@pytest.mark.parametrize("skew", [timedelta(), DAY, -DAY], ids=["right", "a day ahead", "a day behind"])
async def test_a_dead_leader_is_replaced_after_its_lease_duration(skew: timedelta) -> None:
    """Whatever the clock of the other candidate shows."""
    kube = FakeKube()
    gate = Gate(kube, lambda request: True)
    gate.open.set()
    first, second = candidate(gate, "a"), candidate(kube, "b", skew=skew)
    async with first.running():
        await until_one_leads(first)
        async with second.running():
            await asyncio.sleep(60)
            gate.open.clear()
            died_at = asyncio.get_running_loop().time()
            while not second.leads:
                # Only one process may write at a time.
                assert not (first.election.may_write and second.election.may_write)
                await asyncio.sleep(0.05)
            assert 10 <= second.events[0][1] - died_at <= 18
            assert first.events[-1][0] == "ended"
            assert first.events[-1][1] - died_at <= 11.1
            with pytest.raises(NotLeaderError):
                first.election.check()
            gate.open.set()


@dataclass
class DeafTransport(Gate):
    """A transport whose watches never yield anything once `deaf` is set, while its requests are answered."""

    deaf: bool = False

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self.inner.stream(request) as lines:
            yield self._unless_deaf(lines)

    async def _unless_deaf(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if self.deaf:
                await asyncio.Event().wait()
            yield line


async def test_a_candidate_with_a_dead_watch_sends_one_request_for_each_lease_duration() -> None:
    """Every agent of a cluster may be blind at once, when an address of the API server moves."""
    kube, sent = FakeKube(), list[str]()

    def note(request: Request) -> bool:
        sent.append(request.method)
        return False

    deaf = DeafTransport(kube, note)
    leader, blind = candidate(kube, "a"), candidate(deaf, "b")
    async with leader.running():
        await until_one_leads(leader)
        async with blind.running():
            await asyncio.sleep(20)
            deaf.deaf = True
            sent.clear()
            await asyncio.sleep(300)
            assert leader.leads
            assert sent.count("PATCH") == len(sent)
            assert 1 <= len(sent) <= 300 / 15


async def test_a_leader_that_was_paused_for_too_long_must_not_write() -> None:
    kube = FakeKube()
    async with candidate(kube).running() as first:
        await until_one_leads(first)
        held = first.election._lease._held
        assert held is not None
        held.renewed_at_seconds -= 10
        assert not first.election.may_write
        # No other agent took it meanwhile: the next renewal repairs it.
        await asyncio.sleep(6)
        assert first.election.may_write
        assert first.leads


async def test_losing_the_lease_cancels_the_leaders_work() -> None:
    kube = FakeKube()
    async with candidate(kube).running() as first:
        await until_one_leads(first)
        stored = lease(kube)
        kube.put(stored | {"spec": stored["spec"] | {"holderIdentity": "b"}})
        await asyncio.sleep(6)
        assert not first.leads
        assert lease(kube)["spec"]["holderIdentity"] == "b"
        assert first.election.holder == "b"


@pytest.mark.parametrize("what", ["lost", "lost-applied", 500, 429])
async def test_an_unanswered_renewal_is_retried(what: str) -> None:
    kube = FakeKube()
    async with candidate(kube).running() as first:
        await until_one_leads(first)
        kube.fail_next("PATCH", "leases", what, times=2)  # type: ignore[arg-type] # a table of faults
        await asyncio.sleep(60)
        assert [what for what, _ in first.events] == ["began"]


@pytest.mark.parametrize("method", ["POST", "PATCH"])
@pytest.mark.parametrize("what", ["lost", "lost-applied", 500, 403])
async def test_acquiring_the_lease_survives_a_failure(method: str, what: str) -> None:
    kube = FakeKube()
    if method == "PATCH":
        async with candidate(kube, "before").running() as before:
            await until_one_leads(before)
        assert lease(kube)["spec"]["holderIdentity"] == ""
    kube.fail_next(method, "leases", what)  # type: ignore[arg-type] # a table of faults
    async with candidate(kube).running() as first:
        # Also if it was acquired, and only the response was lost.
        await until_one_leads(first, seconds=10)
    assert lease(kube)["spec"]["holderIdentity"] == ""


async def test_a_leader_that_stops_during_a_renewal_releases_the_lease() -> None:
    kube = FakeKube()
    transport = Gate(kube, lambda _: True, answers=True)
    transport.open.set()
    async with candidate(transport).running() as first:
        await until_one_leads(first)
        before = lease(kube)["metadata"]["resourceVersion"]
        transport.open.clear()
        while lease(kube)["metadata"]["resourceVersion"] == before:
            await asyncio.sleep(0.1)
        transport.open.set()
    assert lease(kube)["spec"]["holderIdentity"] == ""


async def test_many_candidates_conflict_rarely_and_send_no_requests_while_waiting() -> None:
    kube = FakeKube()
    candidates = [candidate(kube, f"agent-{number}") for number in range(20)]
    tasks = [asyncio.create_task(one.election.run(one.lead)) for one in candidates]
    leader = await until_one_leads(*candidates)
    await asyncio.sleep(5)
    asked = len(kube.requests)
    await asyncio.sleep(100)
    assert sum(one.leads for one in candidates) == 1
    # The leader's renewals, one each five seconds.
    assert len(kube.requests) - asked <= 21
    tasks[candidates.index(leader)].cancel()
    await asyncio.sleep(0.1)
    await until_one_leads(*(one for one in candidates if one is not leader), seconds=2)
    assert (leader.events[-1][0], lease(kube)["spec"]["leaseTransitions"]) == ("ended", 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lease(kube)["spec"]["holderIdentity"] == ""


async def test_failing_work_releases_the_lease_and_raises() -> None:
    async def broken() -> None:
        raise RuntimeError("broken")

    kube = FakeKube()
    with pytest.raises(ExceptionGroup) as caught:
        await candidate(kube).election.run(broken)
    assert caught.group_contains(RuntimeError, match="broken")
    assert lease(kube)["spec"]["holderIdentity"] == ""


LEASE_SECONDS = 3.0
FOLLOWING = {"Accepted": "Prepared", "Prepared": "InProgress", "InProgress": "Completed"}


@asynccontextmanager
async def agent(scene: Scene, transport: Transport, identity: str) -> AsyncIterator[LeaderElection]:
    """Run what of an agent leads: an election, and the dispatcher while it is the leader."""
    clock = LoopClock()
    client, duration = KubeClient(transport, Retry(clock)), timedelta(seconds=LEASE_SECONDS)
    election = LeaderElection(client, clock, namespace="velero", identity=identity, duration=duration)
    async with running(election.run(scene.dispatcher(transport, election.check).run)):
        yield election


async def carry(scene: Scene) -> None:
    """Bring accepted transfers on, as their agents would."""
    while True:
        for name, phase in scene.phases().items():
            if phase in FOLLOWING:
                scene.set_status(name, phase=FOLLOWING[phase])
        await asyncio.sleep(0.7)


def admissions(scene: Scene) -> Counter[str]:
    """Return how often each transfer became Accepted, over all history."""
    found: Counter[str] = Counter()
    for happening in scene.kube._store.history:
        if happening.resource in RESOURCES.values() and happening.after is not None:
            before = (happening.before or {}).get("status", {}).get("phase", "")
            if happening.after["status"].get("phase") == "Accepted" and before != "Accepted":
                found[happening.after["metadata"]["name"]] += 1
    return found


async def run_with_pause(at: int, *, comes_back: bool) -> Scene:
    """Return a scene whose first leader was paused at its request number `at`, once all transfers are done."""
    scene = open_scene("node-a", "node-b", limit=2)
    scene.others += [ScriptedKind(model) for model in RESOURCES if model is not scene.kind.model]
    for number in range(8):
        scene.add_kind(list(RESOURCES)[number % 4], f"transfer-{number}", queue=f"ns-{number % 3}")
    asked = itertools.count(1)
    pause = Pause(scene.kube, lambda _: next(asked) >= at)
    async with running(carry(scene)), agent(scene, pause, "a") as paused:
        async with asyncio.timeout(60):
            await pause.stopped.wait()
        async with agent(scene, scene.kube, "b") as other:
            await asyncio.sleep(2 * LEASE_SECONDS)
            if comes_back:
                pause.over.set()
            await scene.until(lambda: set(scene.phases().values()) == {"Completed"}, seconds=100)
            assert not (paused.may_write and other.may_write)
        pause.over.set()
    return scene


@pytest.mark.parametrize("first", range(5, 45, 8))
async def test_a_leader_paused_at_any_request_admits_nothing_twice_and_never_too_many(first: int) -> None:
    for at in range(first, first + 8):
        scene = await run_with_pause(at, comes_back=True)
        assert most_held(scene.kube) <= 2, at
        assert admissions(scene) == {f"transfer-{number}": 1 for number in range(8)}, at


@pytest.mark.parametrize("at", range(5, 45, 5))
async def test_a_leader_killed_at_any_request_loses_nothing(at: int) -> None:
    scene = await run_with_pause(at, comes_back=False)
    assert most_held(scene.kube) <= 2
    assert admissions(scene) == {f"transfer-{number}": 1 for number in range(8)}
