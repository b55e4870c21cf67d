"""How S3 is reached beyond a plain pair of keys: TLS of one's own, session tokens, an instance's identity."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from core.errors import RepositoryError
from datamover.kopia.repository import NotInitializedError
from datamover.kopia.snapshots import list_snapshots
from datamover.storage.credentials import AwsKeys
from datamover.storage.providers import S3Storage
from tests.datamover.support.places import configurations, opened, s3_storage
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.testbed.pki import Authority


class _Answering:
    """Gives every request the same answer, and keeps what was asked."""

    def __init__(self, status: str, body: str) -> None:
        self._answer = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self._answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def _serving(answering: _Answering) -> AsyncIterator[str]:
    """Yield the address of the server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = await asyncio.start_server(answering.serve, sock=listening)
        async with server:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "authority")


@pytest.fixture(scope="module")
def secure(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that only speaks TLS, with a certificate of an authority that nobody knows."""
    pair = authority.issue("s3", user="s3", addresses=("IP:127.0.0.1",))
    with run_s3_server(tmp_path_factory.mktemp("secure"), pair) as server:
        yield server


async def test_a_certificate_of_ones_own_authority_is_trusted(secure: S3Server, authority: Authority) -> None:
    storage = s3_storage(secure, secure.make_bucket("trusted"))
    with opened(replace(storage, ca_pem=authority.pair.certificate.read_bytes())) as repository:
        assert await repository.ensure()
        assert (await repository.probe()).reachable


async def test_a_certificate_that_nobody_vouches_for_is_refused_unless_that_is_asked_for(secure: S3Server) -> None:
    storage = s3_storage(secure, secure.make_bucket("unknown"))
    with opened(storage) as repository, pytest.raises(RepositoryError, match=r"certificate is not trusted: .*x509"):
        await repository.connect()
    with opened(replace(storage, verify_tls=False)) as repository:
        assert await repository.ensure()


@pytest.mark.parametrize("trusted", [True, False], ids=["authority", "unchecked"])
async def test_a_secure_buckets_configuration_is_kopias_own(
    secure: S3Server, authority: Authority, *, trusted: bool
) -> None:
    bucket = secure.make_bucket(f"config-{trusted}".lower())
    trust = {"ca_pem": authority.pair.certificate.read_bytes()} if trusted else {"verify_tls": False}
    storage = replace(s3_storage(secure, bucket), **trust)
    with opened(storage) as repository:
        await repository.ensure()
    ours, theirs = await configurations(storage, read_only=True)
    assert ours == theirs
    with opened(storage) as repository:
        assert await repository.open(partial(list_snapshots, repository.kopia), read_only=True) == []


async def test_a_session_token_goes_along_with_the_keys(tmp_path: Path) -> None:
    missing = _Answering("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>")
    async with _serving(missing) as url:
        storage = S3Storage("some-bucket", "p/", url, "us-east-1", AwsKeys("KEY", "SECRET-KEY", "THE-TOKEN"))
        with opened(storage) as repository, pytest.raises(NotInitializedError):
            await repository.connect()
    assert missing.asked
    assert all("THE-TOKEN" in head for head in missing.asked)
    assert not list(tmp_path.glob("datamover-*"))


@pytest.mark.parametrize("token", ["", "token-of-the-pod"], ids=["container", "EKS Pod Identity"])
async def test_without_keys_the_identity_that_an_agent_hands_out_is_taken(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """The repository is then used as with keys."""
    identity = {"AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key, "Expiration": "2099-01-01T00:00:00Z"}
    agent = _Answering("200 OK", json.dumps(identity))
    storage = replace(s3_storage(s3, s3.make_bucket("identity")), keys=None)
    if token:
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    async with _serving(agent) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/identity")
        with opened(storage) as repository:
            assert await repository.ensure()
        with opened(storage) as repository:
            assert await repository.open(partial(list_snapshots, repository.kopia), read_only=True) == []
            assert "accessKeyID" in repository._work_dir.config_file.read_text()
    assert agent.asked
    assert all(head.startswith("GET /identity ") for head in agent.asked)
    assert all((f"Authorization: {token}" in head) is bool(token) for head in agent.asked)
