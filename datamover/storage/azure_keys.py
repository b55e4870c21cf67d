"""What an identity of Azure can get for kopia: the key of a storage account, or a signature for a container.

Loaded only where a location needs it, since an HTTP client takes memory. kopia itself supports neither Azure's
management nor the managed identity of a node.
Source: Velero v1.18, exchangeStorageAccountAccessKey in pkg/util/azure/storage.go and NewCredential in credential.go;
azidentity 1.13, managed_identity_client.go; Azure REST API, Storage Accounts - List Keys, Get User Delegation Key,
Create a user delegation SAS.
"""

import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import unescape
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import OpenerDirector, Request

from core.clock import Clock
from core.redact import Redactor
from datamover.storage.providers import AzureAccountKey, AzureIdentity
from datamover.storage.token_requests import (
    RefusedError,
    build_client,
    build_direct_client,
    parse_json,
    read_token,
    request_grant,
    send,
)

_METADATA_VERSION: Final = "2018-02-01"
_KEYS_VERSION: Final = "2023-05-01"
_ASSERTION: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"

_TOTAL: Final = timedelta(minutes=5)
"""As for reads of the cluster: a mover pod is not retried as a whole."""

_STORAGE_AUDIENCE: Final = "https://storage.azure.com"
_STORAGE_VERSION: Final = "2022-11-02"
_PERMISSIONS: Final = "racwdl"
_LONGEST: Final = timedelta(days=7)
_SKEW: Final = timedelta(minutes=5)
"""How far the storage's clock may be behind."""

_KEY_FIELDS: Final = frozenset(
    ("SignedOid", "SignedTid", "SignedStart", "SignedExpiry", "SignedService", "SignedVersion", "Value")
)
_KEY_FIELD: Final = re.compile(r"<(\w+)>([^<]*)</")

_METADATA_BUSY: Final = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""While a node gets its identity, or the service is updated."""


async def fetch_account_key(wanted: AzureAccountKey, clock: Clock, redactor: Redactor) -> str:
    """Return the account's key with all permissions, within 5 minutes; `redactor` learns it; raises RepositoryError."""
    return await request_grant(lambda: _list_keys(wanted, redactor), clock, within=_TOTAL, name="azure-account-key")


def _list_keys(wanted: AzureAccountKey, redactor: Redactor) -> str:
    client = build_client(wanted.ca_pem)
    token = _sign_in(wanted.identity, wanted.audience, client, redactor)
    account = (
        f"/subscriptions/{quote(wanted.subscription, safe='')}/resourceGroups/{quote(wanted.group, safe='')}"
        f"/providers/Microsoft.Storage/storageAccounts/{quote(wanted.account, safe='')}"
    )
    url = f"{wanted.management}{account}/listKeys?api-version={_KEYS_VERSION}"
    attempted = f"cannot fetch the key of storage account {wanted.account} as {wanted.identity.description}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    answer = parse_json(send(client, Request(url, b"", headers, method="POST"), attempted))  # noqa: S310 - https
    for key in answer.get("keys") or []:
        if str(key.get("permissions", "")).lower() == "full" and isinstance(value := key.get("value"), str):
            redactor.add(value)
            return value
    raise RefusedError(f"{attempted}: it has no key with full permissions")


def _sign_in(identity: AzureIdentity, audience: str, client: OpenerDirector, redactor: Redactor) -> str:
    """Return a new token of an identity for an audience; `redactor` learns each secret. Raises RepositoryError."""
    redactor.add(identity.secret)
    attempted = f"cannot sign in to Azure as {identity.description}"
    if identity.secret or identity.token_file:
        answer = send(client, _build_login(identity, audience, redactor), attempted)
    else:
        query = {"api-version": _METADATA_VERSION, "resource": audience}
        if identity.client:
            query["client_id"] = identity.client
        url = f"{identity.metadata.rstrip('/')}/metadata/identity/oauth2/token?{urlencode(query)}"
        request = Request(url, headers={"Metadata": "true"})  # noqa: S310 - Azure's own, without TLS
        answer = send(build_direct_client(), request, attempted, busy=_METADATA_BUSY)
    token = parse_json(answer).get("access_token")
    if not isinstance(token, str) or not token:
        raise RefusedError(f"{attempted}: the answer has no access_token")
    redactor.add(token)
    return token


def _build_login(identity: AzureIdentity, audience: str, redactor: Redactor) -> Request:
    if urlsplit(identity.authority).scheme != "https":
        raise RefusedError(f'the authority of Azure identities must be https: "{identity.authority}"')
    proof = {"client_secret": identity.secret}
    if not identity.secret:
        assertion = read_token(identity.token_file, "AZURE_FEDERATED_TOKEN_FILE", redactor)
        proof = {"client_assertion_type": _ASSERTION, "client_assertion": assertion}
    form = {"grant_type": "client_credentials", "client_id": identity.client, "scope": f"{audience}/.default", **proof}
    url = f"{identity.authority.rstrip('/')}/{quote(identity.tenant, safe='')}/oauth2/v2.0/token"
    return Request(url, urlencode(form).encode())  # noqa: S310 - https, as checked


@dataclass(frozen=True)
class AzureContainer:
    """A container, and who asks for access to it."""

    account: str
    domain: str
    name: str
    identity: AzureIdentity


async def fetch_signature(wanted: AzureContainer, authority_pem: bytes, clock: Clock, redactor: Redactor) -> str:
    """Return a shared access signature for the container, valid for a week, as `fetch_account_key` does.

    `authority_pem` is trusted in addition to the system's authorities.
    """
    return await request_grant(
        lambda: _sign(wanted, build_client(authority_pem), clock.now(), redactor),
        clock,
        within=_TOTAL,
        name="azure-signature",
    )


def _sign(wanted: AzureContainer, client: OpenerDirector, now: datetime, redactor: Redactor) -> str:
    token = _sign_in(wanted.identity, _STORAGE_AUDIENCE, client, redactor)
    start, expiry = (time.strftime("%Y-%m-%dT%H:%M:%SZ") for time in (now - _SKEW, now - _SKEW + _LONGEST))
    body = f"<KeyInfo><Start>{start}</Start><Expiry>{expiry}</Expiry></KeyInfo>"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/xml", "x-ms-version": _STORAGE_VERSION}
    url = f"https://{wanted.account}.{wanted.domain}/?restype=service&comp=userdelegationkey"
    attempted = (
        f"cannot get a user delegation key of storage account {wanted.account} as {wanted.identity.description}, "
        "which needs the action generateUserDelegationKey on the account"
    )
    answer = send(client, Request(url, body.encode(), headers), attempted).decode(errors="replace")
    key = {name: unescape(value) for name, value in _KEY_FIELD.findall(answer)}
    if _KEY_FIELDS - key.keys():
        raise RefusedError(f"{attempted}: the answer has no key")
    signature = _signature(wanted, key, start, expiry)
    redactor.add(key["Value"], signature)
    return signature


def _signature(wanted: AzureContainer, key: Mapping[str, str], start: str, expiry: str) -> str:
    """Return the query of a shared access signature for all that kopia does in the container."""
    of_key = [key[name] for name in ("SignedOid", "SignedTid", "SignedStart", "SignedExpiry", "SignedService")]
    signed = [
        *(_PERMISSIONS, start, expiry, f"/blob/{wanted.account}/{wanted.name}"),
        *(*of_key, key["SignedVersion"]),
        # Other users, a correlation, and addresses.
        *("", "", "", ""),
        *("https", _STORAGE_VERSION, "c"),
        # A blob's version, an encryption scope, and headers of the answer.
        *("", "", "", "", "", "", ""),
    ]
    digest = hmac.digest(b64decode(key["Value"]), "\n".join(signed).encode(), "sha256")
    names = ("skoid", "sktid", "skt", "ske", "sks", "skv")
    return urlencode(
        {
            "sv": _STORAGE_VERSION,
            "sp": _PERMISSIONS,
            "st": start,
            "se": expiry,
            "sr": "c",
            "spr": "https",
            **dict(zip(names, [*of_key, key["SignedVersion"]], strict=True)),
            "sig": b64encode(digest).decode(),
        }
    )
