"""Durations, quantities, times and label values, as written on the wire."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import Backoff
from core.errors import ContractError
from core.models.base import format_time, parse_time
from core.models.names import label_value
from core.models.units import format_duration, parse_count, parse_duration, parse_quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("10m0s", 600),
        ("4h0m0s", 14400),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("300ms", 0.3),
        ("2us", 2e-6),
        ("-1m", -60),
        ("+1m", 60),
        ("2562047h47m16.8s", 9_223_372_036.8),
    ],
)
def test_go_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text).total_seconds() == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "1d", "1h 30m", "1h30", "--1m"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


def test_a_duration_that_go_cannot_hold_is_invalid() -> None:
    for text in ("100000000000h", "2562048h", "-2562048h", "9" * 400 + "s", "1h" * 1000, "\u0661h"):
        with pytest.raises(ValueError, match="duration") as raised:
            parse_duration(text)
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (1.5, "1.5s"), (60, "1m0s"), (600, "10m0s"), (14400, "4h0m0s"), (3661, "1h1m1s"), (-60, "-1m0s")],
)
def test_duration_is_formatted_as_in_go(seconds: float, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text


@given(st.timedeltas(min_value=timedelta(days=-300), max_value=timedelta(days=300)))
def test_formatted_duration_parses_to_itself(span: timedelta) -> None:
    assert abs(parse_duration(format_duration(span)) - span) <= timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2Gi", 2 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("100M", 10**8),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("100m", Decimal("0.1")),
        ("1k", 1000),
        (5, 5),
        ("+.5", Decimal("0.5")),
    ],
)
def test_quantity_is_parsed(text: str | float, number: Decimal) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "1 Gi", "1GiB", "1K", "one", "1e9999999", "1e-9999999", "1" * 200, 10**5000, float("inf"), float("nan")],
    ids=lambda text: str(text)[:9] if isinstance(text, str | float) else "huge",
)
def test_an_invalid_quantity_is_rejected(text: str | float) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


def test_count_is_parsed() -> None:
    assert [parse_count(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    for text in ("", "-1", "+1", "1.0", "\u0663", "²", "9" * 19, "9" * 5000):
        assert parse_count(text) is None, text[:9]


def test_time_is_parsed_with_any_number_of_digits_and_a_zone() -> None:
    noon = datetime(2026, 11, 21, 12, tzinfo=UTC)
    for text in ("2026-11-21T12:00:00Z", "2026-11-21T12:00:00.000000Z", "2026-11-21T13:00:00+01:00"):
        assert parse_time(text) == noon
    for text in ("", "noon", "2026-11-21", "2026-11-21T12:00:00", "99999-01-01T00:00:00Z"):
        with pytest.raises(ContractError, match="not a time with a time zone"):
            parse_time(text)


def test_time_is_formatted_in_utc_and_whole_seconds() -> None:
    moment = datetime(2026, 11, 21, 13, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=1)))
    assert format_time(moment) == "2026-11-21T12:00:00Z"
    assert format_time(moment) == format_time(moment.astimezone(UTC))
    # Beyond the calendar.
    assert format_time(parse_time("9999-12-31T23:59:59-14:00")) == "9999-12-31T23:59:59Z"


def test_only_a_long_name_becomes_a_prefix_and_a_digest() -> None:
    assert label_value("n" * 63) == "n" * 63
    value = label_value("n" * 64)
    assert len(value) == 63
    assert value.startswith("n" * 57)
    assert value != label_value("n" * 65)


def test_backoff_grows_to_its_limit_within_its_jitter() -> None:
    backoff = Backoff(first_seconds=1.0, limit_seconds=300.0)
    for failures, full in ((1, 1.0), (2, 2.0), (5, 16.0), (20, 300.0), (10_000, 300.0)):
        assert full / 2 <= backoff.seconds_after(failures) <= full
