"""The key of an Azure storage account, fetched from Azure's management with the identity of a client, pod or node.

Loaded only where a location needs it, since an HTTP client takes memory. kopia itself supports neither Azure's
management nor the managed identity of a node. Knows the requests that both need, and retries them. Does not know which
location needs a key (`datamover.storage.azure`).
Source: Velero v1.18, exchangeStorageAccountAccessKey in pkg/util/azure/storage.go and NewCredential in credential.go;
azidentity 1.13, managed_identity_client.go; Azure REST API, Storage Accounts - List Keys.
"""

import json
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from core.clock import Backoff, Clock, Deadline
from core.errors import RepositoryError, StorageOutageError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.runtime.cancellation import run_in_background
from datamover.storage.credentials import AzureAccountKey, AzureIdentity

__all__ = ["fetch_account_key"]

_logger = logging.getLogger(__name__)

_METADATA_VERSION: Final = "2018-02-01"
_KEYS_VERSION: Final = "2023-05-01"
_ASSERTION: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"

_TOTAL: Final = timedelta(minutes=5)
"""As for reads of the cluster: a mover pod is not retried as a whole."""

_BACKOFF: Final = Backoff(1.0, 15.0)
_REQUEST_SECONDS: Final = 30.0
_READ_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 300

_BUSY: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_METADATA_BUSY: Final = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""While a node gets its identity, or the service is updated."""


class _RefusedError(RepositoryError):
    """A service did not grant what it was asked for; repeating the request would change nothing."""


class _UnavailableError(StorageOutageError):
    """A service is busy or cannot be reached."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirection: it would take a secret to another host."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - of the base class
        """Return no request, which makes the response an error."""


async def fetch_account_key(wanted: AzureAccountKey, clock: Clock, redactor: Redactor) -> str:
    """Return the key of the account with all permissions; repeat requests for 5 minutes.

    Args:
        redactor: learns each secret on the way.

    Raises:
        RepositoryError: the identity or the key was not granted, or a service does not answer.
    """
    redactor.add(wanted.identity.secret)
    fetching = _Fetching(wanted, redactor)
    deadline = Deadline.after(clock, _TOTAL)
    failures = 0
    while True:
        try:
            async with run_in_background(lambda _: fetching.key(), name="azure-account-key") as fetched:
                return await fetched
        except _UnavailableError as e:
            failures += 1
            if deadline.expired:
                raise
            _logger.warning("%s: trying again", e)
        await clock.sleep(_BACKOFF.seconds_after(failures))


@dataclass(frozen=True)
class _Fetching:
    wanted: AzureAccountKey
    redactor: Redactor

    def key(self) -> str:
        wanted = self.wanted
        token = self._token()
        self.redactor.add(token)
        account = (
            f"/subscriptions/{quote(wanted.subscription, safe='')}/resourceGroups/{quote(wanted.group, safe='')}"
            f"/providers/Microsoft.Storage/storageAccounts/{quote(wanted.account, safe='')}"
        )
        url = f"{wanted.management}{account}/listKeys?api-version={_KEYS_VERSION}"
        attempted = f"cannot fetch the key of storage account {wanted.account} as {wanted.identity.description}"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        answer = _send(self._opener, Request(url, b"", headers, method="POST"), attempted)  # noqa: S310 - https
        for key in answer.get("keys") or []:
            if str(key.get("permissions", "")).lower() == "full" and isinstance(value := key.get("value"), str):
                self.redactor.add(value)
                return value
        raise _RefusedError(f"{attempted}: it has no key with full permissions")

    def _token(self) -> str:
        identity = self.wanted.identity
        attempted = f"cannot sign in to Azure as {identity.description}"
        if identity.secret or identity.token_file:
            return _access_token(self._opener, self._login(identity), attempted)
        query = {"api-version": _METADATA_VERSION, "resource": self.wanted.audience}
        if identity.client:
            query["client_id"] = identity.client
        url = f"{identity.metadata.rstrip('/')}/metadata/identity/oauth2/token?{urlencode(query)}"
        # Link-local: it cannot be reached through a proxy.
        direct = build_opener(ProxyHandler({}), _NoRedirect)
        request = Request(url, headers={"Metadata": "true"})  # noqa: S310 - Azure's own, without TLS
        return _access_token(direct, request, attempted, busy=_METADATA_BUSY)

    def _login(self, identity: AzureIdentity) -> Request:
        if urlsplit(identity.authority).scheme != "https":
            raise _RefusedError(f'the authority of Azure identities must be https: "{identity.authority}"')
        proof = {"client_secret": identity.secret}
        if not identity.secret:
            proof = {"client_assertion_type": _ASSERTION, "client_assertion": self._assertion(identity.token_file)}
        form = {
            "grant_type": "client_credentials",
            "client_id": identity.client,
            "scope": f"{self.wanted.audience}/.default",
            **proof,
        }
        url = f"{identity.authority.rstrip('/')}/{quote(identity.tenant, safe='')}/oauth2/v2.0/token"
        return Request(url, urlencode(form).encode())  # noqa: S310 - https, as checked

    def _assertion(self, token_file: str) -> str:
        try:
            token = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise _RefusedError(f"AZURE_FEDERATED_TOKEN_FILE: cannot read {token_file}: {e}") from e
        self.redactor.add(token)
        return token

    @property
    def _opener(self) -> OpenerDirector:
        """Requests through the proxy of the environment, which trust the location's authority in addition."""
        tls = ssl.create_default_context()
        if self.wanted.ca_pem:
            try:
                tls.load_verify_locations(cadata=self.wanted.ca_pem.decode("ascii", errors="ignore"))
            except ssl.SSLError as e:
                raise _RefusedError(f"caCert: not a certificate authority in PEM: {e.reason}") from e
        return build_opener(HTTPSHandler(context=tls), _NoRedirect)


def _access_token(
    opener: OpenerDirector, request: Request, attempted: str, *, busy: frozenset[HTTPStatus] = frozenset()
) -> str:
    token = _send(opener, request, attempted, busy=busy).get("access_token")
    if not isinstance(token, str) or not token:
        raise _RefusedError(f"{attempted}: the answer has no access_token")
    return token


def _send(
    opener: OpenerDirector, request: Request, attempted: str, *, busy: frozenset[HTTPStatus] = frozenset()
) -> JsonDict:
    """Return the JSON object of the answer.

    Raises:
        _RefusedError: the service answered with an error that will stay.
        _UnavailableError: it did not answer, or is busy.
    """
    # Behind a proxy, `host` becomes the proxy's.
    host = request.host
    try:
        with opener.open(request, timeout=_REQUEST_SECONDS) as response:
            return _parse(response.read)
    except HTTPError as e:
        with e:
            text = f"{attempted}: {host}: {e.code} {_reason(_parse(e.read)) or e.reason}"
        passing = e.code in _BUSY | busy or e.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (_UnavailableError if passing else _RefusedError)(text) from None
    except URLError as e:
        if isinstance(e.reason, ssl.SSLCertVerificationError):
            text = f"{attempted}: {host}: its certificate is not trusted: {e.reason.verify_message}"
            raise _RefusedError(text) from None
        raise _UnavailableError(f"{attempted}: {host} cannot be reached: {e.reason}") from None
    except OSError as e:
        raise _UnavailableError(f"{attempted}: {host} does not answer: {e}") from None


def _parse(read: Callable[[int], bytes]) -> JsonDict:
    try:
        document = json.loads(read(_READ_BYTES))
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _reason(answer: Mapping[str, Any]) -> str:
    """Return the first line of the error's description, which both services have in a place of their own."""
    error = answer.get("error")
    text = error.get("message") if isinstance(error, dict) else answer.get("error_description") or error
    return str(text or "").partition("\n")[0].strip()[:_SHOWN_CHARACTERS]
