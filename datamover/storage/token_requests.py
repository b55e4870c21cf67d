"""Requests to services that grant credentials: through the proxy of the environment, without redirections, retried.

Loaded only where a location needs it, since an HTTP client takes memory.
"""

import json
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from core.clock import Backoff, Clock, Deadline
from core.errors import RepositoryError, StorageOutageError
from core.models.base import JsonDict
from datamover.runtime.cancellation import run_in_background

__all__ = ["RefusedError", "build_client", "build_direct_client", "parse_json", "read_token", "request_grant", "send"]

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_BACKOFF: Final = Backoff(1.0, 15.0)
_REQUEST_SECONDS: Final = 30.0
_READ_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 300

_BUSY: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_XML_MESSAGE: Final = re.compile(r"<Message>([^<]*)")


class RefusedError(RepositoryError):
    """A service did not grant what it was asked for; repeating the request would change nothing."""


class UnavailableError(StorageOutageError):
    """A service is busy or cannot be reached."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirection: it would take a secret to another host."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - of the base class
        """Return no request, which makes the response an error."""


async def request_grant(get: Callable[[], _T], clock: Clock, *, within: timedelta, name: str) -> _T:
    """Return what `get` returns in a thread; repeat it while a service is unavailable.

    Raises:
        RepositoryError: it was not granted, or no service answered within that time.
    """
    deadline = Deadline.after(clock, within)
    failures = 0
    while True:
        try:
            async with run_in_background(lambda _: get(), name=name) as granted:
                return await granted
        except UnavailableError as e:
            failures += 1
            if deadline.expired:
                raise
            _logger.warning("%s: trying again", e)
        await clock.sleep(_BACKOFF.seconds_after(failures))


def build_client(authority_pem: bytes = b"") -> OpenerDirector:
    """Return a client that trusts an authority in addition to the system's.

    Raises:
        RefusedError: it is not an authority in PEM.
    """
    tls = ssl.create_default_context()
    if authority_pem:
        try:
            tls.load_verify_locations(cadata=authority_pem.decode("ascii", errors="ignore"))
        except ssl.SSLError as e:
            raise RefusedError(f"caCert: not a certificate authority in PEM: {e.reason}") from e
    return build_opener(HTTPSHandler(context=tls), _NoRedirect)


def build_direct_client() -> OpenerDirector:
    """Return a client for link-local addresses, which cannot be reached through a proxy."""
    return build_opener(ProxyHandler({}), _NoRedirect)


def read_token(file: str, named_by: str) -> str:
    """Return the token in a file.

    Raises:
        RefusedError: it cannot be read.
    """
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise RefusedError(f"{named_by}: cannot read {file}: {e}") from e


def send(
    opener: OpenerDirector, request: Request, attempted: str, *, busy: frozenset[HTTPStatus] = frozenset()
) -> bytes:
    """Return the body of the answer.

    Raises:
        RefusedError: the service answered with an error that will stay.
        UnavailableError: it did not answer, or is busy.
    """
    # Behind a proxy, `host` becomes the proxy's.
    host = request.host
    try:
        with opener.open(request, timeout=_REQUEST_SECONDS) as response:
            content: bytes = response.read(_READ_BYTES)
            return content
    except HTTPError as e:
        with e:
            text = f"{attempted}: {host}: {e.code} {_reason(e.read(_READ_BYTES)) or e.reason}"
        passing = e.code in _BUSY | busy or e.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (UnavailableError if passing else RefusedError)(text) from None
    except URLError as e:
        if isinstance(e.reason, ssl.SSLCertVerificationError):
            text = f"{attempted}: {host}: its certificate is not trusted: {e.reason.verify_message}"
            raise RefusedError(text) from None
        raise UnavailableError(f"{attempted}: {host} cannot be reached: {e.reason}") from None
    except OSError as e:
        raise UnavailableError(f"{attempted}: {host} does not answer: {e}") from None


def parse_json(content: bytes) -> JsonDict:
    """Return a JSON object; an empty one if the content is none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _reason(content: bytes) -> str:
    """Return the first line of the error's description, which each service has in a place of its own."""
    answer: Mapping[str, Any] = parse_json(content)
    error = answer.get("error")
    text = error.get("message") if isinstance(error, dict) else answer.get("error_description") or error
    if not text and (found := _XML_MESSAGE.search(content.decode(errors="replace"))):
        text = found[1]
    return str(text or "").partition("\n")[0].strip()[:_SHOWN_CHARACTERS]
