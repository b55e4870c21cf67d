"""What kopia gets in the place of a file with a token, which a link in a volume could name.

The identities of managed clusters are such files: kopia's libraries open them again and again. This process reads them
instead, and kopia asks it for AWS's keys and Google's tokens on the loopback interface, as a service of the cloud. No
link can name that service, and it answers only requests with its secret, which is in kopia's memory alone. Azure's
library has no such way, so kopia gets a signature for the container.
Source: kopia 0.23.1, repo/blob/s3, gcs and azure; minio-go 7.2.0, pkg/credentials/iam_aws.go and assume_role.go;
cloud.google.com/go/auth 0.20, credentials/detect.go and internal/externalaccount/url_provider.go.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hmac import compare_digest
from http import HTTPStatus
from pathlib import Path
from typing import Final

from core.clock import Clock
from core.errors import RepositoryError, StorageOutageError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.bandwidth.dialing import BadRequestError, RequestHead
from datamover.storage.providers import AZURE_AUTHORITY, GOOGLE_FILE, AzureIdentity, google_token_file, read_inherited
from datamover.storage.s3 import AwsAssumedRole, AwsKeys, AwsRole, find_aws_identity

_logger = logging.getLogger(__name__)

_END: Final = b"\r\n\r\n"
_REQUEST_SECONDS: Final = 30.0
_MOST_BODY_BYTES: Final = 65536


@dataclass(frozen=True)
class Loopback:
    """The URL of the service, and the value of the header that a request must have."""

    url: str
    secret: str = field(repr=False)


LoopbackAnswer = tuple[HTTPStatus, bytes]
"""The status of an answer, and its body."""


@asynccontextmanager
async def serve_on_loopback(header: str, answer: Callable[[], Awaitable[LoopbackAnswer]]) -> AsyncIterator[Loopback]:
    """Within the block, answer each request that has the secret in its `header` with what `answer` returns."""
    secret = secrets.token_urlsafe(32)
    serving: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work = _serve(reader, writer, lambda head: _knows(head, header, secret), answer)
        task = asyncio.get_running_loop().create_task(work, name="request for credentials")
        serving.add(task)
        task.add_done_callback(serving.discard)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        try:
            yield Loopback(f"http://{host}:{port}", secret)
        finally:
            server.close()
            for task in serving:
                task.cancel()
            if serving:
                await asyncio.wait(serving)


def _knows(head: RequestHead, header: str, secret: str) -> bool:
    return compare_digest("".join(head.values(header)).encode("latin-1"), secret.encode())


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    is_allowed: Callable[[RequestHead], bool],
    answer: Callable[[], Awaitable[LoopbackAnswer]],
) -> None:
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            head = RequestHead.parse((await reader.readuntil(_END)).removesuffix(_END))
            await reader.readexactly(min(head.body_bytes or 0, _MOST_BODY_BYTES))
        status, content = await answer() if is_allowed(head) else (HTTPStatus.FORBIDDEN, b"")
        lines = [f"HTTP/1.1 {status} {status.phrase}", f"Content-Length: {len(content)}"]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + content)
        await writer.drain()
    except (OSError, EOFError, TimeoutError, BadRequestError, asyncio.LimitOverrunError) as e:
        _logger.debug("request for credentials ended: %s", e)
    finally:
        writer.close()


_OWN_CREDENTIALS: Final = ("accessKeyID", "storageKey", "sasToken", "ClientSecret", "clientCertificate", "credentials")
"""Secrets in the configuration of a storage, which take precedence over a token file."""

_AWS_HEADER: Final = "x-amz-security-token"
_GOOGLE_HEADER: Final = "authorization"

_AZURE_DOMAIN: Final = "blob.core.windows.net"

_WITHIN: Final = timedelta(seconds=30)
"""How long one request is repeated before kopia gets an error, and asks again."""


@dataclass(frozen=True)
class Replacement:
    """What replaces a token file: the configuration of the storage, and files that kopia reads once, by variable."""

    config: JsonDict = field(repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@asynccontextmanager
async def replace_token_files(
    storage: JsonDict, environment: Mapping[str, str], *, redactor: Redactor, clock: Clock, keeps_azure: bool = False
) -> AsyncIterator[Replacement]:
    """Yield what kopia needs in the place of token files, during the block.

    `storage` is the object of kopia's configuration, with its keys, and `environment` kopia's. `redactor` learns the
    secrets. `keeps_azure`: kopia may read a token file of Azure itself.

    Raises:
        RepositoryError: a credentials file of Google cannot be read, or Azure grants no signature.
    """
    config: JsonDict = storage["config"]
    replace = _REPLACE.get(storage["type"])
    keeps = keeps_azure and storage["type"] == "azureBlob"
    if replace is None or keeps or _has_credentials(config):
        yield Replacement(config)
        return
    async with AsyncExitStack() as stack:
        yield await replace(config, environment, redactor, clock, stack)


async def _replace_for_s3(
    config: JsonDict, environment: Mapping[str, str], redactor: Redactor, clock: Clock, stack: AsyncExitStack
) -> Replacement:
    if (request := _find_aws_request(environment, redactor)) is None:
        return Replacement(config)

    async def answer() -> LoopbackAnswer:
        # Few locations need it.
        from datamover.storage.token_requests import encode_refusal, request_grant  # noqa: PLC0415

        try:
            return HTTPStatus.OK, await request_grant(request, clock, within=_WITHIN, name="aws-keys")
        except RepositoryError as e:
            passing = isinstance(e, StorageOutageError)
            status = HTTPStatus.SERVICE_UNAVAILABLE if passing else HTTPStatus.FORBIDDEN
            return status, encode_refusal(redactor.redact(str(e)))

    loopback = await stack.enter_async_context(serve_on_loopback(_AWS_HEADER, answer))
    redactor.add(loopback.secret)
    # kopia signs its request with these keys; the service reads the session token alone.
    role = AwsAssumedRole("loopback", AwsKeys("loopback", loopback.secret, loopback.secret), profile="")
    return Replacement(config | role.config | {"roleEndpoint": loopback.url})


def _find_aws_request(environment: Mapping[str, str], redactor: Redactor) -> Callable[[], bytes] | None:
    """Return what requests keys for a token file, in the precedence of kopia's library; None: there is no such file."""
    role = find_aws_identity(None, environment)
    url = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    file = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
    if isinstance(role, AwsRole) and Path(role.token_file).is_file():
        from datamover.storage.token_requests import assume_role  # noqa: PLC0415 - few locations need it

        return partial(assume_role, role, _read_authority(environment), redactor)
    if url and Path(file).is_file() and not environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        from datamover.storage.token_requests import ask_node  # noqa: PLC0415

        return partial(ask_node, url, file, redactor)
    return None


def _read_authority(environment: Mapping[str, str]) -> bytes:
    """Return the authority that kopia trusts in addition to the system's."""
    file = Path(environment.get("SSL_CERT_FILE", ""))
    return file.read_bytes() if file.is_file() else b""


async def _replace_for_google(
    config: JsonDict, environment: Mapping[str, str], redactor: Redactor, _clock: Clock, stack: AsyncExitStack
) -> Replacement:
    if (source := read_inherited(environment, GOOGLE_FILE)) is None:
        return Replacement(config)
    if not (file := google_token_file(source)):
        return Replacement(config, {GOOGLE_FILE: source.text.encode()})

    async def answer() -> LoopbackAnswer:
        return _read_subject_token(Path(file))

    loopback = await stack.enter_async_context(serve_on_loopback(_GOOGLE_HEADER, answer))
    redactor.add(loopback.secret)
    document = json.loads(source.text)
    origin = document.get("source_credentials", document)["credential_source"]
    del origin["file"]
    origin |= {"url": loopback.url, "headers": {_GOOGLE_HEADER: loopback.secret}}
    return Replacement(config, {GOOGLE_FILE: json.dumps(document).encode()})


def _read_subject_token(file: Path) -> LoopbackAnswer:
    """Return the content of a file as kopia's library reads it."""
    try:
        return HTTPStatus.OK, file.read_bytes().strip()
    except OSError as e:
        text = f"credential_source.file: cannot read {file}: {e.strerror}"
        return HTTPStatus.INTERNAL_SERVER_ERROR, text.encode()


async def _replace_for_azure(
    config: JsonDict, environment: Mapping[str, str], redactor: Redactor, clock: Clock, _stack: AsyncExitStack
) -> Replacement:
    if (file := azure_token_file(config)) is None:
        return Replacement(config)
    from datamover.storage.azure_keys import AzureContainer, fetch_signature  # noqa: PLC0415 - few locations need it

    authority = environment.get("AZURE_AUTHORITY_HOST") or AZURE_AUTHORITY
    container = AzureContainer(
        account=config["storageAccount"],
        domain=config.get("storageDomain") or _AZURE_DOMAIN,
        name=config["container"],
        identity=AzureIdentity(authority, config["TenantID"], config["ClientID"], token_file=file),
    )
    signature = await fetch_signature(container, _read_authority(environment), clock, redactor)
    return Replacement(config | {"azureFederatedTokenFile": "", "sasToken": signature})


def azure_token_file(config: JsonDict) -> str | None:
    """Return the file with a federated token that kopia opens again and again, by a storage's `config`, or None."""
    file = config.get("azureFederatedTokenFile", "")
    return file if file and not _has_credentials(config) and Path(file).is_file() else None


def _has_credentials(config: JsonDict) -> bool:
    return any(config.get(key) for key in _OWN_CREDENTIALS)


_Replace = Callable[[JsonDict, Mapping[str, str], Redactor, Clock, AsyncExitStack], Awaitable[Replacement]]
_REPLACE: Final[Mapping[str, _Replace]] = {
    "s3": _replace_for_s3,
    "gcs": _replace_for_google,
    "azureBlob": _replace_for_azure,
}
"""Keyed by kopia's type of storage."""
