"""The recovery step of a transfer, enumerated over every state and every owner."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from core.models.phases import AttemptStage, Phase
from core.models.reasons import PendingReason
from nodeagent.leader.index import Entry
from nodeagent.leader.recovery.orphaned_transfers import OwnerState, RecoveryAction, decide_recovery
from tests.nodeagent.leader.admission.test_writer_queue_reports import entry

ANY = (False, True)


def every_case() -> Iterator[tuple[Entry, OwnerState]]:
    """Yield every transfer with every owner state; without a label no agent can be unavailable."""
    reasons = ("", PendingReason.AGENT_UNAVAILABLE, PendingReason.WAITING_FOR_SLOT)
    states: list[tuple[Phase, AttemptStage | None]] = [
        (phase, None) for phase in Phase if phase is not Phase.IN_PROGRESS
    ]
    states += [(Phase.IN_PROGRESS, stage) for stage in AttemptStage]
    for (phase, stage), label, finalizer, reason, ours in product(states, ("", "node-a"), ANY, reasons, ANY):
        transfer = replace(
            entry("du", phase=phase, node_label=label, finalizer=finalizer, reason=reason, managed=ours), stage=stage
        )
        if phase is Phase.NEW and not ours:
            yield (
                replace(transfer, fault="spec: Field required"),
                OwnerState(unavailable=False, velero=False, node_lost=False, bound=False),
            )
        known = ANY if label else (False,)
        for unavailable, velero, lost, bound in product(known, known, known, ANY):
            yield transfer, OwnerState(unavailable=unavailable, velero=velero, node_lost=lost, bound=bound)


def expected(transfer: Entry, owner: OwnerState) -> RecoveryAction:
    """Return the expected step; the first matching row counts."""
    gone = owner.unavailable or owner.node_lost
    idle = transfer.phase is Phase.ACCEPTED or transfer.stage in set(AttemptStage) - {AttemptStage.RUNNING}
    table = [
        (bool(transfer.fault) and not transfer.node_label, RecoveryAction.REPORT_INVALID),
        (not transfer.managed, RecoveryAction.NOTHING),
        (transfer.phase is Phase.NEW, RecoveryAction.NOTHING),
        (transfer.phase.final and not transfer.finalizer, RecoveryAction.NOTHING),
        (transfer.phase.final and bool(transfer.node_label) and not gone, RecoveryAction.NOTHING),
        (transfer.phase.final, RecoveryAction.CLEAN_UP),
        (not transfer.node_label, RecoveryAction.ADOPT),
        (owner.velero and not idle, RecoveryAction.NOTHING),
        (gone and idle and not owner.bound, RecoveryAction.REASSIGN),
        (owner.node_lost, RecoveryAction.LEAVE_NODE),
        (owner.unavailable, RecoveryAction.WAIT_FOR_AGENT),
        (transfer.reason == "AgentUnavailable", RecoveryAction.CLEAR_REPORT),
        (True, RecoveryAction.NOTHING),
    ]
    return next(action for applies, action in table if applies)


def test_every_case_matches_the_table() -> None:
    for transfer, owner in every_case():
        assert decide_recovery(transfer, owner) is expected(transfer, owner), (transfer, owner)


@pytest.mark.parametrize("action", RecoveryAction, ids=str)
def test_every_step_is_needed_by_some_case(action: RecoveryAction) -> None:
    assert any(decide_recovery(transfer, owner) is action for transfer, owner in every_case())
