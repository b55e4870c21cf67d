"""What is said about a wait, and how often it is looked at."""

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError, ServerError
from exposer.model import Pending
from nodeagent.node.steps import judge_refusal
from nodeagent.transfers.pending import Telling, Waits
from tests.nodeagent.support.hand_clock import HandClock

UNSCHEDULABLE = Pending("Unschedulable", "0/3 nodes are available")


def test_looks_become_rarer_up_to_every_five_seconds() -> None:
    waits = Waits(HandClock())
    assert [waits.seconds_to_next_look("a") for _ in range(6)] == [1, 2, 4, 5, 5, 5]


def test_reasons_that_take_turns_are_no_loop() -> None:
    clock = HandClock()
    waits = Waits(clock)
    looks = 0
    while clock.seconds < 600:
        waits.decide_telling("a", UNSCHEDULABLE if looks % 2 else IMAGE)
        clock.seconds += waits.seconds_to_next_look("a")
        looks += 1
    # Every five seconds, and six quick ones a minute.
    assert looks <= 600 / 5 + 6 * 10


def telling(waits: Waits, waiting: Pending) -> Telling:
    """Return what is to be said about `waiting`, and note that it was said."""
    said = waits.decide_telling("a", waiting)
    if said.message:
        waits.told("a", waiting)
    return said


IMAGE = Pending("ImagePullBackOff", "no such image")
ALL = Telling(message=True, event=True)


def test_a_reason_is_told_once_and_not_before_it_lasts() -> None:
    clock = HandClock()
    waits = Waits(clock)
    said = []
    for clock.seconds in (0.0, 2.9, 3.0, 100.0):
        said.append(telling(waits, UNSCHEDULABLE))
    assert said == [Telling(), Telling(), ALL, Telling()]


def test_a_wait_that_is_soon_over_is_known_but_never_told() -> None:
    waits = Waits(HandClock())
    telling(waits, UNSCHEDULABLE)
    assert waits.last_message("a") == UNSCHEDULABLE.message
    assert not waits.is_told("a", UNSCHEDULABLE.reason)


def test_another_reason_is_told_in_its_turn_and_looked_at_soon() -> None:
    clock = HandClock()
    waits = Waits(clock)
    said = []
    for clock.seconds, waiting in ((0.0, UNSCHEDULABLE), (5.0, UNSCHEDULABLE), (10.0, IMAGE), (13.0, IMAGE)):
        said.append(telling(waits, waiting))
        pause = waits.seconds_to_next_look("a")
    assert said == [Telling(), ALL, Telling(), ALL]
    assert pause == 2
    assert waits.is_told("a", IMAGE.reason)


def test_other_words_for_the_same_reason_are_written_now_and_then_and_make_no_event() -> None:
    clock = HandClock()
    waits = Waits(clock)
    waits.told("a", UNSCHEDULABLE)
    other = Pending("Unschedulable", "0/4 nodes are available")
    said = []
    for clock.seconds in (9.0, 10.0):
        said.append(telling(waits, other))
    assert said == [Telling(), Telling(message=True)]


TAINT = Pending("Unschedulable", "0/3 nodes are available: 3 had untolerated taint", blocked=True)
MORE_NODES = Pending("Unschedulable", "0/4 nodes are available: 4 had untolerated taint", blocked=True)
FULL = Pending("Unschedulable", "0/4 nodes are available: 4 Insufficient cpu", blocked=True)


def test_trouble_is_told_at_once() -> None:
    assert telling(Waits(HandClock()), TAINT) == ALL


def test_another_cause_of_the_same_reason_is_told_at_the_next_look_and_other_numbers_are_none() -> None:
    clock = HandClock()
    waits = Waits(clock)
    said = []
    for clock.seconds, waiting in ((0.0, TAINT), (5.0, MORE_NODES), (10.0, MORE_NODES), (12.0, FULL), (15.0, FULL)):
        said.append(telling(waits, waiting))
    assert said == [ALL, Telling(), Telling(message=True), Telling(), ALL]


def test_a_forgotten_load_starts_anew() -> None:
    waits = Waits(HandClock())
    waits.decide_telling("a", UNSCHEDULABLE)
    waits.forget("a")
    assert waits.last_message("a") == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ForbiddenError('pods "x" is forbidden: exceeded quota: q, requested: pods=1'), "QuotaExceeded"),
        (ForbiddenError('pods is forbidden: User "agent" cannot create resource "pods"'), "Forbidden"),
        (ForbiddenError('pods "x" is forbidden: error looking up service account velero/node-agent'), "Forbidden"),
        (ServerError('Internal error occurred: failed calling webhook "p": connection refused'), "ApiServerError"),
    ],
    ids=["quota", "rights", "service account", "webhook"],
)
def test_a_refusal_that_may_heal_is_waited_for(error: ForbiddenError | ServerError, reason: str) -> None:
    assert judge_refusal(error) == Pending(reason, str(error), blocked=True)


@pytest.mark.parametrize(
    "error",
    [
        InvalidError('Pod "x" is invalid: spec.containers[0].image: Required value', status=422),
        ForbiddenError('pods "x" is forbidden: violates PodSecurity "baseline:latest": privileged'),
        ForbiddenError('admission webhook "policy.example.com" denied the request: no hostPath'),
        ForbiddenError("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
        ForbiddenError('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'),
    ],
    ids=["validation", "pod security", "webhook", "policy", "limit range"],
)
def test_a_refusal_of_the_object_itself_is_final(error: ForbiddenError | InvalidError) -> None:
    with pytest.raises(ExposeError, match=r"."):
        judge_refusal(error)
