"""Emulators of cloud storages on loopback: Azurite for Azure, fake-gcs-server for Google Cloud Storage.

Each speaks TLS with the certificate of the storage's real name, which `tests.datamover.support.internet` leads to it.
"""

import base64
import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.datamover.support.servers import run_server
from tests.support.sockets import free_port
from tests.support.tools import azurite_folder, tool
from tests.testbed.pki import KeyPair

_VERSION = "2024-11-04"
_TOKEN_SECONDS = 3600


def bearer_token(audience: str) -> str:
    """Return a token of Azure's form; Azurite checks audience, issuer and times, and no signature."""
    now = int(time.time())
    client = {"iss": "https://sts.windows.net/tenant/", "oid": "object-of-the-client", "tid": "tenant"}
    claims = {**client, "aud": audience, "iat": now, "nbf": now - 60, "exp": now + _TOKEN_SECONDS}
    parts = (json.dumps(part).encode() for part in ({"alg": "RS256", "typ": "JWT"}, claims))
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "c2lnbmF0dXJl"])


def _send(port: int, method: str, target: str, content: bytes, headers: dict[str, str]) -> None:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=tls, timeout=30)
    try:
        connection.request(method, target, content, headers)
        answer = connection.getresponse()
        if answer.status not in {200, 201}:
            raise RuntimeError(f"{method} {target}: {answer.status} {answer.read().decode()}")
    finally:
        connection.close()


@dataclass(frozen=True)
class Azurite:
    """A running Azurite with one storage account."""

    port: int
    account: str
    key: str

    @property
    def host(self) -> str:
        return f"{self.account}.blob.core.windows.net"

    def make_container(self, name: str) -> str:
        self._put(f"/{name}?restype=container", b"", {})
        return name

    def put(self, container: str, name: str, content: bytes) -> None:
        self._put(f"/{container}/{name}", content, {"x-ms-blob-type": "BlockBlob"})

    def _put(self, target: str, content: bytes, headers: dict[str, str]) -> None:
        token = bearer_token("https://storage.azure.com")
        own = {"Host": self.host, "Authorization": f"Bearer {token}", "x-ms-version": _VERSION}
        _send(self.port, "PUT", target, content, headers | own)


@dataclass(frozen=True)
class FakeGcs:
    """A running fake-gcs-server over a directory, where a bucket is a directory."""

    port: int
    folder: Path

    def make_bucket(self, name: str) -> str:
        (self.folder / name).mkdir(exist_ok=True)
        return name

    def put(self, bucket: str, name: str, content: bytes) -> None:
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        _send(self.port, "POST", target, content, {"Host": "storage.googleapis.com"})


@contextmanager
def run_azurite(folder: Path, account: str, tls: KeyPair) -> Iterator[Azurite]:
    """Start Azurite, and stop it at the end; it accepts TLS only, keys, and tokens of Azure's form."""
    key = base64.b64encode(f"key-of-{account}-for-tests".encode()).decode()
    found = azurite_folder()
    server = Azurite(free_port(), account, key)
    argv: list[str | Path] = [
        *(found / "node", found / "node_modules/azurite/dist/src/blob/main.js"),
        *("--blobHost", "127.0.0.1", "--blobPort", str(server.port), "--location", folder),
        *("--cert", tls.certificate, "--key", tls.key, "--oauth", "basic"),
        *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
    ]
    with run_server(argv, {"AZURITE_ACCOUNTS": f"{account}:{key}"}, folder, server.port):
        yield server


@contextmanager
def run_fake_gcs(folder: Path, tls: KeyPair) -> Iterator[FakeGcs]:
    """Start fake-gcs-server, and stop it at the end; it accepts TLS only, and any token."""
    server = FakeGcs(free_port(), folder)
    argv: list[str | Path] = [
        *(tool("fake-gcs-server", "fake-gcs-server"), "-backend", "filesystem", "-filesystem-root", folder),
        *("-host", "127.0.0.1", "-port", str(server.port), "-scheme", "https"),
        *("-cert-location", tls.certificate, "-private-key-location", tls.key),
        *("-public-host", "storage.googleapis.com", "-external-url", "https://storage.googleapis.com"),
    ]
    with run_server(argv, {}, folder, server.port):
        yield server
