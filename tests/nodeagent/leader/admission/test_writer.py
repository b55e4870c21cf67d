"""The order of the admission queue, in which transfers with reservations are accepted, and what does not delay them."""

import asyncio
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, EVENTS
from core.models.phases import AttemptStage, Phase, in_order, round_robin
from nodeagent.leader.admission.writer import QueueView
from nodeagent.leader.live_agents import choose_node, count_idle
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Gate, Scene, entry, is_accept, open_scene
from tests.support.clock import LoopClock
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


_QUEUES = {"app-a": 300, "app-b": 150, "app-c": 90}
"""More transfers together than one pass checks."""


def _accepted_in_order(scene: Scene) -> list[str]:
    """Return the names of accepted transfers in the order of the API server's history."""
    names: dict[str, None] = {}
    for happening in scene.kube._store.history:
        if happening.resource is DATA_UPLOADS and (happening.after or {}).get("status", {}).get("phase") == "Accepted":
            names.setdefault((happening.after or {})["metadata"]["name"])
    return list(names)


def _add_queues(scene: Scene, *, share: int = 1) -> list[str]:
    """Store transfers of three namespaces, or a share of them; return their names in the order of admission."""
    queues = [[f"{queue}-{number:03}" for number in range(count // share)] for queue, count in _QUEUES.items()]
    for queue, names in zip(_QUEUES, queues, strict=True):
        for name in reversed(names):
            scene.add(name, queue=queue)
    return [name for round_ in zip_longest(*queues) for name in round_ if name is not None]


async def test_every_transfer_is_accepted_in_order_over_all_passes() -> None:
    scene = open_scene("node-a", "node-b", limit=None)
    names = _add_queues(scene)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == len(names))
    assert _accepted_in_order(scene) == names
    assert scene.accepted == names


async def test_reservations_of_a_crashed_leader_are_accepted_oldest_first() -> None:
    scene = open_scene(limit=None)
    names = _add_queues(scene, share=10)
    async with scene.paused(is_accept):
        # Before its first accept. One at a time, so that no client observes the second before the first.
        assert scene.ledger() == {f"uid-of-{name}" for name in names}
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == len(names))
    accepted = _accepted_in_order(scene)
    for queue in _QUEUES:
        assert [name for name in accepted if name.startswith(queue)] == [n for n in names if n.startswith(queue)]


async def test_a_slow_event_delays_no_accept() -> None:
    scene = open_scene(limit=None)
    for number in range(40):
        scene.add(f"du-{number:02}")
    gate = Gate(scene.kube, lambda request: request.method == "POST" and request.path.endswith("/events"))
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: len(_accepted_in_order(scene)) == 40)
        assert not scene.kube.objects(EVENTS)
        gate.open.set()
        await scene.until(lambda: len(scene.kube.objects(EVENTS)) == 40)
    assert all(scene.reasons(f"du-{number:02}") == ["Accepted"] for number in range(40))


async def test_the_warning_of_a_ready_transfer_is_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene(limit=None)
    scene.add("du")
    warning = "BackupStorageLocation velero/default is Unavailable: no bucket"
    scene.kind.answers["du"] = Admission(AdmissionState.READY, warning=warning)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.kube.objects(EVENTS)) == 2)
        await asyncio.sleep(120)
    assert scene.reasons("du") == ["Accepted", "LocationUnavailable"]
    recorded = scene.kube.objects(EVENTS)[-1]
    assert (recorded["type"], recorded["message"]) == ("Warning", warning)
    assert [record.levelname for record in caplog.records if record.getMessage() == warning] == ["WARNING"]


async def test_writes_of_a_pass_come_in_the_order_of_its_stages() -> None:
    """Cancel, reservation, accept, report: an accept before its reservation would exceed the quota."""
    scene = open_scene("node-a", limit=1)
    scene.add("canceled", deletionTimestamp="2026-11-21T12:00:00Z", finalizers=["x/y"])
    scene.add("first")
    scene.add("second")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("second") != "")
    paths = [request.path for request in scene.kube.requests if request.method in {"PATCH", "POST"}]
    written = ["ledger" if CONFIG_MAPS.plural in path else path.rsplit("/", 1)[1] for path in paths]
    # The first write of the ledger begins the term.
    assert [name for name in written if name != EVENTS.plural][:5] == [
        "ledger",
        "canceled",
        "ledger",
        "first",
        "second",
    ]


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
