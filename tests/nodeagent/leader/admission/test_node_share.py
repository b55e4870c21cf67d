"""A node that has enough pod volumes on their way holds the next ones back."""

import asyncio
from collections import Counter

import pytest

from core.models.names import NODE_LABEL
from core.models.phases import Phase
from nodeagent.config.models import NodeRule
from nodeagent.config.selectors import LabelSelector
from nodeagent.leader.admission.node_share import NodeShares
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.leader.admission.test_queue import entry
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, open_scene

NODES = ("node-a", "node-b")
MOST = 3
"""Held back while there are more than 2 for the node's one slot."""


def ready(node: str = "node-a") -> Admission:
    return Admission(AdmissionState.READY, node=node)


def crowds(*accepted: str) -> NodeShares:
    """Crowds that have counted one Accepted load for each node in `accepted`."""
    found = NodeShares(frozenset({"DataUpload"}))
    found.count([entry(f"on-{i}", phase=Phase.ACCEPTED, node_label=node) for i, node in enumerate(accepted)])
    return found


def crowded_scene() -> Scene:
    """Return a scene with one load more than its one node takes."""
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(bound_to_node=True)
    for i in range(MOST + 1):
        scene.kind.answers[f"a{i}"] = ready()
        scene.add(f"a{i}")
    scene.limit = None
    return scene


@pytest.mark.parametrize(("slots", "most"), [(1, 3), (2, 5)])
def test_a_node_takes_as_many_as_its_slots_say(slots: int, most: int) -> None:
    found = crowds()
    verdicts = [found.admit(entry(f"pvb-{i}"), ready(), slots=slots).verdict for i in range(most + 1)]
    assert verdicts == [AdmissionState.READY] * most + [AdmissionState.PENDING]
    assert found.admit(entry("elsewhere"), ready("node-b"), slots=1).verdict is AdmissionState.READY


@pytest.mark.cause("node-busy")
def test_what_holds_a_load_back_is_told_and_waited_for_without_end() -> None:
    answer = crowds(*["node-a"] * MOST).admit(entry("pvb"), ready(), slots=1)
    assert answer == Admission(
        AdmissionState.PENDING, "NodeBusy", "node node-a has 3 pod volumes on their way already", indefinite=True
    )


def test_a_load_that_is_looked_at_again_takes_no_second_place() -> None:
    found = crowds("node-a", "node-a")
    assert [found.admit(entry("pvb"), ready(), slots=1).verdict for _ in range(2)] == [AdmissionState.READY] * 2


def test_other_kinds_and_other_answers_are_left_alone() -> None:
    found = NodeShares(frozenset({"Other"}))
    assert found.admit(entry("du"), ready(), slots=1) == ready()
    failing = Admission(AdmissionState.FAILED, "R", "m")
    assert crowds(*["node-a"] * MOST).admit(entry("pvb"), failing, slots=1) is failing


def test_the_first_in_line_are_woken_and_whoever_is_to_end() -> None:
    found = crowds(*["node-a"] * MOST)
    names = ("c", "a", "b", "stopped")
    for name in names:
        found.admit(entry(name), ready(), slots=1)
    on_the_way = [entry(f"on-{i}", phase=Phase.PREPARED, node_label="node-a") for i in range(MOST - 1)]

    woken = found.count([*on_the_way, *(entry(name) for name in names[:3]), entry("stopped", stop=True)])

    assert woken == [entry("a").uid, entry("stopped").uid]
    assert [found.holds(entry(name).uid) for name in names] == [True, False, True, False]


@pytest.mark.looptime
async def test_one_node_cannot_fill_the_queue() -> None:
    scene = open_scene(*NODES, limit=6)
    scene.kind = ScriptedKind(bound_to_node=True)
    names = [f"a{i}" for i in range(8)] + ["b0", "b1"]
    for name in names:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == MOST + 2)
        await asyncio.sleep(10)
        assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}
        assert scene.message("a3") == "node node-a has 3 pod volumes on their way already"

        scene.set_status("a0", phase="InProgress")
        await scene.until(lambda: scene.phase("a3") == "Accepted", seconds=2)

    assert scene.accepted[-1] == "a3"
    assert accepted_by_node(scene) == {"node-a": MOST, "node-b": 2}


@pytest.mark.looptime
async def test_who_is_held_back_is_told_at_the_first_look_and_not_looked_at_again() -> None:
    scene = crowded_scene()
    async with scene.dispatching():
        await scene.until(lambda: "on their way already" in scene.message(f"a{MOST}"), seconds=1)
        await asyncio.sleep(50)
    assert scene.kind.checked.count(f"a{MOST}") == 1


@pytest.mark.looptime
async def test_that_only_the_queue_holds_it_back_by_now_is_told_once_that_lasts() -> None:
    scene = open_scene(*NODES, limit=MOST + 1)
    scene.kind = ScriptedKind(bound_to_node=True)
    for name in [f"a{i}" for i in range(MOST + 1)] + ["b0"]:
        scene.kind.answers[name] = ready(f"node-{name[0]}")
        scene.add(name)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == MOST + 1)
        assert "on their way already" in scene.message(f"a{MOST}")
        scene.limit = MOST
        scene.set_status("a0", phase="InProgress")
        await asyncio.sleep(9)
        # A node has room one moment and none the next: each would be a write.
        assert "on their way already" in scene.message(f"a{MOST}")
        await scene.until(lambda: scene.reason(f"a{MOST}") == "Queued", seconds=10)


@pytest.mark.looptime
async def test_a_node_with_more_slots_takes_more() -> None:
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
async def test_a_load_that_its_node_holds_back_ends_when_it_is_asked_to() -> None:
    scene = crowded_scene()
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == MOST)
        await asyncio.sleep(10)
        held = scene.load(f"a{MOST}")
        scene.kube.put(held | {"spec": held["spec"] | {"cancel": True}})
        await scene.until(lambda: scene.phase(f"a{MOST}") == "Canceled", seconds=2)


@pytest.mark.looptime
async def test_a_load_bound_to_a_node_is_adopted_for_it_and_never_given_to_another() -> None:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(bound_to_node=True, nodes={"pvb": "node-c"})
    scene.add("pvb", status={"phase": "Accepted"})
    async with scene.dispatching():
        await scene.until(lambda: NODE_LABEL in scene.load("pvb")["metadata"]["labels"], seconds=5)
        await asyncio.sleep(60)
    assert scene.load("pvb")["metadata"]["labels"][NODE_LABEL] == "node-c"


def accepted_by_node(scene: Scene) -> Counter[str]:
    loads = [scene.load(name) for name in scene.phases() if scene.phase(name) == "Accepted"]
    return Counter(load["metadata"]["labels"][NODE_LABEL] for load in loads)
