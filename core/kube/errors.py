"""Errors of the API server, one class for each status, and the decoding of its answers, which may be one.

Reads as Go does: a field that is null counts as absent, and what is not UTF-8 becomes U+FFFD.
Source: Go, encoding/json.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from core.errors import AgentError
from core.models.base import replace_halves, without_nulls
from core.models.units import parse_count

_DEEPEST: Final = 100
"""Levels of nesting that are kept of a value that Python cannot read; no field that is read is deeper."""

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(body: bytes) -> object:
    """Return the JSON value in `body`, of one that is nested too deeply the upper levels; ValueError: it is none."""
    text = body.decode(errors="replace")
    try:
        return _loads(text)
    except RecursionError:
        return _loads(_cut(text))


def _loads(text: str) -> object:
    whole = replace_halves(text) if "\\ud" in text or "\\uD" in text else text
    value: object = json.loads(whole, parse_constant=_reject)
    return without_nulls(value) if "null" in text else value


def _reject(constant: str) -> None:
    """Reject NaN and the infinities, which Python would read."""
    raise ValueError(f"not JSON: {constant}")


def _cut(text: str) -> str:
    """Return the JSON `text` with null for what is deeper than `_DEEPEST`; raise ValueError if it ends within that."""
    kept, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in {"{", "["}:
            depth += 1
            if depth == _DEEPEST + 1:
                kept.append(text[start : token.start()])
        elif token[0] in {"}", "]"}:
            if depth == _DEEPEST + 1:
                kept.append("null")
                start = token.end()
            depth -= 1
    if depth > _DEEPEST:
        raise ValueError("not JSON: it ends too early")
    return "".join([*kept, text[start:]])


class KubeError(AgentError):
    """A request to the API server that failed.

    `status` is the HTTP status, 0 without a response. `reason` is the Status object's.
    `retry_after_seconds` is from the `Retry-After` header; None without one.
    """

    def __init__(
        self, message: str, *, status: int = 0, reason: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NotFoundError(KubeError):
    """404 of the API server: the object, or its resource, does not exist."""


class NotServedError(NotFoundError):
    """404: the API server does not serve the resource, such as one whose definition is not installed."""


class ConflictError(KubeError):
    """409: the object was changed, or another object has the name; read and decide again.

    `may_be_own`: an earlier response to the same request was lost, so it may conflict with itself.
    """

    retry = True
    may_be_own = False


class AlreadyExistsError(ConflictError):
    """409 with reason AlreadyExists."""


@dataclass(frozen=True)
class FieldConflict:
    """A field that another manager has set, such as `.spec.replicas`; `manager` is as the API server describes it."""

    field: str
    manager: str


class ApplyConflictError(ConflictError):
    """409 of a server-side apply: `conflicts` are the fields that other managers have set to other values."""

    retry = False
    conflicts: tuple[FieldConflict, ...] = ()


class GoneError(KubeError):
    """410: the resourceVersion or continue token is too old; list again."""

    retry = True


class InvalidError(KubeError):
    """400 or 422: the server rejected the object's content."""


class ForbiddenError(KubeError):
    """403: denied by RBAC, a quota or an admission check."""


class MalformedObjectError(KubeError):
    """2xx: the object lacks a field that its kind has, or has one of another type."""


class UnauthorizedError(KubeError):
    """401: the server rejected the credentials."""

    retry = True


class ThrottledError(KubeError):
    """429: the server asks to retry later."""

    retry = True


class ServerError(KubeError):
    """5xx: the server or one of its backends failed. A write may have been applied."""

    retry = True


class UnreachableError(ServerError):
    """No response: connection refused, reset or timed out, or not from an API server. A write may have been applied."""


class UnknownPathError(UnreachableError):
    """404 without a `Status`: a proxy answered, or the API server does not serve the path; an object may exist.

    Source: Kubernetes v1.34, staging/src/k8s.io/apiserver/pkg/util/notfoundhandler (http.NotFound).
    """


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
"""Source: Kubernetes v1.34: a patch with another UID is rejected as a change of that field."""

_MANAGER_CONFLICT = "FieldManagerConflict"
"""Source: Kubernetes v1.34, apimachinery pkg/apis/meta/v1/types.go (CauseTypeFieldManagerConflict)."""

_MANAGER = re.compile('conflict with "([^"]*)"')
"""Source: Kubernetes v1.34, apimachinery pkg/util/managedfields/internal/conflict.go."""

_SHOWN_BYTES = 300
"""What is shown of an answer that is not a `Status`."""

_FIRST_ERROR = 400
_FIRST_SERVER_ERROR = 500


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""
    field: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] = []


class Status(msgspec.Struct):
    """What the API server says about a request that it rejected, or about a process that has ended.

    `status` is any value: the answers of gateways have their own.
    """

    kind: str = ""
    status: Any = ""
    reason: str = ""
    message: str | None = None
    details: _Details = msgspec.field(default_factory=_Details)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Return the object in `body`; raise ValueError or RecursionError if it is none."""
        parsed = parse_json(body)
        if isinstance(parsed, dict) and not parsed.get("details"):
            # Gateways for gRPC answer with an empty list.
            parsed.pop("details", None)
        return msgspec.convert(parsed, cls)


def _manager_of(described: str) -> str:
    """Return the manager in `conflict with "kubectl" using apps/v1`, or the whole text."""
    found = _MANAGER.match(described)
    return found[1] if found else described


def build_error(status: int, body: bytes, *, attempted: str, retry_after: str | None = None) -> KubeError:
    """Return the error for a failed request; its message has verb, object, status, reason and the server's message.

    Args:
        status: the HTTP status, 400 or above.
        body: the response's body, a `Status` object when the API server itself rejected the request.
        attempted: verb and object, such as `patch Pod velero/x`.
        retry_after: the `Retry-After` header, seconds.
    """
    try:
        rejection = Status.parse(body)
    except (ValueError, RecursionError):
        rejection = Status()
    if rejection.message is None:
        rejection = Status(message=body[:_SHOWN_BYTES].decode(errors="replace").strip())
    causes = rejection.details.causes
    cls = _BY_STATUS.get(status, ServerError if status >= _FIRST_SERVER_ERROR else KubeError)
    if cls is NotFoundError and (rejection.kind, rejection.reason) != ("Status", "NotFound"):
        # A transfer whose objects do not exist fails and is cleaned up: only the API server's own 404 proves that.
        cls = UnknownPathError
    if cls is ConflictError and rejection.reason == "AlreadyExists":
        cls = AlreadyExistsError
    if cls is InvalidError and any(cause.field == _UID_FIELD for cause in causes):
        # A patch with the UID of a deleted object: another object has its name by now.
        cls = ConflictError
    text = f"{attempted}: {status} {rejection.reason or ''}".rstrip() + f": {rejection.message}"
    seconds = parse_retry_after(retry_after)
    conflicts = [one for one in causes if one.reason == _MANAGER_CONFLICT]
    cls = ApplyConflictError if conflicts else cls
    error = cls(text, status=status, reason=rejection.reason, retry_after_seconds=seconds)
    if isinstance(error, ApplyConflictError):
        error.conflicts = tuple(FieldConflict(one.field, _manager_of(one.message)) for one in conflicts)
    return error


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds in a `Retry-After` header; None where it has none.

    Source: Kubernetes v1.34, staging/src/k8s.io/apiserver: always whole seconds, never a date.
    """
    seconds = parse_count(header or "")
    return None if seconds is None else float(seconds)


def raise_for_status(status: int, body: bytes, *, attempted: str, retry_after: str | None = None) -> None:
    """Raise KubeError unless `status` is a success; the arguments are as in `build_error`."""
    if status >= _FIRST_ERROR:
        raise build_error(status, body, attempted=attempted, retry_after=retry_after)
