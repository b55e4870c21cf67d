"""When to retry a backup repository that could not be opened."""

from dataclasses import dataclass
from typing import Final

from core.clock import Clock

__all__ = ["CHECK_SECONDS", "RepositoryRetries"]

_RETRY_SECONDS: Final = 300.0
_REQUESTED_RETRY_SECONDS: Final = 15.0
"""A transfer that needs the repository now causes a retry of failures older than this."""

CHECK_SECONDS: Final = 5.0
"""Between checks of what may have been fixed: location, its Secret, the password."""

_CHECKS_PER_SECOND: Final = 2.0
"""For all failed repositories together: each check reads the repository and its init pod."""


@dataclass
class _Attempt:
    """The last attempt for one repository: what it depended on, and when it failed.

    `cause` is the last one that the storage or kopia reported, in this attempt or an earlier one.
    """

    inputs: str
    cause: str = ""
    failed_at_seconds: float | None = None
    requested: bool = False


class RepositoryRetries:
    """The last attempt for each repository, by uid; not kept over a restart."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}

    @property
    def pause_seconds(self) -> float:
        """The pause before the next check of a failed repository."""
        failed = sum(one.failed_at_seconds is not None for one in self._attempts.values())
        return max(CHECK_SECONDS, failed / _CHECKS_PER_SECOND)

    def begin(self, uid: str, inputs: str) -> None:
        """Record the start of an attempt that depends on `inputs` (`nodeagent.leader.repositories.inputs`)."""
        earlier = self._attempts.get(uid)
        self._attempts[uid] = _Attempt(inputs, earlier.cause if earlier else "")

    def explain(self, uid: str, message: str) -> str:
        """Return `message` about an attempt that the storage did not answer, after the last cause that is known."""
        last = self._attempts.get(uid)
        return f"{last.cause}; next attempt: {message}" if last and last.cause else message

    def fail(self, uid: str, inputs: str, *, cause: str = "") -> None:
        """Record that the last attempt failed; `inputs` is used if an earlier process started it.

        `cause` is what the storage or kopia reported; empty: the attempt did not get so far.
        """
        last = self._attempts.setdefault(uid, _Attempt(inputs))
        last.cause = cause or last.cause
        if last.failed_at_seconds is None:
            last.failed_at_seconds = self._clock.monotonic()
            last.requested = False

    def request(self, uid: str) -> bool:
        """Record that a transfer needs the repository now; return whether a retry may follow."""
        last = self._attempts.get(uid)
        if last is None:
            return False
        last.requested = True
        return True

    def forget(self, uid: str) -> None:
        """Drop the record of the repository."""
        self._attempts.pop(uid, None)

    def is_due(self, uid: str, inputs: str) -> bool:
        """Return whether a NotReady repository is to be retried now, given its current `inputs`."""
        last = self._attempts.get(uid)
        if last is None or last.failed_at_seconds is None or last.inputs != inputs:
            return True
        age_seconds = self._clock.monotonic() - last.failed_at_seconds
        return age_seconds >= (_REQUESTED_RETRY_SECONDS if last.requested else _RETRY_SECONDS)
