"""What is said about a wait, and how often it is looked at."""

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError, InvalidError
from exposer.model import Waiting
from nodeagent.refusals import judge_refusal
from nodeagent.waits import Telling, Waits
from tests.nodeagent.hand_clock import HandClock

UNSCHEDULABLE = Waiting("Unschedulable", "0/3 nodes are available")


def test_looks_become_rarer_up_to_every_five_seconds() -> None:
    waits = Waits(HandClock())
    assert [waits.seconds_to_next_look("a") for _ in range(6)] == [1, 2, 4, 5, 5, 5]


def test_a_reason_is_told_once() -> None:
    waits = Waits(HandClock())
    first = waits.decide_telling("a", UNSCHEDULABLE)
    waits.told("a", UNSCHEDULABLE)
    assert first == Telling(message=True, event=True)
    assert waits.decide_telling("a", UNSCHEDULABLE) == Telling()
    assert waits.last_message("a") == UNSCHEDULABLE.message


def test_another_reason_is_told_at_once_and_looked_at_soon() -> None:
    waits = Waits(HandClock())
    waits.told("a", UNSCHEDULABLE)
    for _ in range(5):
        waits.seconds_to_next_look("a")
    image = Waiting("ImagePullBackOff", "no such image")
    assert waits.decide_telling("a", image) == Telling(message=True, event=True)
    waits.told("a", image)
    assert waits.seconds_to_next_look("a") == 1


def test_other_words_for_the_same_reason_are_written_now_and_then_and_make_no_event() -> None:
    clock = HandClock()
    waits = Waits(clock)
    waits.told("a", UNSCHEDULABLE)
    other = Waiting("Unschedulable", "0/4 nodes are available")
    tellings = []
    for clock.seconds in (9.0, 10.0):
        tellings.append(waits.decide_telling("a", other))
    assert tellings == [Telling(), Telling(message=True)]


def test_a_forgotten_load_starts_anew() -> None:
    waits = Waits(HandClock())
    waits.told("a", UNSCHEDULABLE)
    waits.forget("a")
    assert waits.last_message("a") == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ForbiddenError('pods "x" is forbidden: exceeded quota: q, requested: pods=1'), "QuotaExceeded"),
        (ForbiddenError('pods is forbidden: User "agent" cannot create resource "pods"'), "Forbidden"),
        (ForbiddenError('pods "x" is forbidden: error looking up service account velero/node-agent'), "Forbidden"),
    ],
    ids=["quota", "rights", "service account"],
)
def test_a_refusal_that_may_heal_is_waited_for(error: ForbiddenError, reason: str) -> None:
    assert judge_refusal(error) == Waiting(reason, str(error))


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
