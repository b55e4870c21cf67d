"""The admission ledger, which agent may write it, and node shares: one node cannot fill the admission queue."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from core.kube.errors import ForbiddenError, ServerError
from core.kube.resources import CONFIG_MAPS
from core.models.names import NODE_LABEL
from core.models.phases import AttemptStage, Phase
from nodeagent.config.keys import NodeRule
from nodeagent.config.value_types import LabelSelector
from nodeagent.leader.admission import quota
from nodeagent.leader.election import NotLeaderError
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, entry, open_scene
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


async def open_ledger(kube: FakeKube, *uids: str, written: bool = True) -> quota.AdmissionLedger:
    """Return the ledger of an agent that has loaded it and, unless it is not to, written these UIDs."""
    ledger = quota.AdmissionLedger(kube.client, "velero", check_leading=lambda: None)
    await ledger.load()
    if written:
        await ledger.write(quota.Reservations(frozenset(uids)))
    return ledger


@pytest.mark.parametrize("phase", [None, *Phase])
def test_a_reservation_is_kept_until_past_prepared_or_deleted(phase: Phase | None) -> None:
    seen = {} if phase is None else {"uid": phase}
    holding = phase in {Phase.ACCEPTED, Phase.PREPARED}
    assert bool(quota.settle(set(), seen)) is holding
    assert bool(quota.settle({"uid"}, seen)) is (holding or phase is Phase.NEW)


def test_the_quota_never_exceeds_what_the_ledger_can_hold() -> None:
    used = {str(number) for number in range(19_999)}
    assert quota.free_quota(used, None) == 1
    assert quota.free_quota(used, 1_000_000) == 1
    assert quota.free_quota({"a", "b"}, 3) == 1
    assert quota.free_quota({"a", "b"}, 1) == 0


async def test_a_written_ledger_reads_the_same() -> None:
    kube = FakeKube()
    ledger = await open_ledger(kube, written=False)
    await ledger.write(quota.Reservations(frozenset({"b", "a"}), "app"))
    await ledger.write(quota.Reservations(frozenset({"a"}), "shop"))
    assert (await open_ledger(kube, written=False)).reservations == quota.Reservations(frozenset({"a"}), "shop")


async def test_a_write_fails_after_a_write_of_another_agent() -> None:
    kube = FakeKube()
    first, second = await open_ledger(kube, "a"), await open_ledger(kube, written=False)
    # Even a write of the same content stops the former leader.
    await second.write(second.reservations)
    with pytest.raises(quota.LedgerLostError):
        await first.write(quota.Reservations(frozenset({"a", "b"})))
    await second.load()
    assert second.reservations.uids == {"a"}


async def test_two_agents_that_find_no_ledger_do_not_both_create_it() -> None:
    kube = FakeKube()
    second = await open_ledger(kube, written=False)
    await open_ledger(kube, "a")
    with pytest.raises(quota.LedgerLostError):
        await second.write(quota.Reservations(frozenset({"b"})))


@pytest.mark.parametrize("what", ["lost", "lost-applied", 500, 503])
@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_write_without_an_answer_is_resolved(method: str, what: str) -> None:
    kube = FakeKube()
    ledger = await open_ledger(kube, written=method == "PATCH")
    kube.fail_next(method, "configmaps", what)  # type: ignore[arg-type] # a table of faults
    await ledger.write(quota.Reservations(frozenset({"a"})))
    await ledger.write(quota.Reservations(frozenset({"a", "b"})))
    assert kube.objects(CONFIG_MAPS)[0]["data"]["uids"] == "a\nb"


async def test_a_write_that_never_gets_an_answer_loses_the_ledger() -> None:
    kube = FakeKube()
    ledger = await open_ledger(kube)
    kube.fail_next("PATCH", "configmaps", "lost", times=5)
    with pytest.raises(quota.LedgerLostError):
        await ledger.write(quota.Reservations(frozenset({"a"})))


@pytest.mark.parametrize(("status", "expected"), [(403, ForbiddenError), (500, ServerError)])
async def test_a_rejected_write_changes_nothing(status: int, expected: type[Exception]) -> None:
    kube = FakeKube()
    ledger = await open_ledger(kube, "a")
    kube.fail_next("PATCH", "configmaps", status, times=5 if status == 500 else 1)
    with pytest.raises(expected):
        await ledger.write(quota.Reservations(frozenset({"a", "b"})))
    assert ledger.reservations.uids == {"a"}
    await ledger.write(quota.Reservations(frozenset({"a", "b"})))


async def test_an_agent_that_is_not_the_leader_writes_nothing() -> None:
    def reject() -> None:
        raise NotLeaderError("no")

    kube = FakeKube()
    ledger = quota.AdmissionLedger(kube.client, "velero", check_leading=reject)
    with pytest.raises(NotLeaderError):
        await ledger.write(quota.Reservations())
    assert kube.requests == []


async def test_the_largest_ledger_fits_into_a_config_map() -> None:
    kube = FakeKube()
    ledger = await open_ledger(kube, written=False)
    await ledger.write(quota.Reservations(frozenset(f"{number:036d}" for number in range(20_000)), "n" * 63))
    assert len(kube.requests[-1].body or b"") < 1_000_000


FULL = "node node-a already has 3 pod volume transfers in preparation (limit 3)"
NODES = ("node-a", "node-b")
MOST = 3
"""2 for the node's one slot, and one more."""


def ready(node: str = "node-a") -> Admission:
    return Admission(AdmissionState.READY, node=node)


def shares(*accepted: str) -> quota.NodeShares:
    """Return shares that have counted one Accepted transfer for each node in `accepted`."""
    found = quota.NodeShares(frozenset({"DataUpload"}))
    found.count([entry(f"on-{i}", phase=Phase.ACCEPTED, node_label=node) for i, node in enumerate(accepted)], {})
    return found


@pytest.mark.cause("node-busy")
def test_a_full_node_is_an_indefinite_reason() -> None:
    answer = shares(*["node-a"] * MOST).admit(entry("pvb"), ready(), slots=1)
    assert answer == Admission(AdmissionState.PENDING, "NodeBusy", FULL, node="node-a", indefinite=True)


def test_a_transfer_that_is_checked_again_in_a_pass_counts_once() -> None:
    found = shares("node-a", "node-a")
    assert [found.admit(entry("pvb"), ready(), slots=1).decision for _ in range(2)] == [AdmissionState.READY] * 2


def test_other_kinds_and_other_results_stay() -> None:
    found = quota.NodeShares(frozenset({"Other"}))
    assert found.admit(entry("du"), ready(), slots=1) == ready()
    failing = Admission(AdmissionState.FAILED, "R", "m")
    assert shares(*["node-a"] * MOST).admit(entry("pvb"), failing, slots=1) is failing


def test_the_oldest_for_each_free_share_and_the_canceled_are_woken() -> None:
    found = shares(*["node-a"] * MOST)
    names = ("c", "a", "b", "stopped")
    for name in names:
        found.admit(entry(name), ready(), slots=1)
    held = {entry(name).uid: "node-a" for name in names}
    preparing = [entry(f"on-{i}", phase=Phase.PREPARED, node_label="node-a") for i in range(MOST - 1)]
    woken = found.count([*preparing, *(entry(name) for name in names[:3]), entry("stopped", stop=True)], held)
    assert woken == [entry("a").uid, entry("stopped").uid]


@pytest.mark.parametrize("stage", AttemptStage)
def test_an_attempt_that_is_being_prepared_counts(stage: AttemptStage) -> None:
    found = shares()
    again = [replace(entry(f"on-{i}", phase=Phase.IN_PROGRESS, node_label="node-a"), stage=stage) for i in range(MOST)]
    found.count(again, {})
    expected = AdmissionState.PENDING if stage is AttemptStage.EXPOSING else AdmissionState.READY
    assert found.admit(entry("pvb"), ready(), slots=1).decision is expected


async def test_one_node_cannot_fill_the_queue() -> None:
    scene = open_scene(*NODES, limit=6, bound=True)
    names = [f"a{i}" for i in range(8)] + ["b0", "b1"]
    for name in names:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: scene.reason("a3") == "NodeBusy", seconds=1)
        await scene.until(lambda: len(scene.accepted) == MOST + 2)
        await asyncio.sleep(50)
        assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}
        assert (scene.message("a3"), scene.kind.checked.count("a3")) == (FULL, 1)
        scene.set_status("a0", phase="InProgress")
        await scene.until(lambda: scene.phase("a3") == "Accepted", seconds=2)
    assert scene.accepted[-1] == "a3"
    assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}


async def test_a_free_share_without_quota_is_reported_as_queued_once_it_lasts() -> None:
    scene = open_scene(*NODES, limit=MOST + 1, bound=True)
    for name in [f"a{i}" for i in range(MOST + 1)] + ["b0"]:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == MOST + 1)
        assert scene.reason(f"a{MOST}") == "NodeBusy"
        scene.limit = MOST
        scene.set_status("a0", phase="InProgress")
        await asyncio.sleep(9)
        # Shares come and go: each change would be a write.
        assert scene.reason(f"a{MOST}") == "NodeBusy"
        await scene.until(lambda: scene.reason(f"a{MOST}") == "Queued", seconds=10)


async def test_a_node_with_more_slots_has_a_larger_share() -> None:
    scene = open_scene(*NODES, limit=None)
    big = LabelSelector(match_labels={"size": "big"})
    scene.per_node = (NodeRule(node_selector=big, number=3),)
    scene.kube.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "labels": {"size": "big"}}})
    scene.kind = ScriptedKind(bound_to_node=True)
    for name in [f"{node}{i}" for node in "ab" for i in range(9)]:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: accepted_by_node(scene) == {"node-a": 7, "node-b": MOST}, seconds=10)
        await asyncio.sleep(10)
    assert accepted_by_node(scene) == {"node-a": 7, "node-b": MOST}


async def test_a_transfer_that_is_bound_to_a_node_is_adopted_for_that_node_alone() -> None:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(bound_to_node=True, nodes={"pvb": "node-c"})
    scene.add("pvb", status={"phase": "Accepted"})
    async with scene.dispatching():
        await scene.until(lambda: scene.label("pvb") != "", seconds=5)
        await asyncio.sleep(60)
    assert scene.label("pvb") == "node-c"


def accepted_by_node(scene: Scene) -> Counter[str]:
    stored = [scene.transfer(name) for name in scene.phases() if scene.phase(name) == "Accepted"]
    return Counter(cr["metadata"]["labels"][NODE_LABEL] for cr in stored)
