"""Timers measure from the first observation, whatever any wall clock shows."""

from datetime import timedelta

import pytest

from nodeagent.runtime.workqueue import Timers
from tests.nodeagent.support.hand_clock import HandClock

DAY = timedelta(hours=24)


@pytest.mark.parametrize("skew", [-DAY, DAY], ids=["a day behind", "a day ahead"])
def test_a_timer_begins_with_the_first_observation(skew: timedelta) -> None:
    clock = HandClock(100.0)
    timers = Timers(clock)
    assert timers.seconds("uid") == 0.0
    clock.seconds, clock.skew = 101.0, skew
    assert timers.seconds("uid") == 1.0
    clock.seconds = 700.0
    assert timers.seconds("uid") == 600.0


def test_a_timer_begins_again_when_something_else_is_observed() -> None:
    clock = HandClock()
    timers = Timers(clock)
    timers.seconds("uid", "deletion of a")
    clock.seconds = 60.0
    assert timers.seconds("uid", "deletion of b") == 0.0
    clock.seconds = 61.0
    assert timers.seconds("uid", "deletion of b") == 1.0
    assert timers.seconds("uid", "deletion of a") == 0.0


def test_only_retained_timers_take_memory() -> None:
    clock = HandClock()
    timers = Timers(clock)
    for key in ("a", "b", "c"):
        timers.seconds(key)
    timers.forget("a")
    timers.forget("unknown")
    timers.retain({"c", "d"})
    clock.seconds = 5.0
    assert len(timers) == 1
    assert timers.seconds("c") == 5.0
