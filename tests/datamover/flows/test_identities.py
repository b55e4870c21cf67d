"""Pod volumes with the identities of managed clusters, in transfers that outlast what these are exchanged for."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from datamover.bandwidth.dialing import RequestHead
from datamover.storage import token_files
from tests.datamover.support.emulators import run_azurite, run_fake_gcs
from tests.datamover.support.identities import CLIENT, TENANT, AzureIdentities, GoogleFederation, RoleOfPod
from tests.datamover.support.internet import Internet, serve_internet, serve_plain
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy, run_s3_proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube
from tests.testbed.pki import Authority

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

_TOKEN = "token-of-the-service-account"
_REGION = "eu-west-1"
_ACCOUNT = "moveraccount"
_LIFETIME = timedelta(seconds=1)
"""How long what is granted is said to be valid; the storage refuses it after twice that time."""


@dataclass
class _Bed:
    """A pod with a token file, and a storage that becomes slow once kopia has asked the mover.

    `runs` is how often it asked in each transfer.
    """

    pod: MoverPod
    internet: Internet
    token_file: Path
    proxy: S3Proxy
    asked: int = 0
    latency_seconds: float = 0.0
    runs: list[int] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        knows = token_files._knows

        def notice(head: RequestHead, header: str, secret: str) -> bool:
            self.asked += 1
            self.proxy.latency_seconds = self.latency_seconds
            return knows(head, header, secret)

        monkeypatch.setattr(token_files, "_knows", notice)

    async def transfer(self, tree: Path) -> None:
        """Check that each transfer outlasts what it was granted first."""
        pod = self.pod
        await pod.create_repository()
        # A backup makes more than ten requests, one after the other, and a restore three.
        pod.put_transfer("PodVolumeBackup")
        await self._run("pod-volume-backup", tree, 0.25)
        pod.put_transfer("PodVolumeRestore", snapshotID=pod.result["snapshotID"])
        target = pod.folder / "target"
        await self._run("pod-volume-restore", target, 0.8)
        restored = {name: found for name, found in describe_tree(target).items() if not name.startswith(".velero")}
        assert restored == describe_tree(tree)

    async def _run(self, flag: str, volume: Path, latency_seconds: float) -> None:
        self.asked, self.latency_seconds = 0, latency_seconds
        self.proxy.latency_seconds = latency_seconds if self.proxy.slow else 0.0
        assert await self.pod.run(flag, volume) == 0, self.pod.message
        self.runs.append(self.asked)


@pytest.fixture
async def bed(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Bed]:
    file = tmp_path / "identity" / "token"
    file.parent.mkdir()
    file.write_text(_TOKEN)
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.pair.certificate))
    with run_s3_proxy(s3) as proxy:
        async with serve_internet(authority, monkeypatch) as internet:
            bed = _Bed(MoverPod(FakeKube(), tmp_path), internet, file, proxy)
            bed.watch(monkeypatch)
            yield bed


@pytest.fixture
async def role(request: pytest.FixtureRequest, bed: _Bed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoleOfPod]:
    """The role of a service account, as the webhooks of EKS configure it."""
    server = bed.proxy.server
    role = RoleOfPod(_TOKEN, access_key=server.access_key, secret_key=server.secret_key)
    bed.proxy.check = role.check
    config = {"s3Url": bed.proxy.url, "region": "us-east-1"}
    bed.pod.put_location(config, bucket=server.make_bucket(f"by-{request.param.replace(' ', '-')}"))
    if request.param == "irsa":
        bed.internet.hosts[f"sts.{_REGION}.amazonaws.com"] = role.token_service
        monkeypatch.setenv("AWS_ROLE_ARN", role.arn)
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(bed.token_file))
        monkeypatch.setenv("AWS_REGION", _REGION)
        yield role
        return
    async with serve_plain(role.agent) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/v1/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(bed.token_file))
        yield role


@pytest.mark.interop(
    "1.18.2", "ours to ours", "PodVolumeBackup, PodVolumeRestore", "S3 (versitygw): IRSA; EKS Pod Identity"
)
@pytest.mark.sample("IRSA")
@pytest.mark.parametrize("role", ["irsa", "pod identity"], ids=["IRSA", "EKS Pod Identity"], indirect=True)
async def test_transfers_of_pod_volumes_outlast_the_keys_of_a_role(bed: _Bed, tree: Path, role: RoleOfPod) -> None:
    role.lifetime = _LIFETIME
    await bed.transfer(tree)
    assert min(bed.runs) > 1


@pytest.fixture
def federation(bed: _Bed, tmp_path: Path) -> Iterator[GoogleFederation]:
    """A credentials file that names a token file, and Google Cloud Storage."""
    federation, folder = GoogleFederation(_TOKEN), tmp_path / "gcs"
    folder.mkdir()
    with run_fake_gcs(folder, bed.internet.certificate("storage.googleapis.com")) as server:
        server.make_bucket("identity")
        with run_s3_proxy(S3Server(f"https://127.0.0.1:{server.port}", folder)) as proxy:
            bed.proxy, proxy.check = proxy, federation.check
            bed.internet.hosts["storage.googleapis.com"] = proxy.url
            bed.internet.hosts["sts.googleapis.com"] = federation.token_service
            bed.pod.put_secret("cloud", "key", federation.credentials_file(bed.token_file))
            cloud = {"name": "cloud", "key": "key"}
            bed.pod.put_location({}, provider="velero.io/gcp", bucket="identity", credential=cloud)
            yield federation


@pytest.mark.thorough
@pytest.mark.interop(
    "1.18.2",
    "ours to ours",
    "PodVolumeBackup, PodVolumeRestore",
    "Google Cloud Storage (fake-gcs-server): workload identity federation",
)
async def test_transfers_of_pod_volumes_outlast_a_federated_token_of_google(
    bed: _Bed, tree: Path, federation: GoogleFederation
) -> None:
    federation.lifetime = _LIFETIME
    await bed.transfer(tree)
    assert min(bed.runs) > 1


@pytest.fixture
def azure(bed: _Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureIdentities]:
    """Workload identity as Azure's webhook configures it, and a storage that is slow for requests with a signature."""
    identities, folder = AzureIdentities(federated_token=_TOKEN), tmp_path / "azurite"
    folder.mkdir()
    host = f"{_ACCOUNT}.blob.core.windows.net"
    with run_azurite(folder, _ACCOUNT, bed.internet.certificate(host)) as server:
        server.make_container("identity")
        with run_s3_proxy(S3Server(f"https://127.0.0.1:{server.port}", folder)) as proxy:
            bed.proxy, proxy.check, proxy.slow = proxy, identities.check, "sig="
            bed.internet.hosts[host] = proxy.url
            bed.internet.hosts["login.microsoftonline.com"] = identities.login
            monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
            monkeypatch.setenv("AZURE_CLIENT_ID", CLIENT)
            monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(bed.token_file))
            config = {"storageAccount": _ACCOUNT, "useAAD": "true"}
            bed.pod.put_location(config, provider="velero.io/azure", bucket="identity")
            yield identities


@pytest.mark.thorough
@pytest.mark.interop(
    "1.18.2", "ours to ours", "PodVolumeBackup, PodVolumeRestore", "Azure (Azurite): workload identity"
)
async def test_transfers_of_pod_volumes_outlast_a_token_of_azure(bed: _Bed, tree: Path, azure: AzureIdentities) -> None:
    azure.lifetime = _LIFETIME
    await bed.transfer(tree)
    assert any("sig=" in request for request in bed.proxy.requests)
