"""How hard one process presses on the API server: its own limit, and the server's wish for a rest.

Knows a token bucket, who may pass it by, and `Retry-After`. Does not know what is asked, nor
which answers are worth another try (`core.kube.retry`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from core.clock import Clock
from core.kube.errors import KubeError, UnreachableError, parse_retry_after
from core.kube.transport import Request, Response, Transport

__all__ = ["LimitedTransport", "RateLimit"]

_REST_LIMIT_SECONDS: Final = 30.0
"""No server may silence this process for longer by one answer."""

_ENOUGH: Final = 1.0 - 1e-6
"""What counts as a whole token: sums of fractions seldom make exactly one."""

_NO_ANSWER: Final = 0

_AT_A_TIME: Final = 16
"""Requests under way, watches and urgent ones apart. Each has a TLS connection of its own, of some
100 KiB, and 100 loads that begin together would open 100: more makes nothing faster."""

_ASK_FOR_REST: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Source: Kubernetes v1.34, API Priority and Fairness (429), and a server that shuts down (503)."""


class RateLimit:
    """A token bucket: `per_second` requests in the long run, `burst` at once.

    Requests pass in the order in which they came. Urgent ones do not stand in line: what they
    take is missing for the others. They are few by their nature (a Lease's renewals, the last
    status of a load) and the ones whose delay does harm.
    """

    def __init__(self, clock: Clock, *, per_second: float, burst: int) -> None:
        """Start with a full bucket."""
        self._clock = clock
        self._per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._filled_at_seconds = clock.monotonic()
        self._rests_until_seconds = 0.0
        self._line = asyncio.Lock()

    async def wait_turn(self, *, urgent: bool) -> None:
        """Return once a request may be sent; at once for an urgent one."""
        if urgent:
            self._refill()
            # A debt of more than one burst would only punish the others.
            self._tokens = max(-self._burst, self._tokens - 1.0)
            return
        async with self._line:
            while (seconds := self._seconds_to_wait()) > 0:
                await self._clock.sleep(seconds)
            self._tokens -= 1.0

    def rest(self, seconds: float) -> None:
        """Let nothing but urgent requests pass for that long: the server asked for it."""
        until = self._clock.monotonic() + min(seconds, _REST_LIMIT_SECONDS)
        self._rests_until_seconds = max(self._rests_until_seconds, until)

    def _seconds_to_wait(self) -> float:
        self._refill()
        rest = self._rests_until_seconds - self._clock.monotonic()
        missing = 0.0 if self._tokens >= _ENOUGH else (1.0 - self._tokens) / self._per_second
        return max(0.0, rest, missing)

    def _refill(self) -> None:
        now = self._clock.monotonic()
        gained = (now - self._filled_at_seconds) * self._per_second
        self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at_seconds = now


class LimitedTransport:
    """A transport whose requests, watches among them, wait for their turn and are counted."""

    def __init__(self, inner: Transport, limit: RateLimit, *, on_answer: Callable[[str, int], None]) -> None:
        """Send through `inner`; `on_answer` gets the verb and status of each answer, 0 for none."""
        self._inner = inner
        self._limit = limit
        self._on_answer = on_answer
        self._places = asyncio.Semaphore(_AT_A_TIME)

    async def request(self, request: Request) -> Response:
        """Return the answer, of any status, once it was this request's turn.

        Raises:
            UnreachableError: no answer arrived within the request's timeout.
        """
        if request.urgent:
            return await self._send(request)
        async with self._places:
            return await self._send(request)

    async def _send(self, request: Request) -> Response:
        """Return the answer once the limit allows the request."""
        await self._limit.wait_turn(urgent=request.urgent)
        try:
            response = await self._inner.request(request)
        except UnreachableError:
            self._on_answer(request.method, _NO_ANSWER)
            raise
        self._note(request.method, response.status, parse_retry_after(response.retry_after))
        return response

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Open a long answer once it is this request's turn.

        Raises:
            KubeError: the server refused.
        """
        await self._limit.wait_turn(urgent=request.urgent)
        opened = False
        try:
            async with self._inner.stream(request) as lines:
                opened = True
                self._on_answer("WATCH", HTTPStatus.OK)
                yield lines
        except KubeError as e:
            if not opened:
                self._note("WATCH", e.status, e.retry_after_seconds)
            raise

    async def close(self) -> None:
        """Release all connections."""
        await self._inner.close()

    def _note(self, verb: str, status: int, asked_seconds: float | None) -> None:
        self._on_answer(verb, status)
        if status in _ASK_FOR_REST and asked_seconds is not None:
            self._limit.rest(asked_seconds)
