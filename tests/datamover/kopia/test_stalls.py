from datetime import timedelta

import pytest

from core.errors import ConfigError
from datamover.kopia.stalls import StallDetector, StallLimits, read_stall_limits


def _due(limits: StallLimits, seconds: int) -> list[float]:
    """Return the idle times at which a data path that never moves is reported."""
    detector = StallDetector(limits)
    detector.observe("the same", 0)
    return [detector.idle_seconds for _ in range(seconds // 5) if detector.observe("the same", 5)]


def test_a_stall_is_reported_at_each_doubling_and_at_each_timeout() -> None:
    assert _due(StallLimits(), 4000) == [120, 240, 480, 600, 1200, 2400, 3600]


def test_without_a_timeout_a_stall_is_only_reported() -> None:
    limits = StallLimits(timedelta(0))
    assert _due(limits, 4000) == [120, 240, 480, 960, 1920, 3840]
    assert limits.timeout_seconds(reachable=False) == float("inf")


def test_any_activity_resets_the_idle_time() -> None:
    detector = StallDetector(StallLimits())
    for second in range(0, 3600, 60):
        assert not detector.observe(second // 120, 60)
    assert detector.idle_seconds <= 60


def test_a_pause_of_the_container_counts_as_one_minute() -> None:
    detector = StallDetector(StallLimits())
    detector.observe("the same", 5)
    detector.observe("the same", 50_000)
    assert detector.idle == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("idle", "reachable", "fails"), [(599, False, False), (600, False, True), (3599, True, False), (3600, True, True)]
)
def test_the_timeout_is_shorter_when_the_repository_does_not_answer(idle: int, reachable: bool, fails: bool) -> None:
    detector = StallDetector(StallLimits())
    detector.idle_seconds = idle
    assert detector.timed_out(reachable=reachable) is fails


@pytest.mark.parametrize(("text", "seconds"), [("", 600), ("30m", 1800), ("0", 0)])
def test_the_environment_sets_the_timeout(text: str, seconds: int) -> None:
    assert read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text}).timeout.total_seconds() == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", ".*soon.*"), ("-5m", 'must not be negative: "-5m"$')],
    ids=["no duration", "negative"],
)
def test_an_invalid_timeout_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^DATA_MOVER_STALL_TIMEOUT: {message}"):
        read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text})
