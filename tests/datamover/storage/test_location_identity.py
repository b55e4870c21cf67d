"""A bucket without configured keys: the pod's service account assumes a role (IRSA), repeatedly."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from tests.datamover.support.identities import RoleOfPod
from tests.datamover.support.internet import Internet, serve_internet
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes

_TOKEN = "token-of-the-service-account"
_REGION = "eu-west-1"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(_TOKEN)
    return file


@pytest.fixture
def role(s3: S3Server) -> RoleOfPod:
    return RoleOfPod(_TOKEN, access_key=s3.access_key, secret_key=s3.secret_key)


@pytest.fixture
async def internet(role: RoleOfPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Internet]:
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.pair.certificate))
    async with serve_internet(authority, monkeypatch) as internet:
        internet.hosts[f"sts.{_REGION}.amazonaws.com"] = role.token_service
        yield internet


@pytest.fixture
def pod(s3: S3Server, tmp_path: Path) -> MoverPod:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_location({"s3Url": s3.url, "region": "us-east-1"}, bucket=s3.make_bucket("identity"))
    pod.put_repository()
    return pod


def _by_the_pods_environment(_: MoverPod, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As EKS configures a service account with a role."""
    for name, value in {
        "AWS_ROLE_ARN": RoleOfPod.arn,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file),
        "AWS_REGION": _REGION,
    }.items():
        monkeypatch.setenv(name, value)


def _by_the_locations_profile(pod: MoverPod, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on OpenShift; the environment has values for others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key-of-another-user")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/other")
    text = f"[default]\nrole_arn = {RoleOfPod.arn}\nweb_identity_token_file = {token_file}\nregion = {_REGION}\n"
    (location,) = pod.kube.objects(BACKUP_STORAGE_LOCATIONS)
    pod.put_location(location["spec"]["config"], bucket="identity", credential={"name": "cloud", "key": "key"})
    pod.put_secret("cloud", "key", text)


@pytest.mark.parametrize("given", [_by_the_pods_environment, _by_the_locations_profile])
async def test_a_role_of_the_service_account_gives_access_to_a_bucket(
    internet: Internet, role: RoleOfPod, pod: MoverPod, token_file: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    given(pod, token_file, monkeypatch)
    assert await pod.init() == 0, pod.message
    assert set(internet.connected) == {f"sts.{_REGION}.amazonaws.com"}
    assert role.granted


@pytest.mark.interop("1.18.2", "ours to ours", "DataUpload, DataDownload", "S3 (versitygw): role of a service account")
@pytest.mark.usefixtures("internet")
async def test_whole_transfers_run_with_a_role(
    pod: MoverPod, tree: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_the_pods_environment(pod, token_file, monkeypatch)
    await pod.create_repository()
    await pod.transfer("DataUpload", tree)
    await pod.transfer("DataDownload", pod.folder / "out", snapshotID=pod.result["snapshotID"])
    assert describe_tree(pod.folder / "out") == describe_tree(tree)


async def test_a_refused_role_is_named(
    internet: Internet, pod: MoverPod, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopia continues without keys, and the storage only denies access."""
    _by_the_pods_environment(pod, token_file, monkeypatch)
    token_file.write_text("an-expired-token")
    assert await pod.init() == 12
    assert "the credentials have no access" in pod.message
    assert f"{RoleOfPod.arn}, if the token in {token_file} is allowed to assume it" in pod.message
    assert "an-expired-token" not in pod.message
    assert internet.connected
