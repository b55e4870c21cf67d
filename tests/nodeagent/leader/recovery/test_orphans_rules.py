"""The recovery step of a transfer, enumerated over every state and every owner."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from core.models.phases import Phase
from core.models.reasons import PendingReason
from nodeagent.leader.index import Entry
from nodeagent.leader.recovery.orphans import OwnerState, RecoveryAction, decide_recovery
from tests.nodeagent.leader.admission.test_queue import entry

ANY = (False, True)


def every_case() -> Iterator[tuple[Entry, OwnerState]]:
    """Yield every transfer with every owner state; without a label no agent can be unavailable."""
    reasons = ("", PendingReason.AGENT_UNAVAILABLE, PendingReason.WAITING_FOR_SLOT)
    for phase, label, finalizer, reason, ours in product(Phase, ("", "node-a"), ANY, reasons, ANY):
        load = entry("du", phase=phase, node_label=label, finalizer=finalizer, reason=reason, managed=ours)
        if phase is Phase.NEW and not ours:
            yield (
                replace(load, fault="spec: Field required"),
                OwnerState(unavailable=False, node_lost=False, bound=False),
            )
        for away, lost, bound in product(ANY if label else (False,), ANY if label else (False,), ANY):
            yield load, OwnerState(unavailable=away, node_lost=lost, bound=bound)


def expected(load: Entry, owner: OwnerState) -> RecoveryAction:
    """Return the expected step; the first matching row counts."""
    gone = owner.unavailable or owner.node_lost
    table = [
        (bool(load.fault) and not load.node_label, RecoveryAction.REPORT_INVALID),
        (not load.managed, RecoveryAction.NOTHING),
        (load.phase is Phase.NEW, RecoveryAction.NOTHING),
        (load.phase.final and not load.finalizer, RecoveryAction.NOTHING),
        (load.phase.final and bool(load.node_label) and not gone, RecoveryAction.NOTHING),
        (load.phase.final, RecoveryAction.CLEAN_UP),
        (not load.node_label, RecoveryAction.ADOPT),
        (gone and load.phase is Phase.ACCEPTED and not owner.bound, RecoveryAction.REASSIGN),
        (owner.node_lost, RecoveryAction.END),
        (owner.unavailable, RecoveryAction.WAIT_FOR_AGENT),
        (load.reason == "AgentUnavailable", RecoveryAction.CLEAR_REPORT),
        (True, RecoveryAction.NOTHING),
    ]
    return next(care for applies, care in table if applies)


def test_every_case_matches_the_table() -> None:
    for load, owner in every_case():
        assert decide_recovery(load, owner) is expected(load, owner), (load, owner)


@pytest.mark.parametrize("care", RecoveryAction, ids=str)
def test_every_step_is_needed_by_some_case(care: RecoveryAction) -> None:
    assert any(decide_recovery(load, owner) is care for load, owner in every_case())
