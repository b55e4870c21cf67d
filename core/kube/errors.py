"""What the API server's refusals become: one class a cause, made in one place.

Knows status codes and `Status` objects. Does not know what anybody does about an error.
"""

import json
from dataclasses import dataclass
from typing import Any

from core.errors import AgentError

__all__ = [
    "AlreadyExistsError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "KubeError",
    "NotFoundError",
    "ServerError",
    "ThrottledError",
    "UnauthorizedError",
    "UnreachableError",
    "build_error",
    "parse_retry_after",
    "raise_for_status",
]


class KubeError(AgentError):
    """A request to the API server that did not succeed.

    `status` is the HTTP status, 0 where no answer came. `reason` is the Status object's.
    `retry_after_seconds` is what the server asked for, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        """Keep the facts beside the message."""
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NotFoundError(KubeError):
    """404: the object, or its kind, is not there."""


class ConflictError(KubeError):
    """409: somebody else wrote first, or another object has the name; read and decide again."""

    retry = True


class AlreadyExistsError(ConflictError):
    """409 with reason AlreadyExists."""


class GoneError(KubeError):
    """410: the resourceVersion or continue token is too old; list again."""

    retry = True


class InvalidError(KubeError):
    """400 or 422: the server refused the object's content."""


class ForbiddenError(KubeError):
    """403: RBAC, quota or an admission check said no."""


class UnauthorizedError(KubeError):
    """401: the credentials are not accepted."""

    retry = True


class ThrottledError(KubeError):
    """429: the server asks to come later."""

    retry = True


class ServerError(KubeError):
    """5xx: the server, or something behind it, failed. The write may have been applied."""

    retry = True


class UnreachableError(ServerError):
    """No answer arrived: connection refused, reset or timed out. The write may be applied."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: ThrottledError,
}
_UID_FIELD = "metadata.uid"
"""Source: Kubernetes v1.34: a patch that names another UID is refused as a change of that field."""

_FIRST_ERROR = 400
_FIRST_SERVER_ERROR = 500


@dataclass(frozen=True)
class _Refusal:
    message: str
    reason: str
    fields: frozenset[str] = frozenset()


def _parse_refusal(body: bytes) -> _Refusal:
    """Read a `Status` object; anything else is shown as text, shortened."""
    try:
        status: Any = json.loads(body)
        causes = (status.get("details") or {}).get("causes") or []
        fields = frozenset(str(cause.get("field", "")) for cause in causes)
        return _Refusal(str(status["message"]), str(status.get("reason", "")), fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Refusal(body[:300].decode(errors="replace").strip(), "")


def build_error(status: int, body: bytes, *, attempted: str, retry_after: str | None = None) -> KubeError:
    """Return the error that a refusal is.

    Args:
        status: the HTTP status, 400 or above.
        body: the answer's body, a `Status` object when the API server itself refused.
        attempted: what was tried on which object, such as `patch Pod velero/x`.
        retry_after: the `Retry-After` header, seconds.

    Returns:
        The subclass for the status; the message says what was attempted, on which object, and
        what came back.
    """
    refusal = _parse_refusal(body)
    cls = _BY_STATUS.get(status, ServerError if status >= _FIRST_SERVER_ERROR else KubeError)
    if cls is ConflictError and refusal.reason == "AlreadyExists":
        cls = AlreadyExistsError
    if cls is InvalidError and _UID_FIELD in refusal.fields:
        # A patch with the UID of an object that went: another one has its name by now.
        cls = ConflictError
    text = f"{attempted}: {status} {refusal.reason or ''}".rstrip() + f": {refusal.message}"
    seconds = parse_retry_after(retry_after)
    return cls(text, status=status, reason=refusal.reason, retry_after_seconds=seconds)


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for; None where it names none.

    Source: Kubernetes v1.34, staging/src/k8s.io/apiserver: always whole seconds, never a date.
    """
    return float(header) if header and header.isdigit() else None


def raise_for_status(status: int, body: bytes, *, attempted: str, retry_after: str | None = None) -> None:
    """Return if `status` is a success; the arguments are those of `build_error`.

    Raises:
        KubeError: it is none.
    """
    if status >= _FIRST_ERROR:
        raise build_error(status, body, attempted=attempted, retry_after=retry_after)
