"""The slots of a node."""

from datetime import UTC, datetime, timedelta

import pytest

from core.models.phases import Phase
from nodeagent.node.steps import SlotRequest, Slots

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def request_of(uid: str, minute: int = 0) -> SlotRequest:
    return SlotRequest(NOON + timedelta(minutes=minute), ("DataUpload", "velero", uid), uid)


def test_the_first_accepted_transfer_starts_first() -> None:
    slots = Slots(1)
    slots.observe(request_of("late", 2), Phase.PREPARED)
    slots.observe(request_of("early", 1), Phase.PREPARED)
    assert [slots.acquire("late"), slots.acquire("early")] == [False, True]


def test_transfers_accepted_at_the_same_time_are_sorted_by_name() -> None:
    slots = Slots(1)
    for uid in ("b", "a"):
        slots.observe(request_of(uid), Phase.PREPARED)
    assert [request.uid for request in slots.next_requests()] == ["a"]


def test_running_transfers_count_after_a_restart_before_another_one_starts() -> None:
    slots = Slots(2)
    for uid, phase in (("a", Phase.IN_PROGRESS), ("b", Phase.CANCELING), ("c", Phase.PREPARED)):
        slots.observe(request_of(uid), phase)
    assert not slots.acquire("c")
    assert (slots.used, slots.pending) == (2, 1)


def test_an_outdated_observation_of_an_earlier_phase_frees_nothing() -> None:
    slots = Slots(1)
    slots.observe(request_of("a"), Phase.PREPARED)
    assert slots.acquire("a")
    slots.observe(request_of("a"), Phase.PREPARED)
    slots.observe(request_of("b"), Phase.PREPARED)
    assert [slots.acquire("b"), slots.acquire("a")] == [False, True]


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED, Phase.CANCELED], ids=str)
def test_a_final_phase_frees_the_slot_at_once(phase: Phase) -> None:
    slots = Slots(1)
    slots.observe(request_of("a"), Phase.IN_PROGRESS)
    slots.observe(request_of("b"), Phase.PREPARED)
    slots.observe(request_of("a"), phase)
    assert slots.acquire("b")


def test_the_next_request_takes_the_slot_of_a_deleted_transfer() -> None:
    slots = Slots(1)
    slots.observe(request_of("a", 1), Phase.PREPARED)
    slots.observe(request_of("b", 2), Phase.PREPARED)
    slots.release("a")
    assert [request.uid for request in slots.next_requests()] == ["b"]


def test_a_prepared_transfer_gets_the_slot_that_is_released() -> None:
    slots = Slots(1)
    slots.observe(request_of("a"), Phase.IN_PROGRESS)
    slots.observe(request_of("b"), Phase.PREPARED)
    assert [slots.is_available_to(uid) for uid in ("a", "b")] == [True, False]
    slots.release("a")
    assert slots.is_available_to("b")


def test_more_transfers_than_the_limit_may_run_if_they_ran_before() -> None:
    slots = Slots(1)
    for uid in ("a", "b"):
        slots.observe(request_of(uid), Phase.IN_PROGRESS)
    slots.observe(request_of("c"), Phase.PREPARED)
    assert slots.used == 2
    assert slots.next_requests() == []


def test_a_request_before_all_pending_ones_gets_the_free_slot() -> None:
    slots = Slots(2)
    slots.observe(request_of("running"), Phase.IN_PROGRESS)
    slots.observe(request_of("pending", 2), Phase.PREPARED)
    full = [slots.is_full_for(request_of(uid, minute)) for uid, minute in (("early", 1), ("late", 3))]
    assert full == [False, True]
    slots.observe(request_of("running too"), Phase.IN_PROGRESS)
    assert slots.is_full_for(request_of("early", 1))
