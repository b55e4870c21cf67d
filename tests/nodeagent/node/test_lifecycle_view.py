"""What the rules get to see of a load and its pod."""

import pytest

from core.models.base import JsonDict
from core.models.names import CANCEL_REQUESTED_ANNOTATION, MOVER_LOST_ANNOTATION, NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from nodeagent.node.lifecycle import Site, Stop, Timeouts, View, Viewer
from nodeagent.node.mover_loss import MoverLoss
from nodeagent.node.slots import Slots
from nodeagent.transfers.kinds.data_upload import DataUploadKind
from nodeagent.transfers.mover_pod import PodState
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload, mover_pod

UPLOADS = DataUploadKind(client=None, exposer=None, expose_settings=None, datamovers=frozenset())  # type: ignore[arg-type] # names only


def look(load: JsonDict, pod: JsonDict | None = None, *, seconds: float = 0.0) -> View:
    viewer = Viewer(HandClock(seconds), Site(NODE, NAMESPACE), Timeouts(), Slots(1))
    return viewer.look(UPLOADS, UPLOADS.parse(load), pod).view


ENDED = [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]


def test_a_new_load_of_nobody() -> None:
    assert look(data_upload()) == View(
        phase=Phase.NEW,
        ours=False,
        stop=Stop.NONE,
        pod=PodState.ABSENT,
        outcome_kept=False,
        slot=False,
        late=False,
    )


def test_another_loads_pod_of_the_same_name_counts_as_absent() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Running")
    assert look(data_upload(node=NODE), pod).pod is PodState.ABSENT


@pytest.mark.parametrize(
    ("node", "ours"), [(NODE, True), ("node-b", False), ("", False)], ids=["ours", "other", "none"]
)
def test_the_node_label_says_whose_it_is(node: str, ours: bool) -> None:
    assert look(data_upload(node=node)).ours is ours


def test_a_long_node_name_is_ours_by_its_label_value() -> None:
    site = Site("n" * 80, NAMESPACE)
    viewer = Viewer(HandClock(), site, Timeouts(), Slots(1))
    load = data_upload(labels={NODE_LABEL: site.label})
    assert len(site.label) == 63
    assert viewer.look(UPLOADS, UPLOADS.parse(load), None).view.ours


@pytest.mark.parametrize(("seconds", "late"), [(1799, False), (1800, True)], ids=["in time", "late"])
def test_the_prepare_timeout_runs_from_the_accept(seconds: float, late: bool) -> None:
    status = {"phase": "Accepted", "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    assert look(data_upload(node=NODE, status=status), seconds=seconds).late is late
    assert not look(data_upload(node=NODE, status=status | {"phase": "Prepared"}), seconds=seconds).late


def test_a_load_that_was_made_accepted_is_late_by_its_age() -> None:
    made_at = {"creationTimestamp": "2026-11-21T12:00:00Z"}
    accepted = data_upload(node=NODE, status={"phase": "Accepted"}, **made_at)
    assert [look(accepted, seconds=seconds).late for seconds in (1799, 1800)] == [False, True]


def test_an_outcome_is_seen() -> None:
    assert look(data_upload(annotations={OUTCOME_ANNOTATION: '{"phase":"Failed","message":"m"}'})).outcome_kept
    assert not look(data_upload(annotations={OUTCOME_ANNOTATION: "unreadable"})).outcome_kept


def overdue_at(load: JsonDict, *seconds: float) -> list[bool]:
    """Return at which of those times, by one agent that looks at all of them, the stop is overdue."""
    clock = HandClock()
    viewer = Viewer(clock, Site(NODE, NAMESPACE), Timeouts(), Slots(1))
    cr = UPLOADS.parse(load)
    found = []
    for clock.seconds in seconds:
        stop = viewer.look(UPLOADS, cr, None).view.stop
        assert stop is not Stop.NONE
        found.append(stop is Stop.OVERDUE)
        assert (viewer.seconds_until_overdue(cr) == 0) is found[-1]
    return found


def canceling(**annotations: str) -> JsonDict:
    load = data_upload(node=NODE, status={"phase": "Canceling"}, annotations=annotations)
    load["spec"]["cancel"] = True
    return load


def test_a_stop_is_overdue_an_hour_after_it_was_first_seen() -> None:
    assert overdue_at(canceling(), 100.0, 3699.0, 3700.0) == [False, False, True]


@pytest.mark.parametrize("seen_at", [0.0, 3000.0], ids=["from the beginning", "by an agent that was restarted"])
def test_the_hour_of_a_cancel_that_was_written_down_does_not_begin_anew(seen_at: float) -> None:
    load = canceling(**{CANCEL_REQUESTED_ANNOTATION: "2026-11-21T12:00:00Z"})
    assert overdue_at(load, seen_at, 3599.0, 3600.0) == [False, False, True]


def test_the_hour_of_a_deletion_begins_with_it() -> None:
    load = data_upload(node=NODE, status={"phase": "Canceling"}, deletionTimestamp="2026-11-21T12:00:00Z")
    assert overdue_at(load, 3599.0, 3600.0) == [False, True]


@pytest.mark.parametrize("written", ["", "soon", "2026-11-21T12:00:00"], ids=["empty", "no time", "no zone"])
def test_a_time_that_cannot_be_read_counts_as_not_written(written: str) -> None:
    assert overdue_at(canceling(**{CANCEL_REQUESTED_ANNOTATION: written}), 5000.0, 8600.0) == [False, True]


LOSS = MoverLoss(since=NOON, last=NOON)


@pytest.mark.parametrize(("phase", "late"), [("Accepted", True), ("Prepared", True), ("InProgress", False)])
def test_a_lost_mover_has_the_prepare_timeout_to_come_back(phase: str, late: bool) -> None:
    status = {"phase": phase, "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    load = data_upload(node=NODE, status=status, annotations={MOVER_LOST_ANNOTATION: LOSS.to_json()})
    assert [look(load, seconds=seconds).late for seconds in (1799.0, 1800.0)] == [False, late]


def test_a_mover_on_another_node_is_on_its_way_until_that_nodes_agent_has_it() -> None:
    load = data_upload(node=NODE, status={"phase": "Prepared"})
    assert look(load, mover_pod(load, node="node-b", phase="Running")).pod is PodState.PENDING
    running = data_upload(node=NODE, status={"phase": "InProgress"})
    assert look(running, mover_pod(running, node="node-b", phase="Running")).pod is PodState.RUNNING


@pytest.mark.parametrize(
    ("phase", "status", "state"),
    [
        pytest.param("InProgress", {"phase": "Succeeded", "containerStatuses": ENDED}, PodState.ENDED, id="ended"),
        pytest.param("InProgress", {"phase": "Running"}, PodState.ABSENT, id="without a result"),
        pytest.param("Prepared", {"phase": "Failed", "reason": "Evicted"}, PodState.ABSENT, id="before the start"),
    ],
)
def test_what_a_pod_said_last_counts_when_it_is_gone(phase: str, status: JsonDict, state: PodState) -> None:
    load = data_upload(node=NODE, status={"phase": phase})
    viewer = Viewer(HandClock(), Site(NODE, NAMESPACE), Timeouts(), Slots(1))
    pod = mover_pod(load, **status)
    case = viewer.look(UPLOADS, UPLOADS.parse(load), None, departed=pod)
    assert (case.view.pod, case.departed) == (state, pod)


def test_a_pod_that_went_away_from_an_earlier_load_of_the_name_says_nothing() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Succeeded", containerStatuses=ENDED)
    load = data_upload(node=NODE, status={"phase": "InProgress"})
    viewer = Viewer(HandClock(), Site(NODE, NAMESPACE), Timeouts(), Slots(1))
    case = viewer.look(UPLOADS, UPLOADS.parse(load), None, departed=pod)
    assert (case.view.pod, case.departed) == (PodState.ABSENT, None)


def test_a_prepared_load_gets_its_turn_when_the_slot_is_freed() -> None:
    slots = Slots(1)
    viewer = Viewer(HandClock(), Site(NODE, NAMESPACE), Timeouts(), slots)
    first = UPLOADS.parse(data_upload("a", node=NODE, status={"phase": "InProgress"}))
    second = UPLOADS.parse(data_upload("b", node=NODE, status={"phase": "Prepared"}))
    looks = [viewer.look(UPLOADS, cr, None).view.slot for cr in (first, second)]
    viewer.forget(first.uid)
    looks.append(viewer.look(UPLOADS, second, None).view.slot)
    assert looks == [True, False, True]
