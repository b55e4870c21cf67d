"""The interface to the API server: one request, one stream, what its answers say, and which requests are repeated.

Node agent, data mover and tests each have an implementation.

A flow that a load balancer or a virtual IP drops sends no FIN and no RST. Without keepalive a watch on
it is silent until its own timeout, minutes later, and nothing else shows that it is dead.
"""

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.wait import wait_exponential_jitter

from core.clock import Clock
from core.errors import Translated
from core.kube import errors
from core.kube.resources import Resource
from core.models.base import JsonDict, explain_invalid

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
"""Server-side apply; its body may be JSON, which is YAML too."""

_LARGEST_OBJECT_BYTES: Final = 16 << 20
"""Several times what the API server accepts: 3 MiB, while etcd stores 1.5.

Source: Kubernetes v1.34, MaxRequestBodyBytes in staging/src/k8s.io/apiserver/pkg/server/config.go.
"""


@dataclass(frozen=True)
class Request:
    """One HTTP request: `path` is absolute and unescaped, `body` is JSON text or None.

    `urgent`: it bypasses the client's rate limit (`nodeagent.runtime.api_server`). `many`: its response may
    be larger than one object.
    """

    method: str
    path: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    timeout_seconds: float = 30.0
    urgent: bool = False
    many: bool = False


@dataclass(frozen=True)
class Response:
    """A response of any status; `retry_after` and `date` are the headers of these names."""

    status: int
    body: bytes
    retry_after: str | None = None
    date: str | None = None


class Transport(Protocol):
    """Sends requests to the API server."""

    async def request(self, request: Request) -> Response:
        """Return the response, of any status.

        Raises:
            UnreachableError: no response within the request's timeout, or a larger one than any object.
        """

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a streamed response and yield it line by line, without line ends.

        The iterator ends when the server ends the response. `timeout_seconds` bounds the
        time between two chunks, not the total. Leaving the context closes the connection.

        Raises:
            KubeError: the server rejected the request (raised on entering).
            UnreachableError: the connection failed, broke, or was idle for too long.
            GoneError: a line is longer than any object; list again.
        """

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""


def reaching(request: Request, faults: type[Exception] | tuple[type[Exception], ...] = OSError) -> Translated:
    """Return the context in which these errors, all of a connection, are an UnreachableError about the request."""
    return Translated(faults, errors.UnreachableError, f"{request.method} {request.path}")


async def read_all(request: Request, pieces: AsyncIterator[bytes]) -> bytes:
    """Return a body that arrives in pieces.

    Raises:
        UnreachableError: more was read than any object has: something else than an API server sends it.
    """
    read, size_bytes = [], 0
    async for piece in pieces:
        read.append(piece)
        size_bytes += len(piece)
        if size_bytes > _LARGEST_OBJECT_BYTES and not request.many:
            limit = _LARGEST_OBJECT_BYTES >> 20
            raise errors.UnreachableError(f"{request.method} {request.path}: the response exceeds {limit} MiB")
    return b"".join(read)


class LineSplitter:
    """Splits a streamed response into its lines."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    @property
    def rest(self) -> bytes:
        """The line that has not ended yet."""
        return b"".join(self._pieces)

    def split(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in `piece`, without line ends; raise GoneError if one is longer than any object."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = self.rest + lines[0]
            self._pieces, self._size_bytes = [], 0
        self._pieces.append(rest)
        self._size_bytes += len(rest)
        if self._size_bytes > _LARGEST_OBJECT_BYTES:
            request, limit = self._request, _LARGEST_OBJECT_BYTES >> 20
            raise errors.GoneError(f"{request.method} {request.path}: a line exceeds {limit} MiB")
        return lines


_SHOWN_BYTES: Final = 100
"""The beginning of an answer that is shown if it is not JSON."""


class Deletion(Enum):
    """Result of a delete request."""

    NOT_FOUND = auto()
    CONFLICT = auto()
    """An object with another UID has the name, or this one was just changed; nothing was deleted."""
    STARTED = auto()
    """The object still exists: it has a finalizer, or is a pod within its grace period."""
    DONE = auto()


_T = TypeVar("_T")


class _ListMeta(msgspec.Struct):
    token: str = msgspec.field(default="", name="continue")
    version: str = msgspec.field(default="", name="resourceVersion")


class ListBody(msgspec.Struct, Generic[_T]):
    """One page of a list; its objects are as from `json.loads`, or still JSON text."""

    metadata: _ListMeta
    items: list[_T] = []


def parse_deletion(response: JsonDict) -> Deletion:
    """Return the result of a DELETE that answered with an object: the remaining one or, for pods, the old one.

    Nothing else of that object is read, so its form is not checked: a pod that is deleted without a grace
    period may come without a resourceVersion.
    Source: Kubernetes v1.34, apiserver/pkg/registry/generic/registry/store.go (Delete, finalizeDelete) and
    pkg/registry/core/pod (ReturnDeletedObject, CheckGracefulDelete).
    """
    meta = response.get("metadata")
    if not isinstance(meta, dict):
        return Deletion.STARTED
    remains = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
    return Deletion.STARTED if remains else Deletion.DONE


def parse_body(response: Response, _: str) -> bytes:
    """Return the response as it is."""
    return response.body


def parse_object(response: Response, attempted: str) -> JsonDict:
    """Return the JSON object in `response`, else raise UnreachableError, and the request is retried.

    A proxy, or a server that is starting, may answer with a page of its own and status 200.
    """
    body = response.body
    try:
        parsed = errors.parse_json(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        # What begins like an object may be part of a Secret.
        shown = f"{len(body)} bytes" if body.lstrip()[:1] == b"{" else repr(body[:_SHOWN_BYTES])
        raise errors.UnreachableError(f"{attempted}: {response.status}: the answer is not a JSON object: {shown}")
    return parsed


def parse_list(response: Response, attempted: str) -> ListBody[Any]:
    """Return the list in `response`; raise UnreachableError if it holds none."""
    body = parse_object(response, attempted)
    try:
        return msgspec.convert(body, ListBody[Any])
    except (ValueError, RecursionError) as e:
        raise errors.UnreachableError(f"{attempted}: the answer is not a list: {explain_invalid(e)}") from e


def parse_raw_list(response: Response, attempted: str) -> ListBody[msgspec.Raw]:
    """Return the list in `response` without reading its objects: thousands take milliseconds."""
    try:
        return msgspec.json.decode(response.body, type=ListBody[msgspec.Raw])
    except (ValueError, RecursionError):
        # Something in it is null, not UTF-8, or nested too deeply: rare, and no reason to lose the other objects.
        body = parse_list(response, attempted)
    return ListBody(body.metadata, [msgspec.Raw(msgspec.json.encode(item)) for item in body.items])


async def is_unserved(transport: Transport, resource: Resource) -> bool:
    """Return whether the API server lists its resources, and `resource` is not one of them.

    The ClusterRole `system:discovery` permits that to every authenticated user.
    Source: Kubernetes v1.34, API concepts, "Discovery API" (unaggregated).
    """
    if not resource.group:
        return False
    try:
        groups = await _read(transport, "/apis", "APIGroupList")
        if resource.api_version not in {one["groupVersion"] for group in groups["groups"] for one in group["versions"]}:
            return True
        served = await _read(transport, f"/apis/{resource.api_version}", "APIResourceList")
        return resource.plural not in {one["name"] for one in served["resources"]}
    except (errors.KubeError, ValueError, RecursionError, KeyError, TypeError):
        # It is no list, or has another form.
        return False


async def _read(transport: Transport, path: str, kind: str) -> JsonDict:
    """Return the answer to a GET of `path`; raise KubeError if it was rejected, ValueError if it is of another kind."""
    answer = await transport.request(Request("GET", path))
    errors.raise_for_status(answer.status, answer.body, attempted=f"get {path}")
    found = parse_object(answer, path)
    if found.get("kind") != kind:
        raise ValueError(path)
    return found


KEEPALIVE_OPTIONS: Final[Mapping[tuple[int, int], int]] = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 15,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 30_000,
}
"""Level and name of each option, and its value; seconds, except milliseconds for TCP_USER_TIMEOUT.

The first probe follows 15 s of silence. The connection is closed at most 30 s after the last packet from
the server, or 30 s after the first data that it does not acknowledge: the probes alone do not count while data
is in flight. Source: Linux, tcp(7).
"""


def keep_alive(connection: socket.socket) -> None:
    """Set the options on a TCP socket, connected or not."""
    for (level, name), value in KEEPALIVE_OPTIONS.items():
        connection.setsockopt(level, name, value)


def trust_like_go(context: ssl.SSLContext) -> None:
    """Trust the authorities of clusters as other clients do: one without key identifiers, one that is not self-signed.

    Source: Go, crypto/x509 (Verify: each certificate of the pool is trusted); Python 3.13, create_default_context
    (strict). The authority of a cluster of EKS from before 2020 has no identifier.
    """
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


_RETRY_AFTER_LIMIT_SECONDS = 30.0
"""Limit of the server's `Retry-After` for one request; the work queue retries later."""

_PATIENT_SECONDS: Final = 300.0
_PATIENT_ATTEMPTS: Final = 100
"""A single API server is unavailable for minutes while its machine restarts or its control plane is updated."""

_DENIED = (errors.ForbiddenError, errors.UnauthorizedError)


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

        `after_lost_response=False`: an attempt that may have been applied (a server error or no response) is not
        repeated, only one after a 429, which was not processed.
        """
        started = self.clock.monotonic()

        def is_transient(error: BaseException) -> bool:
            if isinstance(error, errors.ThrottledError):
                return True
            if isinstance(error, _DENIED):
                return self.clock.monotonic() - started < self.forbidden_seconds
            return after_lost_response and isinstance(error, errors.ServerError)

        try:
            # Nearly all requests succeed at once, and tenacity costs a tenth of sending one.
            return await once()
        except errors.KubeError as e:
            if not is_transient(e):
                raise
            failed: list[errors.KubeError] = [e]

        lost = isinstance(failed[0], errors.ServerError)

        async def again() -> _T:
            """Run once; the first attempt is the one that has already failed."""
            nonlocal lost
            if failed:
                raise failed.pop()
            try:
                return await once()
            except errors.ServerError:
                lost = True
                raise
            except errors.ConflictError as e:
                e.may_be_own = lost
                raise

        return await self._build(is_transient, started)(again)

    def _build(self, is_transient: Callable[[BaseException], bool], started_seconds: float) -> AsyncRetrying:
        """Return the retries after errors that `is_transient`, limited in time from `started_seconds`."""
        backoff = wait_exponential_jitter(
            multiplier=self.first_wait_seconds, max=self.wait_limit_seconds, jitter=self.first_wait_seconds
        )

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            retry_after = error.retry_after_seconds if isinstance(error, errors.KubeError) else None
            if retry_after is not None:
                return min(retry_after, _RETRY_AFTER_LIMIT_SECONDS) + backoff(state) / 10
            return float(backoff(state))

        def stop(state: RetryCallState) -> bool:
            until = self.clock.monotonic() - started_seconds + wait(state)
            if state.outcome and isinstance(state.outcome.exception(), _DENIED):
                return until > self.forbidden_seconds
            return state.attempt_number >= self.attempts or until > self.total_seconds

        return AsyncRetrying(
            retry=retry_if_exception(is_transient), wait=wait, stop=stop, sleep=self.clock.sleep, reraise=True
        )
