"""Node shares: one node cannot fill the admission queue."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from core.models.names import NODE_LABEL
from core.models.phases import AttemptStage, Phase
from nodeagent.config.keys import NodeRule
from nodeagent.config.value_types import LabelSelector
from nodeagent.leader.admission.quota import NodeShares
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.leader.admission.test_writer_queue_reports import entry
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, open_scene

FULL = "node node-a already has 3 pod volume transfers in preparation (limit 3)"
NODES = ("node-a", "node-b")
MOST = 3
"""2 for the node's one slot, and one more."""


def ready(node: str = "node-a") -> Admission:
    return Admission(AdmissionState.READY, node=node)


def shares(*accepted: str) -> NodeShares:
    """Return shares that have counted one Accepted transfer for each node in `accepted`."""
    found = NodeShares(frozenset({"DataUpload"}))
    found.count([entry(f"on-{i}", phase=Phase.ACCEPTED, node_label=node) for i, node in enumerate(accepted)], {})
    return found


def full_scene() -> Scene:
    """Return a scene with one transfer more than the share of its one node."""
    scene = open_scene("node-a", bound=True)
    for i in range(MOST + 1):
        scene.kind.answers[f"a{i}"] = ready()
        scene.add(f"a{i}")
    scene.limit = None
    return scene


@pytest.mark.parametrize(("slots", "most"), [(1, 3), (2, 5)])
def test_the_share_of_a_node_follows_its_slots(slots: int, most: int) -> None:
    found = shares()
    decisions = [found.admit(entry(f"pvb-{i}"), ready(), slots=slots).decision for i in range(most + 1)]
    assert decisions == [AdmissionState.READY] * most + [AdmissionState.PENDING]
    assert found.admit(entry("elsewhere"), ready("node-b"), slots=1).decision is AdmissionState.READY


@pytest.mark.cause("node-busy")
def test_a_full_node_is_an_indefinite_reason() -> None:
    answer = shares(*["node-a"] * MOST).admit(entry("pvb"), ready(), slots=1)
    assert answer == Admission(AdmissionState.PENDING, "NodeBusy", FULL, node="node-a", indefinite=True)


def test_a_transfer_that_is_checked_again_in_a_pass_counts_once() -> None:
    found = shares("node-a", "node-a")
    assert [found.admit(entry("pvb"), ready(), slots=1).decision for _ in range(2)] == [AdmissionState.READY] * 2


def test_other_kinds_and_other_results_stay() -> None:
    found = NodeShares(frozenset({"Other"}))
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


@pytest.mark.looptime
async def test_one_node_cannot_fill_the_queue() -> None:
    scene = open_scene(*NODES, limit=6, bound=True)
    names = [f"a{i}" for i in range(8)] + ["b0", "b1"]
    for name in names:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == MOST + 2)
        await asyncio.sleep(10)
        assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}
        assert scene.message("a3") == FULL

        scene.set_status("a0", phase="InProgress")
        await scene.until(lambda: scene.phase("a3") == "Accepted", seconds=2)

    assert scene.accepted[-1] == "a3"
    assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}


@pytest.mark.looptime
async def test_a_transfer_for_a_full_node_is_reported_at_its_first_check_and_not_checked_again() -> None:
    scene = full_scene()
    async with scene.dispatching():
        await scene.until(lambda: scene.reason(f"a{MOST}") == "NodeBusy", seconds=1)
        await asyncio.sleep(50)
    assert scene.kind.checked.count(f"a{MOST}") == 1


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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
