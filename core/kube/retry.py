"""Which requests are tried again, how often and after what wait.

Knows refusals that may pass: throttling, server errors, lost answers. Does not know what a
request does; the caller says whether one may be repeated when its answer was lost.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.wait import wait_exponential_jitter

from core.clock import Clock
from core.kube.errors import ForbiddenError, KubeError, ServerError, ThrottledError

__all__ = ["Retry"]

_T = TypeVar("_T")

_RETRY_AFTER_LIMIT_SECONDS = 30.0
"""No server may hold one request back for longer; the queue above comes back to it."""


@dataclass(frozen=True)
class Retry:
    """At most `attempts` tries within `total_seconds`, with jittered exponential waits.

    For `forbidden_seconds` a 403 is taken for one that may pass, however many tries that is: an
    API server that has just begun refuses what it permits, until it has read its roles.
    """

    clock: Clock
    attempts: int = 5
    total_seconds: float = 60.0
    first_wait_seconds: float = 0.2
    wait_limit_seconds: float = 5.0
    forbidden_seconds: float = 0.0

    async def run(self, once: Callable[[], Awaitable[_T]], *, after_lost_answer: bool = True) -> _T:
        """Return what `once` returns, trying again after refusals that may pass.

        `after_lost_answer=False` forbids a second try when the first may have been applied
        (a server error or no answer at all): such a request is only repeated after a 429,
        which says that nothing was done.

        Raises:
            KubeError: the last refusal.
        """
        began = self.clock.monotonic()

        def may_pass(error: BaseException) -> bool:
            if isinstance(error, ThrottledError):
                return True
            if isinstance(error, ForbiddenError):
                return self.clock.monotonic() - began < self.forbidden_seconds
            return after_lost_answer and isinstance(error, ServerError)

        try:
            # Nearly all that is ever sent succeeds at once, and what follows costs a tenth of sending it.
            return await once()
        except KubeError as e:
            if not may_pass(e):
                raise
            refusals = [e]

        async def again() -> _T:
            """Do it; the first try is the one that was refused already."""
            if refusals:
                raise refusals.pop()
            return await once()

        return await self._build(may_pass, began)(again)

    def _build(self, may_pass: Callable[[BaseException], bool], began_seconds: float) -> AsyncRetrying:
        """Return what tries again after refusals that `may_pass`, in the time since `began_seconds`."""
        backoff = wait_exponential_jitter(
            multiplier=self.first_wait_seconds,
            max=self.wait_limit_seconds,
            jitter=self.first_wait_seconds,
        )

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.retry_after_seconds if isinstance(error, KubeError) else None
            if asked is not None:
                return min(asked, _RETRY_AFTER_LIMIT_SECONDS) + backoff(state) / 10
            return float(backoff(state))

        def stop(state: RetryCallState) -> bool:
            until = self.clock.monotonic() - began_seconds + wait(state)
            if state.outcome and isinstance(state.outcome.exception(), ForbiddenError):
                return until > self.forbidden_seconds
            return state.attempt_number >= self.attempts or until > self.total_seconds

        return AsyncRetrying(
            retry=retry_if_exception(may_pass),
            wait=wait,
            stop=stop,
            sleep=self.clock.sleep,
            reraise=True,
        )
