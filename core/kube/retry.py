"""Retries of requests: which errors, how many attempts, which delay.

Retries throttling, server errors and lost responses; the caller states whether a request may be
repeated after its response was lost.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.wait import wait_exponential_jitter

from core.clock import Clock
from core.kube.errors import ConflictError, ForbiddenError, KubeError, ServerError, ThrottledError, UnauthorizedError

__all__ = ["Retry"]

_T = TypeVar("_T")

_RETRY_AFTER_LIMIT_SECONDS = 30.0
"""Limit of the server's `Retry-After` for one request; the work queue retries later."""


_PATIENT_SECONDS: Final = 300.0
_PATIENT_ATTEMPTS: Final = 100
"""A single API server is unavailable for minutes while its machine restarts or its control plane is updated."""

_DENIED = (ForbiddenError, UnauthorizedError)


@dataclass(frozen=True)
class Retry:
    """At most `attempts` attempts within `total_seconds`, with jittered exponential delays.

    For `forbidden_seconds` a 401 or 403 is retried, without a limit of attempts: an API server that has just
    started rejects permitted requests until it can check their tokens and has loaded its roles.
    """

    clock: Clock
    attempts: int = 5
    total_seconds: float = 60.0
    first_wait_seconds: float = 0.2
    wait_limit_seconds: float = 5.0
    forbidden_seconds: float = 0.0

    @property
    def patient(self) -> "Retry":
        """The same for what may wait, or does so anyway: an outage of minutes is no reason to end."""
        return replace(self, attempts=_PATIENT_ATTEMPTS, total_seconds=_PATIENT_SECONDS)

    async def run(self, once: Callable[[], Awaitable[_T]], *, after_lost_response: bool = True) -> _T:
        """Return what `once` returns, with retries after transient errors.

        `after_lost_response=False` forbids a retry when the first attempt may have been applied
        (a server error or no response): such a request is only repeated after a 429, which means
        that it was not processed.

        Raises:
            KubeError: the last error.
        """
        started = self.clock.monotonic()

        def is_transient(error: BaseException) -> bool:
            if isinstance(error, ThrottledError):
                return True
            if isinstance(error, _DENIED):
                return self.clock.monotonic() - started < self.forbidden_seconds
            return after_lost_response and isinstance(error, ServerError)

        try:
            # Nearly all requests succeed at once, and tenacity costs a tenth of sending one.
            return await once()
        except KubeError as e:
            if not is_transient(e):
                raise
            errors: list[KubeError] = [e]

        lost = isinstance(errors[0], ServerError)

        async def again() -> _T:
            """Run once; the first attempt is the one that has already failed."""
            nonlocal lost
            if errors:
                raise errors.pop()
            try:
                return await once()
            except ServerError:
                lost = True
                raise
            except ConflictError as e:
                e.may_be_own = lost
                raise

        return await self._build(is_transient, started)(again)

    def _build(self, is_transient: Callable[[BaseException], bool], started_seconds: float) -> AsyncRetrying:
        """Return the retries after errors that `is_transient`, limited in time from `started_seconds`."""
        backoff = wait_exponential_jitter(
            multiplier=self.first_wait_seconds,
            max=self.wait_limit_seconds,
            jitter=self.first_wait_seconds,
        )

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            retry_after = error.retry_after_seconds if isinstance(error, KubeError) else None
            if retry_after is not None:
                return min(retry_after, _RETRY_AFTER_LIMIT_SECONDS) + backoff(state) / 10
            return float(backoff(state))

        def stop(state: RetryCallState) -> bool:
            until = self.clock.monotonic() - started_seconds + wait(state)
            if state.outcome and isinstance(state.outcome.exception(), _DENIED):
                return until > self.forbidden_seconds
            return state.attempt_number >= self.attempts or until > self.total_seconds

        return AsyncRetrying(
            retry=retry_if_exception(is_transient),
            wait=wait,
            stop=stop,
            sleep=self.clock.sleep,
            reraise=True,
        )
