"""A sample of the state machine: `make retention-machine` takes 10,000 steps."""

import pytest

from tests.retention.machine import STEPS_EACH, run_machine


@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_events_takes_the_last_copy(seed: int) -> None:
    assert run_machine(8, seed=seed) >= STEPS_EACH
