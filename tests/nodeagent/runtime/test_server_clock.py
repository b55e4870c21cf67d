"""The clock of an API server: which Dates count, and how far they must differ."""

from datetime import timedelta

import pytest

from nodeagent.runtime.server_clock import ServerClock
from tests.nodeagent.runtime.test_api_server import DATE, DAY
from tests.nodeagent.support.hand_clock import NOON, HandClock


@pytest.mark.parametrize("seconds", [-2, -1, 1, 2])
def test_a_date_that_hardly_differs_changes_nothing(seconds: int) -> None:
    server = ServerClock(HandClock(skew=timedelta(seconds=seconds)), least=timedelta(seconds=2))
    assert server.take(DATE) == NOON
    assert server.now() == NOON + timedelta(seconds=seconds if abs(seconds) < 2 else 0)


@pytest.mark.parametrize("date", ["", "soon", "Sat, 99 Nov 2026 12:00:00 GMT", "Sat, 21 Nov 2026 12:00:00"])
def test_an_invalid_date_changes_nothing(date: str) -> None:
    server = ServerClock(HandClock(skew=DAY))
    assert server.take(date) is None
    assert server.now() == NOON + DAY
