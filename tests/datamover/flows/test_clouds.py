"""Transfers to Azure, Google Cloud Storage and AWS under the clouds' own names, with each kind of credential.

The storages are emulators; services that grant access are fakes that check what they are asked.
"""

import base64
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.contract import parse_result
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, POD_VOLUME_RESTORES
from core.snapshot_contract import SnapshotReport
from datamover.storage.s3 import AwsAssumedRole, AwsKeys, S3Storage
from tests.datamover.support.backupfiles import put_backup
from tests.datamover.support.emulators import Azurite, FakeGcs, run_azurite, run_fake_gcs
from tests.datamover.support.identities import (
    CLIENT,
    CLIENT_SECRET,
    TENANT,
    AwsIdentities,
    AzureIdentities,
    GoogleIdentities,
)
from tests.datamover.support.internet import Answer, Internet, Request, serve_internet
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.repositories import configurations, opened
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.datamover.support.trees import describe_tree, make_tree
from tests.support.fakekube import FakeKube
from tests.testbed.pki import Authority

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

_ACCOUNT = "moveraccount"
_REGION = "eu-central-1"
_LOGIN = "login.microsoftonline.com"
_IDENTITY = f"AZURE_TENANT_ID={TENANT}\nAZURE_CLIENT_ID={CLIENT}\n"
_RESTORES = {"DataUpload": "DataDownload", "PodVolumeBackup": "PodVolumeRestore"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("clouds") / "authority")


@pytest.fixture(scope="module")
def azurite(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    host = f"{_ACCOUNT}.blob.core.windows.net"
    tls = authority.issue("azurite", user="azurite", addresses=(f"DNS:{host}",))
    with run_azurite(tmp_path_factory.mktemp("azurite"), _ACCOUNT, tls) as server:
        yield server


@pytest.fixture(scope="module")
def gcs(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    tls = authority.issue("gcs", user="gcs", addresses=("DNS:storage.googleapis.com",))
    with run_fake_gcs(tmp_path_factory.mktemp("gcs"), tls) as server:
        yield server


@pytest.fixture
async def internet(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Internet]:
    async with serve_internet(authority, monkeypatch) as internet:
        yield internet


@pytest.fixture
def pod(tmp_path: Path) -> MoverPod:
    return MoverPod(FakeKube(), tmp_path)


def _locate(pod: MoverPod, internet: Internet, bucket: str, credential: str, **config: str) -> None:
    """Configure the location as a user does: provider:bucket, Secret, and the authority to trust."""
    provider, _, name = bucket.partition(":")
    named = {}
    if credential:
        pod.put_secret("cloud", "key", credential)
        named = {"credential": {"name": "cloud", "key": "key"}}
    authority = base64.b64encode(internet.ca_pem.encode()).decode()
    storage = {"bucket": name, "prefix": "velero", "caCert": authority}
    pod.put_location(config, provider=f"velero.io/{provider}", objectStorage=storage, **named)
    pod.put_repository()


async def _transfer(pod: MoverPod, tree: Path, kinds: Sequence[str] = tuple(_RESTORES)) -> None:
    await pod.create_repository()
    for backup in kinds:
        restore, target = _RESTORES[backup], pod.folder / _RESTORES[backup]
        await pod.transfer(restore, target, snapshotID=(await pod.transfer(backup, tree))["snapshotID"])
        shutil.rmtree(target / ".velero", ignore_errors=True)
        assert describe_tree(target) == describe_tree(tree), restore


async def _check_report(pod: MoverPod, put: Callable[[str, bytes], None], kinds: Sequence[str]) -> None:
    """Check that the snapshot report finds and reads the files of backups, which `put` writes."""
    (stored,) = pod.stored(POD_VOLUME_RESTORES)
    for backup in kinds:
        pod.put_transfer(_RESTORES[backup], "Completed")
    assert await pod.report() == 0, pod.message
    assert "the location has no backups" in (parse_result(SnapshotReport, pod.message).unread or "")
    for file in put_backup(pod.folder, "nightly", "uid", volumes=(stored["spec"]["snapshotID"],)).iterdir():
        put(f"velero/backups/nightly/{file.name}", file.read_bytes())
    assert await pod.report() == 0, pod.message
    report = parse_result(SnapshotReport, pod.message)
    assert (report.referenced.count, report.unknown.count) == (1, len(kinds) - 1)
    assert (report.bucket_read, report.unread) == (True, None)


_KINDS = pytest.mark.parametrize("kinds", [("PodVolumeBackup",), tuple(_RESTORES)], ids=["of pod volumes", "all kinds"])
_OF_POD_VOLUMES = pytest.mark.sample("of pod volumes")


@_OF_POD_VOLUMES
@_KINDS
@pytest.mark.interop("1.18.2", "ours to ours", "all four", "Azure (Azurite): account key")
async def test_an_account_key_serves_all_kinds(
    pod: MoverPod, tree: Path, internet: Internet, azurite: Azurite, kinds: Sequence[str]
) -> None:
    internet.hosts[azurite.host] = azurite.port
    container = azurite.make_container(f"by-key-{len(kinds)}")
    named = {"storageAccount": _ACCOUNT, "storageAccountKeyEnvVar": "MY_KEY"}
    _locate(pod, internet, f"azure:{container}", f"MY_KEY={azurite.key}\n", **named)
    await _transfer(pod, tree, kinds)
    await _check_report(pod, partial(azurite.put, container), kinds)
    assert set(internet.connected) == {azurite.host}


@pytest.mark.thorough
@pytest.mark.interop("1.18.2", "ours to ours", "all four", "Azure (Azurite): client secret")
async def test_a_client_secret_serves_all_kinds(
    pod: MoverPod, tree: Path, internet: Internet, azurite: Azurite
) -> None:
    identities = AzureIdentities()
    internet.hosts |= {azurite.host: azurite.port, _LOGIN: identities.login}
    azurite.make_container("by-secret")
    secret = f"{_IDENTITY}AZURE_CLIENT_SECRET={CLIENT_SECRET}\n"
    _locate(pod, internet, "azure:by-secret", secret, storageAccount=_ACCOUNT, useAAD="true")
    await _transfer(pod, tree)
    assert f"/{TENANT}/oauth2/v2.0/token" in identities.requests


@pytest.mark.thorough
@pytest.mark.interop("1.18.2", "ours to ours", "DataUpload, DataDownload", "Azure (Azurite): workload identity")
async def test_workload_identity_serves_volumes_that_no_pod_uses(
    pod: MoverPod, tree: Path, internet: Internet, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopia reads the token file itself, again and again; `test_identities` has volumes that a pod uses."""
    identities = AzureIdentities(federated_token="token-of-the-service-account")
    internet.hosts |= {azurite.host: azurite.port, _LOGIN: identities.login}
    azurite.make_container("by-workload-identity")
    _set_workload_identity(pod, monkeypatch)
    _locate(pod, internet, "azure:by-workload-identity", "", storageAccount=_ACCOUNT, useAAD="true")
    await _transfer(pod, tree, ["DataUpload"])


def _set_workload_identity(pod: MoverPod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure the environment as Azure's webhook does."""
    token_file = pod.folder / "identity" / "token"
    token_file.parent.mkdir()
    token_file.write_text("token-of-the-service-account")
    monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
    monkeypatch.setenv("AZURE_CLIENT_ID", CLIENT)
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(token_file))
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"https://{_LOGIN}/")


@pytest.mark.interop(
    "1.18.2",
    "ours to ours",
    "PodVolumeBackup, PodVolumeRestore",
    "Azure (Azurite): account key from Azure's management",
)
async def test_an_account_key_that_the_mover_fetches_serves_pod_volumes(
    pod: MoverPod, tree: Path, internet: Internet, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopia has the key only, so that the token file of the identity that fetched it is no obstacle."""
    identities = AzureIdentities(_ACCOUNT, azurite.key, federated_token="token-of-the-service-account")
    internet.hosts |= {azurite.host: azurite.port, _LOGIN: identities.login}
    internet.hosts["management.azure.com"] = identities.management
    azurite.make_container("by-management")
    _set_workload_identity(pod, monkeypatch)
    group = {"resourceGroup": "group-1", "subscriptionId": "sub-1"}
    _locate(pod, internet, "azure:by-management", "", storageAccount=_ACCOUNT, **group)
    await _transfer(pod, tree, ["PodVolumeBackup"])


@pytest.mark.interop(
    "1.18.2", "ours to ours", "all four", "Google Cloud Storage (fake-gcs-server): key of a service account"
)
async def test_a_service_accounts_key_serves_all_kinds(
    pod: MoverPod, tree: Path, tmp_path: Path, internet: Internet, gcs: FakeGcs
) -> None:
    identities = GoogleIdentities(tmp_path / "google")
    internet.hosts |= {"storage.googleapis.com": gcs.port, "oauth2.googleapis.com": identities.token}
    gcs.make_bucket("by-key")
    _locate(pod, internet, "gcp:by-key", identities.credentials_file)
    await _transfer(pod, tree)
    await _check_report(pod, partial(gcs.put, "by-key"), tuple(_RESTORES))
    assert identities.granted


@pytest.mark.interop(
    "1.18.2", "ours to ours", "DataUpload, DataDownload", "S3 (versitygw): keys of a user, region discovered"
)
async def test_the_region_of_a_bucket_is_discovered(
    pod: MoverPod, tree: Path, tmp_path: Path, internet: Internet
) -> None:
    """Without `region`, the global endpoint is asked for it, and the endpoint of the region is used from then on."""
    regional = f"s3.dualstack.{_REGION}.amazonaws.com"
    host = f"by-region.{regional}"
    tls = internet.certificate(host)
    asked: list[Request] = []

    def locate(request: Request) -> Answer:
        asked.append(request)
        return Answer(f"<LocationConstraint>{_REGION}</LocationConstraint>")

    (tmp_path / "s3").mkdir()
    with run_s3_server(tmp_path / "s3", tls, flags=[f"--region={_REGION}", f"--virtual-domain={regional}"]) as server:
        server.make_bucket("by-region")
        internet.hosts[host] = int(server.url.rpartition(":")[2])
        internet.hosts["s3.amazonaws.com"] = internet.hosts["by-region.s3.amazonaws.com"] = locate
        _locate(pod, internet, "aws:by-region", server.credentials_file)
        await _transfer(pod, tree, ["DataUpload"])
    assert {(one.method, one.host, one.target) for one in asked} == {
        ("GET", "by-region.s3.amazonaws.com", "/?location=")
    }
    assert all("/us-east-1/s3/aws4_request" in one.headers["authorization"] for one in asked)


def _assume_role(pod: MoverPod, internet: Internet, s3: S3Server, bucket: str) -> AwsIdentities:
    """Configure a location whose profile is a role that the keys of another profile may assume."""
    identities = AwsIdentities(s3.access_key, s3.secret_key)
    internet.hosts[f"sts.{_REGION}.amazonaws.com"] = identities.token
    access, secret = identities.user
    profiles = (
        f"[default]\nrole_arn = {identities.role}\nsource_profile = user\nregion = {_REGION}\n"
        f"[user]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n"
    )
    s3.make_bucket(bucket)
    _locate(pod, internet, f"aws:{bucket}", profiles, s3Url=s3.url, region="us-east-1")
    return identities


@_OF_POD_VOLUMES
@_KINDS
@pytest.mark.interop("1.18.2", "ours to ours", "all four", "S3 (versitygw): role assumed with the keys of a user")
async def test_a_role_of_a_source_profile_serves_all_kinds(
    pod: MoverPod, internet: Internet, s3: S3Server, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str]
) -> None:
    """kopia has the keys in its configuration, so that no file is an obstacle for pod volumes."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key-of-another-user")
    identities = _assume_role(pod, internet, s3, "by-role")
    await _transfer(pod, make_tree(pod.folder / "tree"), kinds)
    await _check_report(pod, partial(s3.put, "by-role"), kinds)
    assert set(identities.granted) == {"node-agent"}
    assert set(internet.connected) == {f"sts.{_REGION}.amazonaws.com"}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"denies": True}, "the credentials have no access (keys of role arn:aws:iam::210987654321:role/backups, if"),
        ({"user": (AwsIdentities.user[0], "secret-key-of-today")}, "the secret access key is not accepted"),
    ],
    ids=["not allowed", "another secret key"],
)
async def test_a_role_of_a_source_profile_that_cannot_be_assumed_is_reported(
    pod: MoverPod, internet: Internet, s3: S3Server, change: dict[str, Any], cause: str
) -> None:
    identities = _assume_role(pod, internet, s3, "by-denied-role")
    vars(identities).update(change)
    assert await pod.init() == 12
    assert cause in pod.message
    assert "key-of-the-user" not in pod.message
    assert identities.granted == []


async def test_the_configuration_of_a_role_equals_kopias(internet: Internet, s3: S3Server) -> None:
    identities = AwsIdentities(s3.access_key, s3.secret_key)
    internet.hosts["sts.amazonaws.com"] = identities.token
    role = AwsAssumedRole(identities.role, AwsKeys(*identities.user), "user")
    bucket = s3.make_bucket("role-config")
    storage = S3Storage(bucket, "p/", s3.url, "us-east-1", role, ca_pem=internet.ca_pem.encode())
    with opened(storage) as repository:
        await repository.ensure()
    ours, theirs = await configurations(storage, read_only=True)
    assert ours == theirs


async def test_a_role_is_not_assumed_without_a_check_of_certificates(
    pod: MoverPod, internet: Internet, s3: S3Server
) -> None:
    identities = _assume_role(pod, internet, s3, "by-unchecked-role")
    (location,) = pod.kube.objects(BACKUP_STORAGE_LOCATIONS)
    location["spec"]["config"]["insecureSkipTLSVerify"] = "true"
    pod.kube.put(location)
    assert await pod.init() == 12
    assert "BackupStorageLocation default: source_profile: not supported without a check of cert" in pod.message
    assert internet.connected == identities.granted == []
