"""Runs the state machine for a number of steps."""

import itertools
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.retention.machine import RetentionMachine

STEPS_EACH = 50
"""Steps of one machine, at most: each begins with a new cluster."""


def run_machine(machines: int, *, seed: int) -> int:
    """Run so many machines, and return how many steps they took; the smallest sequence that fails is printed."""
    before = RetentionMachine.steps
    RetentionMachine._hypothesis_internal_use_seed = seed
    numbers = itertools.count()
    # Objects are listed by name: what failed once would not fail again if names were random.
    with patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"):
        run_state_machine_as_test(
            RetentionMachine,
            settings=settings(
                max_examples=machines,
                stateful_step_count=STEPS_EACH,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
    return RetentionMachine.steps - before
