"""An Azure location becomes kopia's flags and variables, as with Velero."""

from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import RepositoryError
from core.models.storage import BackupStorageLocation
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import CredentialsText, KopiaAccess, Storage, parse_variables

_CLIENT = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"}
_WORKLOAD = {**_CLIENT, "AZURE_FEDERATED_TOKEN_FILE": "/var/run/secrets/azure/tokens/azure-identity-token"}
_MANAGED = {"resourceGroup": "group-1", "subscriptionId": "sub-1"}


@pytest.fixture
def folder(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path, tmp_path / "cache")


def _storage(config: dict[str, str], text: str, environment: dict[str, str] | None = None) -> Storage:
    location = BackupStorageLocation.parse(
        {
            "apiVersion": "velero.io/v1",
            "kind": "BackupStorageLocation",
            "metadata": {"name": "default", "namespace": "velero"},
            "spec": {
                "provider": "velero.io/azure",
                "config": {"storageAccount": "acc", **config},
                "objectStorage": {"bucket": "bkt"},
            },
        }
    )
    secrets = LocationSecrets(CredentialsText(text, "Secret velero/cloud") if text else None)
    return build_storage(location, "app", secrets=secrets, environment=environment or {})


def _access(
    folder: WorkDir, config: dict[str, str], text: str, environment: dict[str, str] | None = None
) -> KopiaAccess:
    return _storage(config, text, environment).access(folder)


@pytest.mark.parametrize(
    ("config", "text", "variables"),
    [
        ({"storageAccountKeyEnvVar": "MYKEY"}, "# note\nMYKEY=topsecret\n", {"AZURE_STORAGE_KEY": "topsecret"}),
        ({}, "AZURE_STORAGE_ACCOUNT_ACCESS_KEY=topsecret", {"AZURE_STORAGE_KEY": "topsecret"}),
        (
            {"useAAD": "true"},
            "AZURE_TENANT_ID=t\nAZURE_CLIENT_ID='c'\nAZURE_CLIENT_SECRET=topsecret",
            {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": "topsecret"},
        ),
        (
            _MANAGED,
            "AZURE_TENANT_ID=t\nAZURE_CLIENT_ID=c\nAZURE_CLIENT_CERTIFICATE=topsecret",
            {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_CERTIFICATE": "topsecret"},
        ),
    ],
    ids=["named key", "key", "client secret", "certificate"],
)
def test_credentials_become_kopias_variables(
    folder: WorkDir, config: dict[str, str], text: str, variables: dict[str, str]
) -> None:
    access = _access(folder, config, text)
    assert access.environment == variables
    assert access.arguments == ["azure", "--container=bkt", "--prefix=kopia/app/", "--storage-account=acc"]
    assert access.secrets({}) == ["topsecret"] * bool(variables)


async def test_no_key_is_fetched_where_one_is_given() -> None:
    storage = _storage({}, "AZURE_STORAGE_ACCOUNT_ACCESS_KEY=topsecret")
    assert await storage.with_fetched_credentials(SystemClock(), Redactor()) is storage


def test_the_pods_workload_identity_is_left_to_kopia(folder: WorkDir) -> None:
    access = _access(folder, {"useAAD": "true"}, "AZURE_CLOUD_NAME=AzurePublicCloud", _WORKLOAD)
    assert access.environment == {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"}
    assert access.secrets({}) == []


def test_what_is_not_used_is_not_refused(folder: WorkDir) -> None:
    """As in Velero, a secret takes precedence over a certificate, and that over a user."""
    user = "AZURE_TENANT_ID=t\nAZURE_CLIENT_ID=c\nAZURE_USERNAME=u\n"
    unchained = "AZURE_CLIENT_CERTIFICATE=x\nAZURE_CLIENT_SEND_CERTIFICATE_CHAIN=false\n"
    assert _access(folder, {}, f"{user}AZURE_CLIENT_SECRET=topsecret").secrets({}) == ["topsecret"]
    assert _access(folder, {}, user + unchained).secrets({}) == ["x"]


def test_a_file_with_comments_and_quotes_is_parsed() -> None:
    text = """\
# the account
export AZURE_TENANT_ID = t   # ours
AZURE_CLIENT_ID: 'c # d'
AZURE_CLIENT_CERTIFICATE="-----BEGIN\\nkey=
-----END"\r
AZURE_STORAGE_KEY=a2V5#==
EMPTY=
"""
    assert parse_variables(CredentialsText(text, "file")) == {
        "AZURE_TENANT_ID": "t",
        "AZURE_CLIENT_ID": "c # d",
        "AZURE_CLIENT_CERTIFICATE": "-----BEGIN\nkey=\n-----END",
        "AZURE_STORAGE_KEY": "a2V5#==",
        "EMPTY": "",
    }


def test_a_certificate_in_a_file_is_read(folder: WorkDir) -> None:
    (folder.path / "certificate.pem").write_text("topsecret")
    access = _access(folder, {}, f"AZURE_CLIENT_CERTIFICATE_PATH={folder.path / 'certificate.pem'}", _CLIENT)
    assert access.environment == {**_CLIENT, "AZURE_CLIENT_CERTIFICATE": "topsecret"}


def test_the_inherited_file_is_used_when_the_location_references_no_secret(folder: WorkDir) -> None:
    (folder.path / "cloud").write_text("AZURE_STORAGE_KEY=topsecret")
    access = _access(folder, {}, "", {"AZURE_CREDENTIALS_FILE": str(folder.path / "cloud")})
    assert access.environment == {"AZURE_STORAGE_KEY": "topsecret"}


def test_only_the_environment_names_a_token_file() -> None:
    """Source: Velero v1.18, pkg/util/azure/credential.go (NewCredential)."""
    text = "\n".join(f"{name}={value}" for name, value in _WORKLOAD.items())
    named = _storage(_MANAGED, text)
    assert isinstance(named, AzureStorage)
    assert named.account_key
    assert named.account_key.identity.token_file == ""
    with pytest.raises(RepositoryError, match="managed identity"):
        _storage({"useAAD": "true"}, text)


@pytest.mark.parametrize(
    ("config", "text", "domain", "authority"),
    [
        ({}, "AZURE_CLOUD_NAME=AzureChinaCloud", "blob.core.chinacloudapi.cn", "https://login.chinacloudapi.cn/"),
        ({}, "AZURE_CLOUD_NAME=AzureUSGovernment", "blob.core.usgovcloudapi.net", "https://login.microsoftonline.us/"),
        ({}, "AZURE_CLOUD_NAME=AZUREPUBLICCLOUD", "", ""),
        ({"storageAccountURI": "https://acc.z1.blob.example.net/"}, "", "z1.blob.example.net", ""),
        ({"activeDirectoryAuthorityURI": "https://login.example.net/"}, "", "", "https://login.example.net/"),
    ],
    ids=["China", "government", "public", "the account's own address", "authority"],
)
def test_a_sovereign_cloud_has_its_own_addresses(
    folder: WorkDir, config: dict[str, str], text: str, domain: str, authority: str
) -> None:
    access = _access(folder, config, f"{text}\nAZURE_STORAGE_KEY=k")
    assert [one for one in access.arguments if "domain" in one] == ([f"--storage-domain={domain}"] if domain else [])
    authorities = {"AZURE_AUTHORITY_HOST": authority} if authority else {}
    assert access.environment == {"AZURE_STORAGE_KEY": "k", **authorities}


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"storageAccountKeyEnvVar": "MYKEY"}, "AZURE_TENANT_ID=t", "storageAccountKeyEnvVar: not in the credentials"),
        ({}, "AZURE_CLOUD_NAME=MyCloud", 'AZURE_CLOUD_NAME: unknown cloud "MyCloud"'),
        (
            {"storageAccountURI": "https://10.0.0.1/acc"},
            "",
            "storageAccountURI: must be https://acc",
        ),
        ({"storageAccountURI": "https://[acc"}, "", "storageAccountURI: invalid"),
        ({}, "AZURE_CLIENT_CERTIFICATE_PATH=/no/such/file", "cannot read /no/such/file"),
        ({"useAAD": "maybe"}, "AZURE_CLIENT_SECRET=s", "config.useAAD: must be true or false"),
        ({}, "AZURE_CLIENT_SECRET=s\nAZURE_CLIENT_ID=c", "not in the credentials: AZURE_TENANT_ID"),
    ],
    ids=["key", "cloud", "address", "no address", "certificate", "useAAD", "tenant"],
)
def test_invalid_settings_are_reported(folder: WorkDir, config: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=f"BackupStorageLocation default: .*{message}"):
        _access(folder, config, text)


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"useAAD": "true"}, "", "useAAD: kopia cannot read and write blobs with the managed identity"),
        ({}, "AZURE_CLIENT_ID=c", "no key in the credentials, .* not set: resourceGroup and subscriptionId"),
        ({"resourceGroup": "g"}, "", "not set: subscriptionId"),
        (_MANAGED, "AZURE_USERNAME=u\nAZURE_PASSWORD=topsecret", "AZURE_USERNAME: not supported by kopia"),
        ({}, "AZURE_CLIENT_CERTIFICATE=c\nAZURE_CLIENT_CERTIFICATE_PASSWORD=topsecret", "CERTIFICATE_PASSWORD: not"),
        ({}, "AZURE_CLIENT_CERTIFICATE=c\nAZURE_CLIENT_SEND_CERTIFICATE_CHAIN=true", "SEND_CERTIFICATE_CHAIN: not"),
    ],
    ids=["managed identity", "no account", "no subscription", "user", "encrypted certificate", "certificate chain"],
)
def test_what_kopia_cannot_do_is_refused_with_the_reason(
    folder: WorkDir, config: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(RepositoryError, match=f"BackupStorageLocation default: .*{message}") as caught:
        _access(folder, config, text)
    assert "topsecret" not in str(caught.value)
