"""What the rules get to see of a load and its pod."""

import pytest

from core.models.base import JsonDict
from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from nodeagent.concurrency import Slots
from nodeagent.kinds.data_upload import DataUploadKind
from nodeagent.lifecycle import PodState, Stop, View
from nodeagent.view import Limits, Site, Viewer, pod_state
from tests.nodeagent.hand_clock import HandClock
from tests.nodeagent.loads import NAMESPACE, NODE, data_upload, mover_pod

UPLOADS = DataUploadKind(client=None, exposer=None, plan=None, datamovers=frozenset())  # type: ignore[arg-type] # names only


def look(load: JsonDict, pod: JsonDict | None = None, *, seconds: float = 0.0) -> View:
    viewer = Viewer(HandClock(seconds), Site(NODE, NAMESPACE), Limits(), Slots(1))
    return viewer.look(UPLOADS, UPLOADS.parse(load), pod).view


ENDED = [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        pytest.param({"phase": "Pending"}, PodState.PENDING, id="pending"),
        pytest.param({"phase": "Running"}, PodState.RUNNING, id="running"),
        pytest.param({"phase": "Running", "containerStatuses": ENDED}, PodState.ENDED, id="container ended"),
        pytest.param({"phase": "Failed", "reason": "Evicted"}, PodState.ENDED, id="evicted"),
        pytest.param({"phase": "Succeeded"}, PodState.ENDED, id="succeeded"),
    ],
)
def test_a_pods_state_is_read_from_its_status(status: JsonDict, state: PodState) -> None:
    assert pod_state(mover_pod(data_upload(), **status)) is state


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_a_pod_that_is_being_deleted_is_leaving_until_it_ended(phase: str) -> None:
    pod = mover_pod(data_upload(), phase=phase)
    pod["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert pod_state(pod) is PodState.LEAVING


def test_no_pod_is_absent() -> None:
    assert pod_state(None) is PodState.ABSENT


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
    viewer = Viewer(HandClock(), site, Limits(), Slots(1))
    load = data_upload(labels={NODE_LABEL: site.label})
    assert len(site.label) == 63
    assert viewer.look(UPLOADS, UPLOADS.parse(load), None).view.ours


@pytest.mark.parametrize(("seconds", "late"), [(1799, False), (1800, True)], ids=["in time", "late"])
def test_the_prepare_timeout_runs_from_the_accept(seconds: float, late: bool) -> None:
    status = {"phase": "Accepted", "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    assert look(data_upload(node=NODE, status=status), seconds=seconds).late is late
    assert not look(data_upload(node=NODE, status=status | {"phase": "Prepared"}), seconds=seconds).late


def test_an_outcome_is_seen() -> None:
    assert look(data_upload(annotations={OUTCOME_ANNOTATION: '{"phase":"Failed","message":"m"}'})).outcome_kept
    assert not look(data_upload(annotations={OUTCOME_ANNOTATION: "unreadable"})).outcome_kept


@pytest.mark.parametrize("by", ["cancel", "deletion"])
def test_a_stop_is_overdue_an_hour_after_it_was_first_seen(by: str) -> None:
    clock = HandClock()
    viewer = Viewer(clock, Site(NODE, NAMESPACE), Limits(), Slots(1))
    load = data_upload(node=NODE, status={"phase": "Canceling"})
    if by == "cancel":
        load["spec"]["cancel"] = True
    else:
        load["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    cr = UPLOADS.parse(load)
    seen = []
    for clock.seconds in (100.0, 3699.0, 3700.0):
        seen.append(viewer.look(UPLOADS, cr, None).view.stop)
    assert seen == [Stop.ASKED, Stop.ASKED, Stop.OVERDUE]
    assert viewer.seconds_until_overdue(cr) == 0


def test_a_prepared_load_gets_its_turn_when_the_slot_is_freed() -> None:
    slots = Slots(1)
    viewer = Viewer(HandClock(), Site(NODE, NAMESPACE), Limits(), slots)
    first = UPLOADS.parse(data_upload("a", node=NODE, status={"phase": "InProgress"}))
    second = UPLOADS.parse(data_upload("b", node=NODE, status={"phase": "Prepared"}))
    looks = [viewer.look(UPLOADS, cr, None).view.slot for cr in (first, second)]
    viewer.forget(first.uid)
    looks.append(viewer.look(UPLOADS, second, None).view.slot)
    assert looks == [True, False, True]
