"""What a load without a working owner needs, over everything there is to see of it."""

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
    """Yield every load with every owner; without a label there is none to be away."""
    reasons = ("", PendingReason.AGENT_UNAVAILABLE, PendingReason.WAITING_FOR_SLOT)
    for phase, label, finalizer, reason, ours in product(Phase, ("", "node-a"), ANY, reasons, ANY):
        load = entry("du", phase=phase, node_label=label, finalizer=finalizer, reason=reason, managed=ours)
        if phase is Phase.NEW and not ours:
            yield replace(load, fault="spec: Field required"), OwnerState(away=False, node_lost=False, bound=False)
        for away, lost, bound in product(ANY if label else (False,), ANY if label else (False,), ANY):
            yield load, OwnerState(away=away, node_lost=lost, bound=bound)


def expected(load: Entry, owner: OwnerState) -> RecoveryAction:
    """Return what is to be done, as a table that is read from above."""
    gone = owner.away or owner.node_lost
    table = [
        (bool(load.fault) and not load.node_label, RecoveryAction.EXPLAIN),
        (not load.managed, RecoveryAction.NOTHING),
        (load.phase is Phase.NEW, RecoveryAction.NOTHING),
        (load.phase.final and not load.finalizer, RecoveryAction.NOTHING),
        (load.phase.final and bool(load.node_label) and not gone, RecoveryAction.NOTHING),
        (load.phase.final, RecoveryAction.CLEAN_UP),
        (not load.node_label, RecoveryAction.ADOPT),
        (gone and load.phase is Phase.ACCEPTED and not owner.bound, RecoveryAction.REASSIGN),
        (owner.node_lost, RecoveryAction.END),
        (owner.away, RecoveryAction.AWAIT),
        (load.reason == "AgentUnavailable", RecoveryAction.WELCOME),
        (True, RecoveryAction.NOTHING),
    ]
    return next(care for applies, care in table if applies)


def test_every_case_gets_what_the_table_says() -> None:
    for load, owner in every_case():
        assert decide_recovery(load, owner) is expected(load, owner), (load, owner)


@pytest.mark.parametrize("care", RecoveryAction, ids=str)
def test_every_care_is_needed_by_some_load(care: RecoveryAction) -> None:
    assert any(decide_recovery(load, owner) is care for load, owner in every_case())
