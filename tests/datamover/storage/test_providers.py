"""Access to S3 and Google beyond keys: a private authority, session tokens, an instance's identity, token files."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from core.errors import RepositoryError
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaFiles, Listener
from datamover.kopia.repository import NotInitializedError
from datamover.kopia.snapshots import list_snapshots
from datamover.runtime.work_dir import WorkDir
from datamover.storage.providers import GcsStorage
from datamover.storage.s3 import AwsAssumedRole, AwsKeys, S3Storage
from tests.datamover.support.confining import MEANS, use_means
from tests.datamover.support.internet import Answer, Request, serve_plain
from tests.datamover.support.repositories import configurations, opened, s3_storage
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes


class _Answering:
    """A service that answers every request alike, and records the requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.received: list[Request] = []
        self.posted = asyncio.Event()

    def __call__(self, request: Request) -> Answer:
        self.received.append(request)
        if request.method == "POST":
            self.posted.set()
        return self._answer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "authority")


@pytest.fixture(scope="module")
def tls_server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with TLS only, and a certificate of an unknown authority."""
    pair = authority.issue("s3", user="s3", addresses=("IP:127.0.0.1",))
    with run_s3_server(tmp_path_factory.mktemp("secure"), pair) as server:
        yield server


@pytest.mark.parametrize("trusted", [True, False], ids=["authority", "unchecked"])
async def test_the_configuration_with_tls_is_kopias(
    tls_server: S3Server, authority: Authority, *, trusted: bool
) -> None:
    untrusting = s3_storage(tls_server, tls_server.make_bucket(f"config-{trusted}".lower()))
    trust = {"ca_pem": authority.pair.certificate.read_bytes()} if trusted else {"verify_tls": False}
    storage = replace(untrusting, **trust)
    with opened(storage) as repository:
        assert await repository.ensure()
        assert (await repository.probe()).reachable
    ours, theirs = await configurations(storage, read_only=True)
    assert ours == theirs
    with opened(storage) as repository:
        assert await repository.open(partial(list_snapshots, repository.kopia), read_only=True) == []
    with opened(untrusting) as repository, pytest.raises(RepositoryError, match=r"certificate is not trusted: .*x509"):
        await repository.open(partial(list_snapshots, repository.kopia), read_only=True)


async def test_a_session_token_is_sent_with_the_keys(tmp_path: Path) -> None:
    missing = _Answering(Answer("<Error><Code>NoSuchKey</Code></Error>", 404))
    async with serve_plain(missing) as url:
        storage = S3Storage("some-bucket", "p/", url, "us-east-1", AwsKeys("KEY", "SECRET-KEY", "THE-TOKEN"))
        with opened(storage) as repository, pytest.raises(NotInitializedError):
            await repository.connect()
    assert {one.headers["x-amz-security-token"] for one in missing.received} == {"THE-TOKEN"}
    assert not list(tmp_path.glob("datamover-*"))


def test_a_role_and_its_keys_are_passed_in_private_files(tmp_path: Path) -> None:
    role = AwsAssumedRole("arn", AwsKeys("KEY", "SECRET-KEY", "THE-TOKEN"), "user")
    storage, work_dir = S3Storage("b", "p/", "https://h:1", "r", role, ca_pem=b"pem"), WorkDir(tmp_path, tmp_path)
    accesses = [each.access(work_dir) for each in (storage, storage.for_probe(), storage.for_bucket_check())]
    assert len({tuple(access.arguments) for access in accesses}) == 3
    for access in accesses:
        assert access.environment["SSL_CERT_FILE"] == str(tmp_path / "ca.pem")
        assert access.secrets({}) == ["SECRET-KEY", "THE-TOKEN"]
        assert "SECRET-KEY" not in f"{access} {access.arguments} {access.environment}"
    assert len(files := list(tmp_path.glob("s3-*.token"))) == 3
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.parametrize("token", ["", "token-of-the-pod"], ids=["container", "EKS Pod Identity"])
async def test_an_agents_identity_is_used(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """The repository can then be used as with keys."""
    identity = {"AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key, "Expiration": "2099-01-01T00:00:00Z"}
    agent = _Answering(Answer(identity))
    storage = replace(s3_storage(s3, s3.make_bucket("identity")), keys=None)
    if token:
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    async with serve_plain(agent) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/identity")
        with opened(storage) as repository:
            assert await repository.ensure()
        with opened(storage) as repository:
            assert await repository.open(partial(list_snapshots, repository.kopia), read_only=True) == []
            assert "accessKeyID" in repository.work_dir.config_file.read_text()
    asked = {(one.method, one.target, one.headers.get("authorization", "")) for one in agent.received}
    assert asked == {("GET", "/identity", token)}


@pytest.mark.parametrize("means", MEANS)
async def test_a_confined_kopia_exchanges_the_token_that_a_google_file_names(
    means: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads both files again for each token."""
    use_means(means, monkeypatch)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "token").write_text("token-of-the-service-account")
    granted = {"access_token": "a", "token_type": "Bearer", "expires_in": 3600, "issued_token_type": "t"}
    exchange = _Answering(Answer(granted))
    async with serve_plain(exchange) as url:
        # Nothing behind it is Google's storage.
        monkeypatch.setenv("HTTPS_PROXY", url)
        credentials = {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/p",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{url}/token",
            "credential_source": {"file": str(tmp_path / "tokens" / "token")},
        }
        with opened(GcsStorage("bucket", "p/", json.dumps(credentials))) as repository:
            storage = {"type": "gcs", "config": {"bucket": "bucket", "prefix": "p/"}}
            config = {"storage": storage, "caching": {"cacheDirectory": "kopia-cache"}}
            repository.work_dir.config_file.write_text(json.dumps(config))
            files = KopiaFiles(volume=VolumeAccess(tree))
            moving = asyncio.create_task(
                repository.kopia.move_data("back up", "snapshot", "create", str(tree), files=files, listener=Listener())
            )
            posting = asyncio.create_task(exchange.posted.wait())
            await asyncio.wait({moving, posting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            for task in (moving, posting):
                task.cancel()
            answers = await asyncio.gather(moving, posting, return_exceptions=True)
    assert exchange.posted.is_set(), answers
