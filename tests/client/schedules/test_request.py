"""A schedule's name, times and PVCs, checked before anything is created."""

from datetime import UTC, datetime, timedelta

import pytest

from client.backups.plan import Choice
from client.schedules.request import ScheduleRequest, ScheduleTimes
from core.errors import ConfigError
from tests.nodeagent.support.hand_clock import NOON


@pytest.mark.parametrize("name", ["night", "a.b-1", "n" * 48])
def test_a_name_that_a_cron_job_can_have_is_valid(name: str) -> None:
    request = ScheduleRequest(name, "velero", Choice())
    request.check()
    assert len(f"{request.name}-20261121120000") <= 63


def test_a_reserved_label_is_an_error() -> None:
    ScheduleRequest("night", "velero", Choice(), labels={"team": "a"}).check()
    with pytest.raises(ConfigError, match=r"--annotations: velero\.io/x is reserved"):
        ScheduleRequest("night", "velero", Choice(), annotations={"velero.io/x": "a"}).check()


@pytest.mark.parametrize("name", ["", "Night", "a_b", "-a", "a/b", "n" * 49])
def test_any_other_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a schedule: up to 48 lowercase letters"):
        ScheduleRequest(name, "velero", Choice()).check()


@pytest.mark.parametrize(
    ("times", "error"),
    [
        (ScheduleTimes("0 2 * *"), '--schedule: "0 2 [*] [*]" is no cron expression .*: found 4 instead of 5 fields'),
        (ScheduleTimes("0 25 * * *"), "--schedule: .*: 25 is not from 0 to 23"),
        (ScheduleTimes("0 0 30 2 *"), "--schedule: .*: no such day"),
        (ScheduleTimes("@every 1h"), "--schedule: .*"),
        (ScheduleTimes("CRON_TZ=UTC 0 2 * * *"), "--schedule: .* has a time zone: set --time-zone"),
        (ScheduleTimes("TZ=UTC 0 2 * * *"), "--schedule: .* has a time zone: set --time-zone"),
        (ScheduleTimes("@daily", "Europe/Berln"), "--time-zone: no time zone: Europe/Berln"),
    ],
    ids=str,
)
def test_invalid_times_are_an_error_that_names_the_flag(times: ScheduleTimes, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        times.check()
    assert times.next_after(NOON) is None or times.schedule.startswith(("CRON_TZ", "TZ"))


def test_the_next_run_is_in_the_time_zone() -> None:
    ScheduleTimes("0 2 * * *", "Europe/Berlin").check()
    assert ScheduleTimes("0 2 * * *", "Europe/Berlin").next_after(NOON) == datetime(2026, 11, 22, 1, tzinfo=UTC)
    assert ScheduleTimes("@daily").next_after(NOON) == datetime(2026, 11, 22, tzinfo=UTC)
    assert ScheduleTimes("0 2 * * 1").longest_pause(NOON) == timedelta(days=7)
