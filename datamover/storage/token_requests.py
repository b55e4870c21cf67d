"""Requests to services that grant credentials: through the proxy of the environment, without redirections, retried.

Keys of an AWS role are granted for a token: by a token service (IRSA), or by the node's agent (EKS Pod Identity).
Loaded only where a location needs it, since an HTTP client takes memory.
Source: AWS Security Token Service API reference, AssumeRoleWithWebIdentity and AssumeRole; AWS SDKs, container
credential provider; for which of them is used, and where: minio-go 7.2.0, pkg/credentials/iam_aws.go.
"""

import json
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from html import escape, unescape
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any, Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from core.clock import Backoff, Clock, Deadline
from core.errors import RepositoryError, StorageOutageError
from core.kube.transport import trust_like_go
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.runtime.cancellation import call_in_thread
from datamover.storage.providers import read_credentials
from datamover.storage.s3 import DEFAULT_SESSION, AwsRole, token_service

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_BACKOFF: Final = Backoff(1.0, 15.0)
_REQUEST_SECONDS: Final = 30.0
_READ_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 300

_BUSY: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_XML_MESSAGE: Final = re.compile(r"<Message>([^<]*)")


class RefusedError(RepositoryError):
    """A service did not grant what was requested; repeating the request would change nothing."""


class UnavailableError(StorageOutageError):
    """A service is busy or cannot be reached."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirection: it would take a secret to another host."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - of the base class
        """Return no request, which makes the response an error."""


async def request_grant(get: Callable[[], _T], clock: Clock, *, within: timedelta, name: str) -> _T:
    """Return what `get` returns in a thread; repeat it while a service is unavailable. Raises RepositoryError."""
    deadline = Deadline.after(clock, within)
    failures = 0
    while True:
        try:
            return await call_in_thread(get, name=name)
        except UnavailableError as e:
            failures += 1
            if deadline.expired:
                raise
            _logger.warning("%s: trying again", e)
        await clock.sleep(_BACKOFF.seconds_after(failures))


def build_client(authority_pem: bytes = b"") -> OpenerDirector:
    """Return a client that trusts an authority, in PEM, in addition to the system's; raises RefusedError."""
    tls = ssl.create_default_context()
    trust_like_go(tls)
    if authority_pem:
        try:
            tls.load_verify_locations(cadata=authority_pem.decode("ascii", errors="ignore"))
        except ssl.SSLError as e:
            raise RefusedError(f"caCert: not a certificate authority in PEM: {e.reason}") from e
    return build_opener(HTTPSHandler(context=tls), _NoRedirect)


def build_direct_client() -> OpenerDirector:
    """Return a client for link-local addresses, which cannot be reached through a proxy."""
    return build_opener(ProxyHandler({}), _NoRedirect)


def read_token(file: str, named_by: str, redactor: Redactor) -> str:
    """Return the token in a file, which `redactor` learns. Raises RepositoryError if it cannot be read."""
    token = read_credentials(file, named_by).text.strip()
    redactor.add(token)
    return token


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
            return _read(response)
    except HTTPError as e:
        text = f"{attempted}: {host}: {e.code} {_reason_of(e)}"
        passing = e.code in _BUSY | busy or e.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (UnavailableError if passing else RefusedError)(text) from None
    except URLError as e:
        if isinstance(e.reason, ssl.SSLCertVerificationError):
            text = f"{attempted}: {host}: its certificate is not trusted: {e.reason.verify_message}"
            raise RefusedError(text) from None
        raise UnavailableError(f"{attempted}: {host} cannot be reached: {e.reason}") from None
    except (OSError, HTTPException, UnicodeError) as e:
        # What it has sent may be long; a label of its name may be empty.
        raise UnavailableError(f"{attempted}: {host} does not answer: {str(e)[:_SHOWN_CHARACTERS]}") from None


def _read(response: HTTPResponse) -> bytes:
    content = response.read(_READ_BYTES)
    if response.length:
        # Part of an answer is no answer. With a limit, the library does not check that.
        raise IncompleteRead(content, response.length)
    return content


def _reason_of(error: HTTPError) -> str:
    """Return the first line of the error's description, which each service has in a place of its own."""
    content = b""
    with suppress(OSError, HTTPException), error:
        content = error.read(_READ_BYTES)
    answer: Mapping[str, Any] = parse_json(content)
    found = answer.get("error")
    text = found.get("message") if isinstance(found, dict) else answer.get("error_description") or found
    if not text and (named := _XML_MESSAGE.search(content.decode(errors="replace"))):
        text = named[1]
    return str(text or "").partition("\n")[0].strip()[:_SHOWN_CHARACTERS] or error.reason


def parse_json(content: bytes) -> JsonDict:
    """Return a JSON object; an empty one if the content is none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


_VERSION: Final = "2011-06-15"
_SCHEMA: Final = f"https://sts.amazonaws.com/doc/{_VERSION}/"
_NAMES: Final = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
_GRANTED: Final = re.compile(rf"<({'|'.join(_NAMES)})>([^<]+)</")


def encode_refusal(reason: str) -> bytes:
    """Return an error as a token service does."""
    inner = f"<Type>Sender</Type><Code>AccessDenied</Code><Message>{escape(reason)}</Message>"
    return f'<ErrorResponse xmlns="{_SCHEMA}"><Error>{inner}</Error></ErrorResponse>'.encode()


def assume_role(role: AwsRole, authority_pem: bytes, redactor: Redactor) -> bytes:
    """Return keys of the role from AWS's token service, for the token that its file contains now.

    They are encoded as the answer to a user who assumes a role, which is what kopia asks for. `authority_pem` is
    trusted in addition to the system's authorities. `redactor` learns token and keys.

    Raises:
        RepositoryError: they were not granted, or the service does not answer.
    """
    token = read_token(role.token_file, "AWS_WEB_IDENTITY_TOKEN_FILE", redactor)
    form = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": _VERSION,
        "RoleArn": role.arn,
        "RoleSessionName": role.session_name or DEFAULT_SESSION,
        "WebIdentityToken": token,
    }
    attempted = f"cannot assume role {role.arn} with the token in {role.token_file}"
    request = Request(token_service(role.region), urlencode(form).encode())  # noqa: S310 - https
    answer = send(build_client(authority_pem), request, attempted).decode(errors="replace")
    return _encode_grant({name: unescape(value) for name, value in _GRANTED.findall(answer)}, attempted, redactor)


def ask_node(url: str, token_file: str, redactor: Redactor) -> bytes:
    """Return keys of this pod's role from the agent of EKS Pod Identity on the node, as `assume_role` does."""
    token = read_token(token_file, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", redactor)
    attempted = f"cannot get keys of this pod's role with the token in {token_file}"
    if not (url.startswith(("http://", "https://")) and token.isascii() and token.isprintable()):
        raise RefusedError(f"{attempted}: the token or AWS_CONTAINER_CREDENTIALS_FULL_URI is invalid")
    request = Request(url, headers={"Authorization": token})  # noqa: S310 - link-local
    answer = parse_json(send(build_direct_client(), request, attempted))
    values = {"SessionToken" if name == "Token" else name: value for name, value in answer.items()}
    return _encode_grant(values, attempted, redactor)


def _encode_grant(values: Mapping[str, object], attempted: str, redactor: Redactor) -> bytes:
    try:
        keys = {name: str(values[name]) for name in _NAMES}
        datetime.fromisoformat(keys["Expiration"])
    except (KeyError, ValueError):
        raise RefusedError(f"{attempted}: the answer has no keys") from None
    redactor.add(keys["SecretAccessKey"], keys["SessionToken"])
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in keys.items())
    return (
        f'<AssumeRoleResponse xmlns="{_SCHEMA}"><AssumeRoleResult><Credentials>{inner}</Credentials>'
        "</AssumeRoleResult></AssumeRoleResponse>"
    ).encode()
