"""The skew of the wall clock is shown and warned about once, and changes nothing."""

from datetime import timedelta
from email.utils import format_datetime

import pytest

from core.kube.transport import Request, Response
from nodeagent.metrics import Metrics
from nodeagent.runtime.api_server import ClockSkew, LimitedTransport, RateLimit
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.fakekube import FakeKube

DATE = format_datetime(NOON, usegmt=True)
DAY = timedelta(hours=24)


def shown(metrics: Metrics) -> float | None:
    lines = [
        line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_clock_skew_seconds{")
    ]
    return float(lines[0].split()[-1]) if lines else None


@pytest.mark.parametrize(
    ("skew", "words"),
    [
        (timedelta(seconds=59), ""),
        (timedelta(seconds=-59), ""),
        (DAY, "86400 s ahead of the API server's"),
        (-DAY, "86400 s behind the API server's"),
    ],
)
def test_the_skew_is_a_metric_and_one_warning(skew: timedelta, words: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("node-a")
    observer = ClockSkew(HandClock(skew=skew), metrics)
    assert shown(metrics) is None
    for _ in range(3):
        observer.observe(DATE)
    assert shown(metrics) == skew.total_seconds()
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


def test_a_skew_that_comes_back_is_warned_about_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = HandClock()
    observer = ClockSkew(clock, Metrics("node-a"))
    for clock.skew in (DAY, timedelta(), timedelta(), -DAY):
        observer.observe(DATE)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.parametrize("date", ["", "soon", "Sat, 99 Nov 2026 12:00:00 GMT", "Sat, 21 Nov 2026 12:00:00"])
def test_an_invalid_date_is_ignored(date: str) -> None:
    metrics = Metrics("node-a")
    ClockSkew(HandClock(), metrics).observe(date)
    assert shown(metrics) is None


class Dated(FakeKube):
    """An API server that dates its responses."""

    async def request(self, request: Request) -> Response:
        return Response(200, b"{}", date=DATE)


@pytest.mark.looptime
async def test_every_response_is_compared() -> None:
    seen: list[str] = []
    clock = HandClock()
    limit = RateLimit(clock, per_second=10.0, burst=5)
    transport = LimitedTransport(Dated(), limit, on_answer=lambda _verb, _status: None, on_date=seen.append)
    await transport.request(Request("GET", "/api/v1/pods"))
    assert seen == [DATE]
