"""A node whose last transfers failed before Prepared is passed over while there are others."""

import asyncio
from collections.abc import Iterable

import pytest

from core.kube.resources import EVENTS
from core.models.names import NODE_LABEL, NOT_PREPARED_ANNOTATION
from core.models.phases import Phase
from core.models.reasons import NotPrepared
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import NodeBackoff, choose_node
from tests.nodeagent.leader.admission.test_writer_queue_reports import entry
from tests.nodeagent.support.dispatching import Scene, open_scene
from tests.nodeagent.support.hand_clock import HandClock

AGENTS = {"a": "node-a", "b": "node-b", "skewed": "node-skewed"}
OWN = None


def end(backoff: NodeBackoff, *causes: str | None, phase: Phase = Phase.FAILED, node: str = "skewed") -> None:
    """Let transfers of a node leave Accepted one after the other."""
    for number, cause in enumerate(causes):
        backoff.observe(entry(str(number), phase=Phase.ACCEPTED, node_label=node))
        backoff.observe(entry(str(number), phase=phase, node_label=node, not_prepared=cause and NotPrepared(cause)))


def chosen(backoff: NodeBackoff, agents: dict[str, str] | None = None) -> str | None:
    return choose_node(agents or AGENTS, {"a": 3, "b": 3, "skewed": 0}, backoff.labels())


def test_a_node_is_passed_over_after_three_failures_while_there_are_others() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, "OperationTimeout", "OperationTimeout")
    assert chosen(backoff) == "skewed"
    end(backoff, "MoverLost")
    assert chosen(backoff) == "a"
    assert chosen(backoff, {"skewed": "node-skewed"}) == "skewed"
    assert backoff.report(AGENTS) == [{"node": "node-skewed", "failures": 3, "cause": "MoverLost", "seconds": 300}]
    ((label, message),) = backoff.take_news()
    assert (label, backoff.take_news()) == ("skewed", [])
    assert message == (
        "other nodes are preferred for 5m0s: the last 3 transfers of this node failed before Prepared, "
        "the last one because of MoverLost"
    )


@pytest.mark.parametrize(
    ("causes", "phase"),
    [
        pytest.param(["OperationTimeout", OWN, "OperationTimeout"], Phase.FAILED, id="a fault of its own"),
        pytest.param([OWN, OWN, OWN], Phase.CANCELED, id="canceled"),
    ],
)
def test_other_ends_do_not_count(causes: list[str | None], phase: Phase) -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *causes, phase=phase)
    assert chosen(backoff) == "skewed"
    end(backoff, "OperationTimeout")
    assert chosen(backoff) == ("a" if phase is Phase.FAILED else "skewed")


@pytest.mark.parametrize("phase", [Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED])
def test_one_transfer_that_becomes_prepared_ends_it(phase: Phase) -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["PrepareTimeout"] * 3)
    end(backoff, OWN, phase=phase)
    assert chosen(backoff) == "skewed"
    end(backoff, *["PrepareTimeout"] * 2)
    assert chosen(backoff) == "skewed"


def test_the_pause_doubles_up_to_an_hour() -> None:
    clock = HandClock()
    backoff = NodeBackoff(clock)
    end(backoff, *["OperationTimeout"] * 3)
    pauses = []
    for _ in range(6):
        began = clock.seconds
        # What was accepted before does not make it longer.
        end(backoff, *["OperationTimeout"] * 2)
        while backoff.labels():
            clock.seconds += 60
        pauses.append((clock.seconds - began) / 60)
        assert chosen(backoff) == "skewed"
        end(backoff, "OperationTimeout")
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_only_accepted_transfers_and_live_agents_are_remembered() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["OperationTimeout"] * 3)
    for number in range(10):
        backoff.observe(entry(f"gone-{number}", phase=Phase.ACCEPTED, node_label="a"))
    kept = entry("kept", phase=Phase.ACCEPTED, node_label="a")
    backoff.observe(kept)
    backoff.retain([kept, entry("new")], AGENTS.keys())
    assert (backoff._accepted, list(backoff._nodes)) == ({kept.uid: "a"}, ["skewed"])
    backoff.retain([], {"a", "b"})
    assert (backoff._accepted, backoff._nodes) == ({}, {})


def test_a_transfer_counts_for_the_node_that_it_was_accepted_for() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["OperationTimeout"] * 2)
    observe(
        backoff,
        entry("moved", phase=Phase.ACCEPTED, node_label="a"),
        entry("moved", phase=Phase.ACCEPTED, node_label="skewed"),
        entry("moved", phase=Phase.FAILED, node_label="", not_prepared=NotPrepared.OPERATION_TIMEOUT),
    )
    assert backoff.labels() == {"skewed"}


def observe(backoff: NodeBackoff, *entries: Entry) -> None:
    for each in entries:
        backoff.observe(each)


def rendered(dispatcher: Dispatcher) -> str:
    return dispatcher.cluster.metrics.render().decode()


def names_on(scene: Scene, node: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if scene.transfer(name)["metadata"].get("labels", {}).get(NODE_LABEL) == node]


@pytest.mark.looptime
async def test_the_leader_accepts_transfers_for_other_nodes_and_says_so() -> None:
    scene = open_scene("node-a", "node-b", limit=None)
    for number in range(3):
        scene.add(f"early-{number}", status={"phase": "Accepted"}, labels={NODE_LABEL: "node-a"})
    async with scene.dispatching() as dispatcher:
        await asyncio.sleep(5)
        for number in range(3):
            cr = scene.transfer(f"early-{number}")
            cr["metadata"]["annotations"] = {NOT_PREPARED_ANNOTATION: "OperationTimeout"}
            scene.kube.put(cr | {"status": {"phase": "Failed", "message": "timed out"}})
        names = [f"later-{number}" for number in range(4)]
        for name in names:
            scene.add(name)
        await scene.until(lambda: len(names_on(scene, "node-b", names)) == 4, seconds=20)
        (shown,) = dispatcher.report()["passedOver"]
        assert (shown["node"], shown["failures"], shown["cause"]) == ("node-a", 3, "OperationTimeout")
        events = [event for event in scene.kube.objects(EVENTS) if event["reason"] == "NodePassedOver"]
        assert [(event["type"], event["involvedObject"]["name"]) for event in events] == [
            ("Warning", "node-agent-node-a")
        ]
        assert 'nodeagent_node_passed_over{node="node-a",passed_over="node-a"} 1.0' in rendered(dispatcher)
        scene.kube.put(scene.transfer("later-0") | {"status": {"phase": "Prepared"}})
        await asyncio.sleep(300)
        await scene.until(lambda: dispatcher.report()["passedOver"] == [], seconds=70)
        await scene.until(lambda: "node_passed_over{" not in rendered(dispatcher), seconds=70)
