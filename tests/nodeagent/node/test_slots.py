"""The slots of a node."""

from datetime import UTC, datetime, timedelta

import pytest

from core.models.phases import Phase
from nodeagent.node.slots import Claim, Slots

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def claim(uid: str, minute: int = 0) -> Claim:
    return Claim(NOON + timedelta(minutes=minute), ("DataUpload", "velero", uid), uid)


def test_the_first_accepted_starts_first() -> None:
    slots = Slots(1)
    slots.observe(claim("late", 2), Phase.PREPARED)
    slots.observe(claim("early", 1), Phase.PREPARED)
    assert [slots.take("late"), slots.take("early")] == [False, True]


def test_loads_accepted_at_the_same_moment_go_by_name() -> None:
    slots = Slots(1)
    for uid in ("b", "a"):
        slots.observe(claim(uid), Phase.PREPARED)
    assert [c.uid for c in slots.next_claims()] == ["a"]


def test_what_runs_after_a_restart_counts_before_anything_starts() -> None:
    slots = Slots(2)
    for uid, phase in (("a", Phase.IN_PROGRESS), ("b", Phase.CANCELING), ("c", Phase.PREPARED)):
        slots.observe(claim(uid), phase)
    assert not slots.take("c")
    assert (slots.used, slots.waiting) == (2, 1)


def test_a_late_sight_of_an_older_phase_frees_nothing() -> None:
    slots = Slots(1)
    slots.observe(claim("a"), Phase.PREPARED)
    assert slots.take("a")
    slots.observe(claim("a"), Phase.PREPARED)
    slots.observe(claim("b"), Phase.PREPARED)
    assert [slots.take("b"), slots.take("a")] == [False, True]


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED, Phase.CANCELED], ids=str)
def test_an_end_frees_the_slot_at_once(phase: Phase) -> None:
    slots = Slots(1)
    slots.observe(claim("a"), Phase.IN_PROGRESS)
    slots.observe(claim("b"), Phase.PREPARED)
    slots.observe(claim("a"), phase)
    assert slots.take("b")


def test_a_load_that_went_away_gives_its_place_in_the_line_to_the_next() -> None:
    slots = Slots(1)
    slots.observe(claim("a", 1), Phase.PREPARED)
    slots.observe(claim("b", 2), Phase.PREPARED)
    slots.forget("a")
    assert [c.uid for c in slots.next_claims()] == ["b"]


def test_more_may_run_than_the_limit_when_they_did_before() -> None:
    slots = Slots(1)
    for uid in ("a", "b"):
        slots.observe(claim(uid), Phase.IN_PROGRESS)
    slots.observe(claim("c"), Phase.PREPARED)
    assert slots.used == 2
    assert slots.next_claims() == []


def test_whoever_comes_before_all_that_wait_finds_a_free_slot() -> None:
    slots = Slots(2)
    slots.observe(claim("runs"), Phase.IN_PROGRESS)
    slots.observe(claim("waits", 2), Phase.PREPARED)
    assert [slots.has_none_for(claim(uid, minute)) for uid, minute in (("early", 1), ("late", 3))] == [False, True]
    slots.observe(claim("runs too"), Phase.IN_PROGRESS)
    assert slots.has_none_for(claim("early", 1))
