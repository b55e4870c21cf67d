"""The order of the admission queue, and the choice of a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models.phases import AttemptStage, Phase, in_order, round_robin
from nodeagent.leader.admission.writer import QueueView
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import choose_node, count_idle
from nodeagent.metrics import Metrics
from tests.support.clock import LoopClock
from tests.support.tasks import running


def entry(name: str, queue: str = "app", created: str = "2026-11-21T11:00:00Z", **others: object) -> Entry:
    fields: dict[str, object] = {
        "kind": "DataUpload",
        "namespace": "velero",
        "name": name,
        "uid": name,
        "phase": Phase.NEW,
        "queue": queue,
        "created": created,
        "stop": False,
        "managed": True,
        "node_label": "",
        "finalizer": False,
        "reason": "",
    }
    return Entry(**(fields | others))  # type: ignore[arg-type] # a table of test values


QUEUED = [
    entry("a2", "a", "2026-11-21T11:00:02Z"),
    entry("a1", "a", "2026-11-21T11:00:01Z"),
    entry("a3", "a", "2026-11-21T11:00:02Z"),
    entry("b1", "b", "2026-11-21T11:00:03Z"),
    entry("c1", "c", "2026-11-21T10:00:00Z"),
    entry("c2", "c", "2026-11-21T10:00:00Z"),
    entry("c0", "c", "2026-11-21T10:00:01Z"),
]


@pytest.mark.parametrize(
    ("after", "order"),
    [
        pytest.param("", "a1 b1 c1 a2 c2 a3 c0", id="from the first namespace"),
        pytest.param("a", "b1 c1 a1 c2 a2 c0 a3", id="behind the one served last"),
        pytest.param("bb", "c1 a1 b1 c2 a2 c0 a3", id="behind a namespace without transfers"),
        pytest.param("c", "a1 b1 c1 a2 c2 a3 c0", id="from the first namespace again"),
    ],
)
def test_namespaces_alternate_and_the_oldest_transfer_goes_first(after: str, order: str) -> None:
    assert " ".join(e.name for e in round_robin(QUEUED, after=after)) == order


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_every_transfer_comes_once_and_no_namespace_twice_while_another_is_queued(queues: list[str]) -> None:
    entries = [entry(f"{number:03}", queue) for number, queue in enumerate(queues)]
    order = list(round_robin(entries, after=""))
    assert sorted(e.name for e in order) == [e.name for e in entries]
    for position, first in enumerate(order):
        again = next((i for i in range(position + 1, len(order)) if order[i].queue == first.queue), len(order))
        still_queued = {e.queue for e in order[again:]} - {first.queue}
        assert still_queued <= {e.queue for e in order[position + 1 : again]}


def test_the_agent_with_the_fewest_transfers_without_a_mover_is_chosen() -> None:
    idle = count_idle(
        [
            entry("1", phase=Phase.ACCEPTED, node_label="node-a"),
            entry("2", phase=Phase.ACCEPTED, node_label="node-b"),
            entry("3", phase=Phase.IN_PROGRESS, node_label="node-c"),
            entry("4", phase=Phase.ACCEPTED, node_label="node-a"),
            entry("5", phase=Phase.IN_PROGRESS, stage=AttemptStage.RUNNING, node_label="node-c"),
        ]
    )
    agents = {name: name for name in ("node-a", "node-b", "node-c")}
    assert choose_node(agents, idle) == "node-c"
    assert choose_node({"node-a": "node-a", "node-b": "node-b"}, idle) == "node-b"
    assert choose_node({}, idle) is None


@pytest.mark.parametrize("stage", [AttemptStage.WAITING, AttemptStage.READY, AttemptStage.EXPOSING])
def test_transfers_between_two_attempts_count_for_the_agent_they_were_given_to(stage: AttemptStage) -> None:
    entries = [
        entry("1", phase=Phase.IN_PROGRESS, stage=stage, node_label="node-b"),
        entry("2", phase=Phase.IN_PROGRESS, stage=stage, node_label="node-a"),
        entry("3", phase=Phase.IN_PROGRESS, node_label="node-a"),
    ]
    # What the index does not show yet counts once.
    assert count_idle(entries, {"2": "node-c", "3": "node-c"}) == {"node-b": 1, "node-c": 2}


def test_an_agent_that_is_passed_over_is_chosen_only_if_there_are_no_others() -> None:
    agents = {"a": "a", "b": "b", "skewed": "skewed"}
    accepted = {"a": 3, "b": 3, "skewed": 0}
    assert choose_node(agents, accepted) == "skewed"
    assert choose_node(agents, accepted, frozenset({"skewed"})) == "a"
    assert choose_node(agents, accepted, frozenset(agents)) == "skewed"


def test_preferred_kinds_have_an_order_of_their_own() -> None:
    entries = [
        entry("u-b", "b"),
        entry("d-b", "b", kind="DataDownload"),
        entry("d-a", "a", kind="DataDownload"),
        entry("p-a", "a", kind="PodVolumeRestore"),
        entry("u-a", "a"),
    ]
    restores = frozenset({"DataDownload", "PodVolumeRestore"})
    assert [e.name for e in in_order(entries, after="a", first=restores)] == ["d-b", "d-a", "p-a", "u-b", "u-a"]
    assert [e.name for e in in_order(entries, after="a")] == ["d-b", "d-a", "u-b", "p-a", "u-a"]


@pytest.mark.looptime
async def test_pending_transfers_are_counted_by_reasons_that_this_project_defines() -> None:
    metrics = Metrics("node-a")
    entries = [
        entry("a", reason="Queued"),
        entry("b", reason="Queued"),
        entry("c", reason="Unschedulable", phase=Phase.ACCEPTED),
        entry("d", reason="SomethingOfADriver", phase=Phase.ACCEPTED),
        entry("e"),
        entry("f", reason="Queued", managed=False),
        entry("g", reason="Queued", phase=Phase.FAILED),
    ]
    view = QueueView(metrics, LoopClock(), ["DataUpload"], entries=lambda: entries, order=lambda queue: queue)
    async with running(view.run(), lead_seconds=1):
        lines = [line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_pending{")]
        assert sorted(lines) == [
            'nodeagent_pending{kind="DataUpload",node="node-a",reason="Other",state="Accepted"} 2.0',
            'nodeagent_pending{kind="DataUpload",node="node-a",reason="Queued",state="New"} 2.0',
        ]
    assert "nodeagent_pending{" not in metrics.render().decode()
