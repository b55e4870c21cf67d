"""The table of phase transitions."""

import pytest

from core.models.phases import FINAL_PHASES, HOLDING_PHASES, TRANSITIONS, Phase


def test_every_phase_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(Phase)


@pytest.mark.parametrize("phase", sorted(FINAL_PHASES))
def test_nothing_leaves_a_final_phase(phase: Phase) -> None:
    assert phase.final
    assert TRANSITIONS[phase] == frozenset()


@pytest.mark.parametrize("phase", sorted(set(Phase) - FINAL_PHASES))
def test_every_other_phase_may_fail_and_be_canceled(phase: Phase) -> None:
    assert not phase.final
    assert {Phase.FAILED, Phase.CANCELED} <= TRANSITIONS[phase]
    assert phase not in TRANSITIONS[phase]


def test_phases_never_go_back() -> None:
    order = [Phase.NEW, Phase.ACCEPTED, Phase.PREPARED, Phase.IN_PROGRESS, Phase.CANCELING]
    for phase, targets in TRANSITIONS.items():
        for target in targets - FINAL_PHASES:
            assert order.index(target) == order.index(phase) + 1


def test_only_accepted_and_prepared_count_toward_the_quota() -> None:
    assert {Phase.ACCEPTED, Phase.PREPARED} == HOLDING_PHASES
