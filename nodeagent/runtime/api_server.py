"""What one process and the API server are to each other: the rate of requests, outages, and the skew of the clock.

Timestamps and the hours of repository maintenance are by its clock; no outcome depends on a wall clock.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Final

from core.clock import Clock
from core.kube.errors import KubeError, UnreachableError, parse_retry_after
from core.kube.transport import Request, Response, Transport
from nodeagent.metrics import CLOCK_SKEW, Metrics
from nodeagent.runtime.server_clock import ServerClock

_PAUSE_LIMIT_SECONDS: Final = 30.0
"""Longest pause that one response may ask for."""

_ENOUGH: Final = 1.0 - 1e-6
"""One token, less rounding errors of added fractions."""

_NO_ANSWER: Final = 0

_IN_FLIGHT: Final = 16
"""Parallel requests, not counting watches and urgent ones. Each has a TLS connection of about
100 KiB; 100 transfers that start together would open 100, and none would be faster."""

_OVERLOADED: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Source: Kubernetes v1.34, API Priority and Fairness (429), and a server that is shutting down (503)."""


class RateLimit:
    """A token bucket: `per_second` requests sustained, `burst` at once.

    Requests pass in order of arrival. Urgent requests pass at once and take their token from the
    others; they are few (Lease renewals, results and final statuses), and their delay does harm.
    """

    def __init__(self, clock: Clock, *, per_second: float, burst: int) -> None:
        self._clock = clock
        self._per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at_seconds = clock.monotonic()
        self._paused_until_seconds = 0.0
        self._order = asyncio.Lock()

    async def acquire(self, *, urgent: bool) -> None:
        """Wait until a request may be sent; return at once for an urgent one."""
        if urgent:
            self._refill()
            # A debt of more than one burst would only delay the others further.
            self._tokens = max(-self._burst, self._tokens - 1.0)
            return
        async with self._order:
            while (seconds := self._seconds_to_wait()) > 0:
                await self._clock.sleep(seconds)
            self._tokens -= 1.0

    def pause(self, seconds: float) -> None:
        """Hold back all but urgent requests for `seconds`, as the server asked."""
        until = self._clock.monotonic() + min(seconds, _PAUSE_LIMIT_SECONDS)
        self._paused_until_seconds = max(self._paused_until_seconds, until)

    def _seconds_to_wait(self) -> float:
        self._refill()
        pause = self._paused_until_seconds - self._clock.monotonic()
        missing = 0.0 if self._tokens >= _ENOUGH else (1.0 - self._tokens) / self._per_second
        return max(0.0, pause, missing)

    def _refill(self) -> None:
        now = self._clock.monotonic()
        gained = (now - self._filled_at_seconds) * self._per_second
        self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at_seconds = now


@dataclass(eq=False)
class LimitedTransport:
    """A transport that limits the rate of requests, including watches, and counts them.

    It sends through `inner`, as fast as `limit` allows. `on_answer` gets the verb and HTTP status of each response,
    status 0 if there was none; `on_date` the Date header of each response, except to watches.
    """

    inner: Transport
    limit: RateLimit
    _: KW_ONLY
    on_answer: Callable[[str, int], None]
    on_date: Callable[[str], None] = lambda _: None
    _in_flight: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_IN_FLIGHT), init=False)

    async def request(self, request: Request) -> Response:
        """Send the request when the limit allows; see `Transport`."""
        async with nullcontext() if request.urgent else self._in_flight:
            await self.limit.acquire(urgent=request.urgent)
            try:
                response = await self.inner.request(request)
            except UnreachableError:
                self.on_answer(request.method, _NO_ANSWER)
                raise
        self._count(request.method, response.status, parse_retry_after(response.retry_after))
        if response.date is not None:
            self.on_date(response.date)
        return response

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Open a stream when the limit allows; see `Transport`."""
        await self.limit.acquire(urgent=request.urgent)
        opened = False
        try:
            async with self.inner.stream(request) as lines:
                opened = True
                self.on_answer("WATCH", HTTPStatus.OK)
                yield lines
        except KubeError as e:
            if not opened:
                self._count("WATCH", e.status, e.retry_after_seconds)
            raise

    async def close(self) -> None:
        """Close all connections."""
        await self.inner.close()

    def _count(self, verb: str, status: int, asked_seconds: float | None) -> None:
        self.on_answer(verb, status)
        if status in _OVERLOADED and asked_seconds is not None:
            self.limit.pause(asked_seconds)


_log = logging.getLogger(__name__)

_WARN_SECONDS: Final = 60.0
"""A Date has whole seconds, and a response may take half a minute: less than this may be no skew."""

_ROUGHLY: Final = timedelta(seconds=2)
"""For the same reason: with each response, times that are compared would go back and forth."""


class ClockSkew:
    """Knows the skew, shows it as a metric, and warns once while it is large."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._warned = False
        self._server = ServerClock(clock, least=_ROUGHLY)

    def now(self) -> datetime:
        """Return the API server's time, give or take some seconds: one of its Dates, and what has passed since.

        This machine's clock may be set meanwhile, and an idle agent gets no Date for minutes.
        """
        return self._server.now()

    def observe(self, date: str) -> None:
        """Compare with `date`, the Date header of a response that has just arrived; an invalid one is ignored."""
        if (parsed := self._server.take(date)) is None:
            return
        seconds = (self._clock.now() - parsed).total_seconds()
        self._metrics.set(CLOCK_SKEW, seconds)
        large = abs(seconds) >= _WARN_SECONDS
        if large and not self._warned:
            _log.warning(
                "wall clock of this node is %d s %s the API server's: times in logs and Events are wrong",
                abs(seconds),
                "ahead of" if seconds > 0 else "behind",
            )
        elif self._warned and not large:
            _log.info("wall clock of this node agrees with the API server's again")
        self._warned = large


class Outages:
    """Notifies subscribers of the first good answer after a failed one."""

    def __init__(self) -> None:
        self._failing = False
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` whenever an outage ends; it must not block."""
        self._subscribers.append(on_end)

    def observe(self, status: int) -> None:
        """Take in the HTTP status of an answer; 0: there was none.

        A rejection (4xx) is an answer too: the API server works, unless it cannot check the agent's token.
        """
        failing = status in {_NO_ANSWER, HTTPStatus.UNAUTHORIZED} or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        ended, self._failing = self._failing and not failing, failing
        if ended:
            for on_end in self._subscribers:
                on_end()
