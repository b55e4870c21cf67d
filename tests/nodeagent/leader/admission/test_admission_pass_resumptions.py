"""Which interrupted transfers begin their next attempt, enumerated over what the others and the cluster allow."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from core.models.phases import AttemptStage, InterruptionCause, Phase
from nodeagent.leader.admission.admission_pass import Resumptions, awaited_locations, plan_resumptions
from nodeagent.leader.index import Entry
from tests.nodeagent.support.dispatching import entry

AGENTS = {"a": "node-a", "b": "node-b"}
ANY = (False, True)
LAST = "begins after another transfer's on node node-a"
FULL = "is queued before all New transfers: prepareQueueLength (1) reached"
SILENT = "begins once BackupStorageLocation s3 answers"


def waiting(name: str, label: str = "a", *, outage: bool = False, **others: Any) -> Entry:
    """Return an interrupted transfer whose next attempt may begin."""
    cause = InterruptionCause.STORAGE_UNAVAILABLE if outage else InterruptionCause.EVICTED
    found = entry(name, phase=Phase.IN_PROGRESS, node_label=label, location="s3", **others)
    return replace(found, stage=AttemptStage.READY, interrupted_by=cause)


def plan(*entries: Entry, reserved: tuple[str, ...] = (), limit: int | None = 5, answers: bool = True) -> Resumptions:
    answering = {"s3"} if answers else set[str]()
    return plan_resumptions(entries, frozenset(reserved), limit=limit, agents=AGENTS, answering=answering)


def started(found: Resumptions) -> list[str]:
    return [one.name for one in found.start]


def messages(found: Resumptions) -> dict[str, str]:
    return {uid: pending.message for uid, pending in found.waiting.items()}


def every_case() -> Iterator[tuple[list[Entry], frozenset[str], int | None, bool]]:
    """Yield every combination of two transfers, their reservations, one that is exposed, quota and storage."""
    shapes = [
        {"label": label, "outage": outage, "stop": stop, "bound": bound}
        for label, outage, stop, bound in product(("a", "gone"), ANY, ANY, ANY)
    ]
    for first, second, exposing, held, limit, answers in product(
        shapes, shapes, ANY, product(ANY, ANY), (None, 0, 1, 2), ANY
    ):
        entries = [waiting("old", created="2026-11-21T10:00:00Z", **first), waiting("new", **second)]  # type: ignore[arg-type] # a table
        reserved = {one.uid for one, has in zip(entries, held, strict=True) if has}
        if exposing:
            entries.append(replace(waiting("exposing"), stage=AttemptStage.EXPOSING))
            reserved.add("exposing")
        yield entries, frozenset(reserved), limit, answers


def test_no_case_exceeds_the_quota_or_begins_two_of_a_node_or_keeps_an_unusable_reservation() -> None:
    for entries, reserved, limit, answers in every_case():
        found = plan(*entries, reserved=tuple(reserved), limit=limit, answers=answers)
        names, released = set(started(found)), {one.name for one in found.release}
        case = (entries, reserved, limit, answers)
        if limit is not None:
            assert len(reserved | names) <= max(limit, len(reserved)), case
        on_node = [*found.start, *(one for one in entries if one.stage is AttemptStage.EXPOSING)]
        assert len({one.node_label for one in on_node}) == len(on_node), case
        assert all(one.node_label in ("a" if one.bound else AGENTS) for one in found.start), case
        ready = {one.name: one for one in entries if one.stage is AttemptStage.READY}
        assert released == (reserved & ready.keys()) - names, case
        assert not names & found.waiting.keys(), case
        for name, one in ready.items():
            able = not one.stop and one.node_label == "a" and (answers or one not in _of_outage(entries))
            assert able or name not in names, case
            assert (name in names or name in found.waiting) == (not one.stop and one.node_label == "a"), case


def _of_outage(entries: list[Entry]) -> list[Entry]:
    return [one for one in entries if one.interrupted_by is InterruptionCause.STORAGE_UNAVAILABLE]


def test_the_oldest_goes_first_and_one_of_each_node_at_a_time() -> None:
    entries = [
        waiting("a2", created="2026-11-21T10:00:02Z", bound=True),
        waiting("b1", "b", created="2026-11-21T10:00:03Z"),
        waiting("a1", created="2026-11-21T10:00:01Z"),
    ]
    found = plan(*entries)
    assert started(found) == ["a1", "b1"]
    assert messages(found) == {"a2": LAST}


def test_one_that_any_node_can_carry_out_begins_on_the_agent_with_the_fewest() -> None:
    entries = [
        waiting("first", created="2026-11-21T10:00:00Z"),
        waiting("second", created="2026-11-21T10:00:01Z"),
        waiting("third"),
        entry("idle", phase=Phase.ACCEPTED, node_label="b"),
    ]
    agents = AGENTS | {"c": "node-c", "d": "node-d"}
    found = plan_resumptions(entries, frozenset(), limit=None, agents=agents, answering=set(), passed_over={"d"})
    assert [(one.name, one.node_label) for one in found.start] == [("first", "a"), ("second", "c"), ("third", "b")]


@pytest.mark.parametrize("bound", ANY)
@pytest.mark.parametrize("reason", ["WaitingForSlot", "Scheduling"])
def test_one_that_has_a_mover_and_waits_for_a_slot_delays_those_of_its_node_only(reason: str, *, bound: bool) -> None:
    exposing = [replace(waiting(f"at-{label}", label, reason=reason), stage=AttemptStage.EXPOSING) for label in AGENTS]
    found = plan(*exposing, waiting("next", bound=bound))
    begins = reason == "WaitingForSlot" and not bound
    assert (started(found), messages(found)) == ((["next"], {}) if begins else ([], {"next": LAST}))


def test_one_with_a_reservation_goes_before_an_older_one() -> None:
    older = waiting("older", created="2026-11-21T10:00:00Z")
    found = plan(waiting("held"), older, reserved=("held",), limit=1)
    assert (started(found), messages(found)) == (["held"], {"older": FULL})
    found = plan(waiting("held"), replace(older, bound=True), reserved=("held",), limit=1)
    assert (started(found), messages(found)) == (["held"], {"older": LAST})


def test_what_it_waits_for_first_does_not_depend_on_its_location() -> None:
    exposing = replace(waiting("exposing"), stage=AttemptStage.EXPOSING)
    for answers in ANY:
        found = plan(exposing, waiting("next", outage=True, bound=True), answers=answers)
        assert messages(found) == {"next": LAST}
        assert messages(plan(waiting("next", outage=True), limit=0, answers=answers))["next"].startswith("is queued")


def test_one_that_waits_for_its_location_delays_no_other_of_its_node() -> None:
    entries = [waiting("silent", outage=True, created="2026-11-21T10:00:00Z"), waiting("other")]
    found = plan(*entries, answers=False)
    assert (started(found), messages(found)) == (["other"], {"silent": SILENT})
    assert awaited_locations(entries) == {"s3"}


@pytest.mark.parametrize(
    "changed",
    [
        {"interrupted_by": InterruptionCause.EVICTED},
        {"stage": AttemptStage.WAITING},
        {"stage": AttemptStage.EXPOSING},
        {"stop": True},
    ],
    ids=["another cause", "not yet", "begun", "canceled"],
)
def test_no_other_transfer_waits_for_a_location(changed: dict[str, object]) -> None:
    assert awaited_locations([replace(waiting("a", outage=True), **changed)]) == set()  # type: ignore[arg-type] # a table


def test_transfers_of_another_data_mover_are_left_alone() -> None:
    assert plan(waiting("theirs", managed=False)) == Resumptions()
