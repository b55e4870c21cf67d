"""The tests of the rules detect every small change to them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import nodeagent.leader.recovery.orphans as orphans_module
import nodeagent.node.lifecycle as lifecycle_module
from nodeagent.leader.recovery.orphans import decide_recovery
from nodeagent.node.lifecycle import Action, View, decide
from tests.nodeagent.leader.recovery.test_orphans_rules import every_case, expected
from tests.nodeagent.node.test_lifecycle import TABLE, every_view
from tests.support.mutants import build_mutants

LEAST_MUTANTS = 90


def action_of(view: View) -> Action:
    """Return what the table of the tests says about `view`."""
    (row,) = [row for row in TABLE if row.covers(view)]
    return row.action


def passes(function: Callable[..., Any], cases: Iterable[tuple[tuple[Any, ...], Any]]) -> bool:
    """Whether `function` gives what is expected in each of `cases`: arguments, and the answer."""
    try:
        return all(function(*arguments) is answer for arguments, answer in cases)
    except Exception:  # noqa: BLE001 - a change that makes a rule raise is detected as well
        return False


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_every_change_to_the_life_cycle_is_detected() -> None:
    cases = [((view,), action_of(view)) for view in every_view()]
    assert passes(decide, cases)
    mutants = list(build_mutants(inspect.getsource(lifecycle_module), "decide", vars(lifecycle_module)))
    assert len(mutants) >= LEAST_MUTANTS
    assert [mutant.what for mutant in mutants if passes(mutant.function, cases)] == []


def test_every_change_to_the_recovery_of_orphaned_transfers_is_detected() -> None:
    cases = [((transfer, owner), expected(transfer, owner)) for transfer, owner in every_case()]
    assert passes(decide_recovery, cases)
    mutants = list(build_mutants(inspect.getsource(orphans_module), "decide_recovery", vars(orphans_module)))
    assert len(mutants) >= LEAST_MUTANTS
    assert [mutant.what for mutant in mutants if passes(mutant.function, cases)] == []
