"""The key of a storage account is fetched from Azure's management, by each identity, against services that check it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import RepositoryError
from core.models.storage import BackupStorageLocation
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.azure_keys import AzureContainer, fetch_signature
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import AzureIdentity, CredentialsText
from datamover.storage.token_requests import build_client
from tests.datamover.support.identities import CLIENT, CLIENT_SECRET, TENANT, AzureIdentities
from tests.datamover.support.internet import Answer, Internet, Request, serve_internet, serve_plain
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes  # openssl makes certificates

_ACCOUNT = "moveraccount"
_KEY = "a2V5LW9mLXRoZS1hY2NvdW50"
_TOKEN = "token-of-the-service-account"
_MANAGED = {"storageAccount": _ACCOUNT, "resourceGroup": "group-1", "subscriptionId": "sub-1"}
_IDENTITY = f"AZURE_TENANT_ID={TENANT}\nAZURE_CLIENT_ID={CLIENT}\n"
_SECRET = f"{_IDENTITY}AZURE_CLIENT_SECRET={CLIENT_SECRET}\n"


class _QuickClock(SystemClock):
    """A clock whose pauses take no time, and count as much as they were to take."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return super().monotonic() + sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("azure-keys") / "authority")


@pytest.fixture
def identities() -> AzureIdentities:
    return AzureIdentities(_ACCOUNT, _KEY, federated_token=_TOKEN)


@pytest.fixture
async def internet(
    identities: AzureIdentities, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Internet]:
    async with serve_internet(authority, monkeypatch) as internet:
        internet.hosts["login.microsoftonline.com"] = identities.login
        internet.hosts["management.azure.com"] = identities.management
        yield internet


def _storage(
    internet: Internet, text: str, environment: dict[str, str], config: dict[str, str] | None = None
) -> AzureStorage:
    location = BackupStorageLocation.parse(
        {
            "apiVersion": "velero.io/v1",
            "kind": "BackupStorageLocation",
            "metadata": {"name": "default", "namespace": "velero"},
            "spec": {
                "provider": "velero.io/azure",
                "config": config or _MANAGED,
                "objectStorage": {"bucket": "bkt"},
            },
        }
    )
    secrets = LocationSecrets(CredentialsText(text, "Secret velero/cloud"), internet.ca_pem.encode())
    storage = build_storage(location, "app", secrets=secrets, environment=environment)
    assert isinstance(storage, AzureStorage)
    return storage


async def _fetch(storage: AzureStorage, folder: Path, clock: _QuickClock | None = None) -> dict[str, str]:
    """Return kopia's variables, without the file of the authority."""
    fetched = await storage.with_fetched_credentials(clock or _QuickClock(), Redactor())
    environment = fetched.access(WorkDir(folder, folder / "cache")).environment
    return {name: value for name, value in environment.items() if name != "SSL_CERT_FILE"}


async def test_a_client_secret_fetches_the_key(internet: Internet, identities: AzureIdentities, tmp_path: Path) -> None:
    """kopia gets the key, and not the secret."""
    assert await _fetch(_storage(internet, _SECRET, {}), tmp_path) == {"AZURE_STORAGE_KEY": _KEY}
    assert identities.requests[0] == f"/{TENANT}/oauth2/v2.0/token"
    assert internet.connected == ["login.microsoftonline.com", "management.azure.com"]


async def test_workload_identity_fetches_the_key(internet: Internet, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(_TOKEN)
    environment = {
        "AZURE_TENANT_ID": TENANT,
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_FEDERATED_TOKEN_FILE": str(token_file),
        "AZURE_AUTHORITY_HOST": "https://login.microsoftonline.com/",
    }
    assert await _fetch(_storage(internet, "", environment), tmp_path) == {"AZURE_STORAGE_KEY": _KEY}


@pytest.mark.parametrize("text", ["", f"AZURE_CLIENT_ID={CLIENT}\n"], ids=["of the system", "of a user"])
async def test_a_managed_identity_fetches_the_key(
    internet: Internet, identities: AzureIdentities, tmp_path: Path, text: str
) -> None:
    async with serve_plain(identities.metadata) as url:
        storage = _storage(internet, text, {"AZURE_POD_IDENTITY_AUTHORITY_HOST": url})
        assert await _fetch(storage, tmp_path) == {"AZURE_STORAGE_KEY": _KEY}
    assert internet.connected == ["management.azure.com"]


async def test_group_and_subscription_may_be_in_the_credentials(internet: Internet, tmp_path: Path) -> None:
    """As in the file that Velero's instructions for Azure create."""
    text = f"AZURE_SUBSCRIPTION_ID=sub-1\nAZURE_RESOURCE_GROUP=group-1\n{_SECRET}AZURE_CLOUD_NAME=AzurePublicCloud\n"
    storage = _storage(internet, text, {}, {"storageAccount": _ACCOUNT})
    assert await _fetch(storage, tmp_path) == {"AZURE_STORAGE_KEY": _KEY}


async def test_a_service_that_is_busy_is_asked_again(
    internet: Internet, identities: AzureIdentities, tmp_path: Path
) -> None:
    identities.failures = 3
    clock = _QuickClock()
    async with serve_plain(identities.metadata) as url:
        storage = _storage(internet, "", {"AZURE_POD_IDENTITY_AUTHORITY_HOST": url})
        await _fetch(storage, tmp_path, clock)
    assert len(clock.slept) == 3


async def test_a_service_that_cannot_be_reached_fails_after_five_minutes(internet: Internet, tmp_path: Path) -> None:
    clock = _QuickClock()
    storage = _storage(internet, "", {"AZURE_POD_IDENTITY_AUTHORITY_HOST": "http://127.0.0.1:9"})
    with pytest.raises(
        RepositoryError, match=r"the managed identity of this pod or its node: 127\.0\.0\.1:9 cannot be"
    ):
        await _fetch(storage, tmp_path, clock)
    assert sum(clock.slept) == pytest.approx(300, abs=16)


async def test_a_refusal_is_reported_at_once_with_its_reason(
    internet: Internet, identities: AzureIdentities, tmp_path: Path
) -> None:
    wrong = _SECRET.replace(CLIENT_SECRET, "topsecret")
    with pytest.raises(RepositoryError, match=f"sign in to Azure as client {CLIENT}: .*: 401 AADSTS7000215") as caught:
        await _fetch(_storage(internet, wrong, {}), tmp_path)
    assert "topsecret" not in str(caught.value)
    identities.denies_keys = True
    denied = "cannot fetch the key of storage account moveraccount .*: 403 no permission for listKeys"
    with pytest.raises(RepositoryError, match=denied):
        await _fetch(_storage(internet, _SECRET, {}), tmp_path)


async def test_a_redirection_takes_no_secret_to_another_host(internet: Internet, tmp_path: Path) -> None:
    def elsewhere(request: Request) -> Answer:
        return Answer("", 302, {"Location": "https://elsewhere.example.com/token"})

    internet.hosts["login.microsoftonline.com"] = elsewhere
    with pytest.raises(RepositoryError, match=r"login\.microsoftonline\.com: 302"):
        await _fetch(_storage(internet, _SECRET, {}), tmp_path)


async def test_an_authority_without_tls_gets_no_secret(internet: Internet, tmp_path: Path) -> None:
    config = {**_MANAGED, "activeDirectoryAuthorityURI": "http://login.microsoftonline.com/"}
    with pytest.raises(RepositoryError, match="the authority of Azure identities must be https"):
        await _fetch(_storage(internet, _SECRET, {}, config), tmp_path)


async def test_a_server_with_another_authority_gets_no_secret(
    internet: Internet, identities: AzureIdentities, tmp_path: Path
) -> None:
    other = Internet(Authority(tmp_path / "other"))
    with pytest.raises(RepositoryError, match="its certificate is not trusted"):
        await _fetch(_storage(other, _SECRET, {}), tmp_path)
    assert identities.requests == []


async def test_secrets_on_the_way_are_redacted(internet: Internet) -> None:
    redactor = Redactor()
    await _storage(internet, _SECRET, {}).with_fetched_credentials(_QuickClock(), redactor)
    assert redactor.redact(f"{CLIENT_SECRET} {_KEY}") == "*** ***"


async def test_other_clouds_have_their_own_management(
    internet: Internet, identities: AzureIdentities, tmp_path: Path
) -> None:
    """The services of the public cloud are not asked."""
    storage = _storage(internet, f"{_SECRET}AZURE_CLOUD_NAME=AzureChinaCloud\n", {})
    assert storage.account_key is not None
    assert storage.account_key.management == "https://management.chinacloudapi.cn"
    assert storage.account_key.audience == "https://management.core.chinacloudapi.cn/"
    assert storage.account_key.identity.authority == "https://login.chinacloudapi.cn/"


@pytest.mark.parametrize(
    ("host", "answer", "reason"),
    [
        (
            "login.microsoftonline.com",
            '{"token_type": "Bearer"}',
            f"as client {CLIENT}: the answer has no access_token",
        ),
        (
            "management.azure.com",
            '{"keys": [{"permissions": "Read", "value": "a"}]}',
            "it has no key with full permissions",
        ),
    ],
    ids=["no token", "no full key"],
)
async def test_an_answer_without_what_was_asked_for_is_reported(
    internet: Internet, tmp_path: Path, host: str, answer: str, reason: str
) -> None:
    internet.hosts[host] = lambda _: Answer(answer)
    with pytest.raises(RepositoryError, match=reason):
        await _fetch(_storage(internet, _SECRET, {}), tmp_path)


async def test_what_the_pod_gives_is_reported_if_it_cannot_be_used(internet: Internet, tmp_path: Path) -> None:
    environment = {"AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": CLIENT, "AZURE_FEDERATED_TOKEN_FILE": "/no/such/file"}
    with pytest.raises(RepositoryError, match="AZURE_FEDERATED_TOKEN_FILE: cannot read /no/such/file"):
        await _fetch(_storage(internet, "", environment), tmp_path)
    with pytest.raises(RepositoryError, match="caCert: not a certificate authority in PEM"):
        build_client(b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("<Error><Message>not on this account</Message></Error>", 403), "windows.net: 403 not on this account"),
        (Answer("<UserDelegationKey><Value>dmFsdWU=</Value></UserDelegationKey>"), "the answer has no key"),
    ],
    ids=["denied", "incomplete"],
)
async def test_a_signature_that_is_not_granted_is_reported_with_what_it_needs(
    internet: Internet, tmp_path: Path, answer: Answer, reason: str
) -> None:
    internet.hosts[f"{_ACCOUNT}.blob.core.windows.net"] = lambda _: answer
    file = tmp_path / "token"
    file.write_text(_TOKEN)
    identity = AzureIdentity("https://login.microsoftonline.com/", TENANT, CLIENT, token_file=str(file))
    container = AzureContainer(_ACCOUNT, "blob.core.windows.net", "backups", identity)
    needed = f"which needs the action generateUserDelegationKey on the account: .*{reason}"
    with pytest.raises(RepositoryError, match=needed):
        await fetch_signature(container, internet.ca_pem.encode(), _QuickClock(), Redactor())
