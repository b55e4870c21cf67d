"""Windows by cron schedules: the syntax of CronJobs, changes of the clock, several windows."""

from datetime import UTC, datetime, timedelta

import pytest

from nodeagent.config.windows import Window, is_open, next_start, parse_interval, parse_schedule, parse_time_zone


def window(schedule: str, duration: timedelta, zone: str = "UTC") -> Window:
    return Window(parse_schedule(schedule), parse_time_zone(zone), duration)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def starts(of: Window, after: str, count: int) -> list[str]:
    found, moment = [], at(after)
    for _ in range(count):
        start = of.start_after(moment)
        assert start is not None
        moment = start
        found.append(moment.strftime("%m-%dT%H:%M"))
    return found


HOURS = timedelta(hours=1)
NIGHT = window("0 22 * * *", 6 * HOURS)
BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("schedule", "plain"),
    [
        ("  0\t22 * *   * ", "0 22 * * *"),
        ("*/15 0-6/2 1,15 JAN-mar Mon-Fri", "0,15,30,45 0,2,4,6 1,15 1,2,3 1,2,3,4,5"),
        ("0 0 ? * ?", "0 0 * * *"),
        ("0 0 */1 * 3,*", "0 0 * * *"),
        ("0 0 * * 1/2", "0 0 * * 1,3,5"),
        ("5-5/10 3/12 * * SUN", "5 3,15 * * 0"),
        ("@weekly", "0 0 * * 0"),
        ("@hourly", "0 * * * *"),
        ("0 0 29 2 *", "0 0 29 2 *"),
    ],
)
def test_a_schedule_is_read_as_cron_jobs_read_it(schedule: str, plain: str) -> None:
    assert parse_schedule(schedule) == plain


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("", "found 0 instead of 5 fields"),
        ("@every 6h", "found 2 instead of 5 fields"),
        ("@reboot", "found 1 instead of 5 fields"),
        ("@Daily", "found 1 instead of 5 fields"),
        ("TZ=UTC 0 22 * * *", "found 6 instead of 5 fields"),
        ("60 22 * * *", "60 is not from 0 to 59"),
        ("0 24 * * *", "24 is not from 0 to 23"),
        ("0 22 0 * *", "0 is not from 1 to 31"),
        ("0 22 * 13 *", "13 is not from 1 to 12"),
        ("0 22 * * 7", "7 is not from 0 to 6"),
        ("0 22 * * MON#1", "not a number, range or step"),
        ("0 22 * jun-xyz *", 'not a name: "xyz"'),
        ("0 22,,23 * * *", "not a number, range or step"),
        ("0 */0 * * *", "an empty range"),
        ("0 5-2 * * *", "an empty range"),
        ("0 *,5-2 * * *", "an empty range"),
        ("0 22 31 2 *", "no such day"),
    ],
)
def test_what_is_no_schedule_is_rejected(schedule: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_schedule(schedule)


@pytest.mark.parametrize("name", ["", "Europe", "Europe/Nowhere", "../Berlin", "/etc/localtime", "local zone", "a\0b"])
def test_what_is_no_time_zone_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_time_zone(name)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2026-07-01T21:59:59.999", False),
        ("2026-07-01T22:00:00", True),
        ("2026-07-02T00:00:00", True),
        ("2026-07-02T03:59:59.999", True),
        ("2026-07-02T04:00:00", False),
        ("2026-07-02T12:00:00", False),
    ],
)
def test_a_window_over_midnight_is_open_from_its_start_to_its_end(moment: str, expected: bool) -> None:
    assert NIGHT.is_open(at(moment)) is expected
    assert is_open([NIGHT], at(moment)) is expected


def test_without_a_window_every_moment_is_open() -> None:
    assert is_open([], at("2026-07-01T12:00:00"))
    assert next_start([], at("2026-07-01T12:00:00")) is None


def test_a_window_longer_than_its_period_never_closes_and_is_decided_at_once() -> None:
    daily = window("@daily", 30 * HOURS)
    assert all(daily.is_open(at("2026-07-01T00:00:00") + hour * HOURS) for hour in range(48))
    assert window("* * * * *", 24 * 365 * 20 * HOURS).is_open(at("2026-07-01T00:00:30"))


def test_of_several_windows_one_is_enough_and_the_first_one_opens_next() -> None:
    windows = [window("0 2 * * 1-5", 2 * HOURS), window("0 3 * * *", 3 * HOURS), window("0 12 * * SAT", HOURS)]
    open_hours = [hour for hour in range(24) if is_open(windows, at(f"2026-07-01T{hour:02}:30:00"))]
    assert open_hours == [2, 3, 4, 5]
    assert [hour for hour in range(24) if is_open(windows, at(f"2026-07-04T{hour:02}:30:00"))] == [3, 4, 5, 12]
    assert next_start(windows, at("2026-07-03T02:00:00")) == at("2026-07-03T03:00:00")
    assert next_start(windows, at("2026-07-04T03:00:00")) == at("2026-07-04T12:00:00")


def test_a_day_of_the_month_and_one_of_the_week_are_alternatives_unless_one_is_any() -> None:
    either, both = (starts(window(f"0 0 {day} * FRI", HOURS), "2026-11-01T00:00:00", 3) for day in ("13", "*/10"))
    assert either == ["11-06T00:00", "11-13T00:00", "11-20T00:00"]
    assert both == ["11-06T00:00", "11-11T00:00", "11-13T00:00"]


def test_a_time_zone_moves_the_window_with_the_season() -> None:
    night = window("0 22 * * *", 6 * HOURS, BERLIN)
    assert starts(night, "2026-10-24T00:00:00", 2) == ["10-24T20:00", "10-25T21:00"]


def test_a_start_in_the_hour_that_is_skipped_is_moved_to_its_end() -> None:
    """In Berlin, 2026-03-29 02:00 is 03:00."""
    early = window("30 2 * * *", HOURS, BERLIN)
    assert starts(early, "2026-03-28T00:00:00", 3) == ["03-28T01:30", "03-29T01:00", "03-30T00:30"]
    times = ("00:59", "01:00", "01:59", "02:00")
    assert [time for time in times if early.is_open(at(f"2026-03-29T{time}:00"))] == ["01:00", "01:59"]


def test_a_start_in_an_hour_that_occurs_twice_counts_once() -> None:
    """In Berlin, 2026-10-25 02:00 to 03:00 occurs at 00:00 and at 01:00 UTC."""
    early = window("30 2 * * *", HOURS, BERLIN)
    assert starts(early, "2026-10-24T12:00:00", 2) == ["10-25T00:30", "10-26T01:30"]
    times = ("00:29", "00:30", "01:00", "01:15", "01:29", "01:30", "01:45", "02:15", "02:30")
    opened = [time for time in times if early.is_open(at(f"2026-10-25T{time}:00"))]
    assert opened == ["00:30", "01:00", "01:15", "01:29"]


@pytest.mark.parametrize("day", ["2026-03-28", "2026-03-29", "2026-10-24", "2026-10-25"])
def test_a_duration_is_elapsed_time_whatever_the_clock_does(day: str) -> None:
    night = window("0 1 * * *", 5 * HOURS, BERLIN)
    begun = night.start_after(at(f"{day}T00:00:00") - 2 * HOURS)
    assert begun is not None
    second = timedelta(seconds=1)
    moments = (begun - second, begun, begun + 5 * HOURS - second, begun + 5 * HOURS)
    assert [night.is_open(moment) for moment in moments] == [False, True, True, False]


_DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("schedule", "zone", "expected"),
    [
        ("0 2 * * *", "", _DAY),
        ("0 2 * * 1-5", "", 3 * _DAY),
        ("*/15 * * * *", "", HOURS / 4),
        ("*/5 8-18 * * *", "", 13 * HOURS + HOURS / 12),
        ("@daily", "", _DAY),
        ("@weekly", "Europe/Berlin", 7 * _DAY),
        ("0 0 1 * *", "", 31 * _DAY),
        ("0 0 1 1 *", "", 365 * _DAY),
        ("@every 6h", "", 6 * HOURS),
        ("CRON_TZ=Europe/Berlin 0 2 * * *", "", _DAY),
        ("TZ=America/New_York 30 1 * * *", "", _DAY),
        ("CRON_TZ=UTC  @every 6h", "", 6 * HOURS),
    ],
)
def test_the_interval_of_a_schedule_is_its_longest_pause(schedule: str, zone: str, expected: timedelta) -> None:
    assert parse_interval(schedule, zone, at("2026-11-21T12:00")) == expected


@pytest.mark.parametrize(
    "schedule",
    ["", "nonsense", "0 2 * *", "0 2 30 2 *", "@every", "@every x", "@every -1h", "@every 0s", "TZ=Nowhere @daily"],
)
def test_an_invalid_schedule_is_an_error(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_interval(schedule, "", at("2026-11-21T12:00"))
