"""The key of a storage account is fetched from Azure's management, by each identity, against services that check it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import RepositoryError
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.azure_keys import AzureContainer, fetch_signature
from datamover.storage.providers import AzureIdentity
from datamover.storage.token_requests import build_client
from tests.datamover.support.identities import CLIENT, CLIENT_SECRET, TENANT, AzureIdentities
from tests.datamover.support.internet import Answer, Internet, serve_internet, serve_plain
from tests.datamover.support.locations import QuickClock, location_storage
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes  # openssl makes certificates

_LOGIN, _MANAGEMENT = "login.microsoftonline.com", "management.azure.com"
_ACCOUNT = "moveraccount"
_KEY = "a2V5LW9mLXRoZS1hY2NvdW50"
_GRANTED = {"AZURE_STORAGE_KEY": _KEY, "AZURE_STORAGE_SAS_TOKEN": ""}
_TOKEN = "token-of-the-service-account"
_MANAGED = {"storageAccount": _ACCOUNT, "resourceGroup": "group-1", "subscriptionId": "sub-1"}
_SECRET = f"AZURE_TENANT_ID={TENANT}\nAZURE_CLIENT_ID={CLIENT}\nAZURE_CLIENT_SECRET={CLIENT_SECRET}\n"
_WORKLOAD = {
    "AZURE_TENANT_ID": TENANT,
    "AZURE_CLIENT_ID": CLIENT,
    "AZURE_FEDERATED_TOKEN_FILE": "{token}",
    "AZURE_AUTHORITY_HOST": f"https://{_LOGIN}/",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("azure-keys") / "authority")


@pytest.fixture
async def internet(
    identities: AzureIdentities, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Internet]:
    async with serve_internet(authority, monkeypatch) as internet:
        internet.hosts |= {_LOGIN: identities.login, _MANAGEMENT: identities.management}
        yield internet


@pytest.fixture
def identities() -> AzureIdentities:
    return AzureIdentities(_ACCOUNT, _KEY, federated_token=_TOKEN)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(_TOKEN)
    return tmp_path / "token"


def _storage(
    internet: Internet, text: str, environment: dict[str, str] | None = None, config: dict[str, str] | None = None
) -> AzureStorage:
    ca_pem = internet.ca_pem.encode()
    storage = location_storage("azure", config or _MANAGED, text, environment=environment, ca_pem=ca_pem)
    assert isinstance(storage, AzureStorage)
    return storage


async def _fetch(storage: AzureStorage, folder: Path, clock: QuickClock | None = None) -> dict[str, str]:
    """Return kopia's variables, without the file of the authority; secrets on the way are redacted."""
    redactor = Redactor()
    fetched = await storage.with_fetched_credentials(clock or QuickClock(), redactor)
    assert storage.account_key
    shown = redactor.redact(f"{storage.account_key.identity.secret} {_KEY}")
    assert not {_KEY, CLIENT_SECRET} & set(shown.split())
    environment = fetched.access(WorkDir(folder, folder / "cache")).environment
    return {name: value for name, value in environment.items() if name != "SSL_CERT_FILE"}


@pytest.mark.parametrize(
    ("text", "environment", "config"),
    [
        (_SECRET, {}, _MANAGED),
        ("", _WORKLOAD, _MANAGED),
        # As in the file that Velero's instructions for Azure create.
        (f"AZURE_SUBSCRIPTION_ID=sub-1\nAZURE_RESOURCE_GROUP=group-1\n{_SECRET}", {}, {"storageAccount": _ACCOUNT}),
    ],
    ids=["client secret", "workload identity", "group and subscription in the credentials"],
)
async def test_an_identity_fetches_the_key(
    internet: Internet, identities: AzureIdentities, token_file: Path, text: str, environment: Any, config: Any
) -> None:
    """kopia gets the key, and not the secret."""
    given = {name: value.format(token=token_file) for name, value in environment.items()}
    found = await _fetch(_storage(internet, text, given, config), token_file.parent)
    assert found == _GRANTED
    assert identities.requests[0] == f"/{TENANT}/oauth2/v2.0/token"
    assert internet.connected == [_LOGIN, _MANAGEMENT]


@pytest.mark.parametrize(("text", "failures"), [("", 0), (f"AZURE_CLIENT_ID={CLIENT}\n", 3)])
async def test_a_managed_identity_fetches_the_key_also_from_a_service_that_is_busy(
    internet: Internet, identities: AzureIdentities, tmp_path: Path, text: str, failures: int
) -> None:
    identities.failures, clock = failures, QuickClock()
    async with serve_plain(identities.metadata) as url:
        storage = _storage(internet, text, {"AZURE_POD_IDENTITY_AUTHORITY_HOST": url})
        assert await _fetch(storage, tmp_path, clock) == _GRANTED
    assert internet.connected == [_MANAGEMENT]
    assert len(clock.slept) == failures


async def test_a_service_that_cannot_be_reached_fails_after_five_minutes(internet: Internet, tmp_path: Path) -> None:
    clock = QuickClock()
    storage = _storage(internet, "", {"AZURE_POD_IDENTITY_AUTHORITY_HOST": "http://127.0.0.1:9"})
    error = r"the managed identity of this pod or its node: 127\.0\.0\.1:9 cannot be"
    with pytest.raises(RepositoryError, match=error):
        await _fetch(storage, tmp_path, clock)
    assert sum(clock.slept) == pytest.approx(300, abs=16)


@pytest.mark.parametrize(
    ("host", "answer", "reason"),
    [
        (_LOGIN, Answer('{"token_type": "Bearer"}'), f"as client {CLIENT}: the answer has no access_token"),
        (_MANAGEMENT, Answer('{"keys": [{"permissions": "Read", "value": "a"}]}'), "it has no key with full perm"),
        # It would take the secret to another host.
        (_LOGIN, Answer("", 302, {"Location": "https://elsewhere.example.com/token"}), r"microsoftonline\.com: 302"),
    ],
    ids=["no token", "no full key", "redirection"],
)
async def test_an_incomplete_answer_is_named(
    internet: Internet, tmp_path: Path, host: str, answer: Answer, reason: str
) -> None:
    internet.hosts[host] = lambda _: answer
    with pytest.raises(RepositoryError, match=reason):
        await _fetch(_storage(internet, _SECRET), tmp_path)


_WRONG = _SECRET.replace(CLIENT_SECRET, "topsecret")
_NO_FILE = {**_WORKLOAD, "AZURE_FEDERATED_TOKEN_FILE": "/none"}
_NO_TLS = {**_MANAGED, "activeDirectoryAuthorityURI": f"http://{_LOGIN}/"}


@pytest.mark.parametrize(
    ("text", "environment", "config", "reason"),
    [
        (_WRONG, {}, _MANAGED, f"sign in to Azure as client {CLIENT}: .*: 401 AADSTS7000215"),
        (_SECRET, {}, _MANAGED, "the key of storage account moveraccount .*: 403 no permission for listKeys"),
        (_SECRET, {}, _NO_TLS, "the authority of Azure identities must be https"),
        ("", _NO_FILE, _MANAGED, "cannot read credentials file /none"),
    ],
    ids=["secret", "permission", "no TLS", "token file"],
)
async def test_a_refusal_is_reported_at_once_with_its_reason(
    internet: Internet,
    identities: AzureIdentities,
    tmp_path: Path,
    text: str,
    environment: Any,
    config: Any,
    reason: str,
) -> None:
    identities.denies_keys = True
    with pytest.raises(RepositoryError, match=reason) as caught:
        await _fetch(_storage(internet, text, environment, config), tmp_path)
    assert "topsecret" not in str(caught.value)


async def test_a_strange_server_gets_no_secret(internet: Internet, identities: AzureIdentities, tmp_path: Path) -> None:
    other = Internet(Authority(tmp_path / "other"))
    with pytest.raises(RepositoryError, match="its certificate is not trusted"):
        await _fetch(_storage(other, _SECRET), tmp_path)
    assert identities.requests == []
    with pytest.raises(RepositoryError, match="caCert: not a certificate authority in PEM"):
        build_client(b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n")


async def test_other_clouds_have_their_own_management(internet: Internet) -> None:
    """The services of the public cloud are not asked."""
    storage = _storage(internet, f"{_SECRET}AZURE_CLOUD_NAME=AzureChinaCloud\n")
    assert storage.account_key is not None
    assert storage.account_key.management == "https://management.chinacloudapi.cn"
    assert storage.account_key.audience == "https://management.core.chinacloudapi.cn/"
    assert storage.account_key.identity.authority == "https://login.chinacloudapi.cn/"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("<Error><Message>not on this account</Message></Error>", 403), "windows.net: 403 not on this account"),
        (Answer("<UserDelegationKey><Value>dmFsdWU=</Value></UserDelegationKey>"), "the answer has no key"),
    ],
    ids=["denied", "incomplete"],
)
async def test_a_refused_signature_says_what_it_needs(
    internet: Internet, token_file: Path, answer: Answer, reason: str
) -> None:
    internet.hosts[f"{_ACCOUNT}.blob.core.windows.net"] = lambda _: answer
    identity = AzureIdentity(f"https://{_LOGIN}/", TENANT, CLIENT, token_file=str(token_file))
    container = AzureContainer(_ACCOUNT, "blob.core.windows.net", "backups", identity)
    needed = f"which needs the action generateUserDelegationKey on the account: .*{reason}"
    with pytest.raises(RepositoryError, match=needed):
        await fetch_signature(container, internet.ca_pem.encode(), QuickClock(), Redactor())
