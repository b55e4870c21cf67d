"""The clock of an agent, which tests may move."""

from datetime import UTC, datetime, timedelta

import pytest

from core.errors import ConfigError
from nodeagent.startup import build_clock

VARIABLE = "NODE_AGENT_CLOCK_OFFSET"


@pytest.mark.parametrize(
    ("environment", "offset"),
    [
        pytest.param({}, timedelta(), id="none"),
        pytest.param({VARIABLE: ""}, timedelta(), id="empty"),
        pytest.param({VARIABLE: "24h"}, timedelta(hours=24), id="ahead"),
        pytest.param({VARIABLE: "-24h"}, timedelta(hours=-24), id="behind"),
    ],
)
def test_only_the_wall_clock_is_moved(
    environment: dict[str, str], offset: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    clock, before = build_clock(environment), build_clock({}).monotonic()
    assert abs(clock.now() - datetime.now(UTC) - offset) < timedelta(minutes=1)
    assert 0 <= clock.monotonic() - before < 60
    assert [VARIABLE in record.getMessage() for record in caplog.records] == ([True] if offset else [])


def test_an_offset_that_is_no_duration_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f'{VARIABLE}: not a duration such as 30s, 10m or 1h30m: "a day"'):
        build_clock({VARIABLE: "a day"})
