"""An Azure location becomes kopia's flags and variables, as with Velero."""

from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import RepositoryError
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.providers import CredentialsText, Storage, parse_variables
from tests.datamover.support.locations import location_storage

_CLIENT = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"}
_IDENTITY = "AZURE_TENANT_ID=t\nAZURE_CLIENT_ID='c'\n"
_SAS = "AZURE_STORAGE_SAS_TOKEN"
_CHAIN = "AZURE_CLIENT_SEND_CERTIFICATE_CHAIN"
_WORKLOAD = {**_CLIENT, "AZURE_FEDERATED_TOKEN_FILE": "/var/run/secrets/azure/tokens/azure-identity-token"}
_MANAGED = {"resourceGroup": "group-1", "subscriptionId": "sub-1"}
_KEY = {"AZURE_STORAGE_KEY": "topsecret"}
_SECRET = {**_CLIENT, "AZURE_CLIENT_SECRET": "topsecret"}
_CERTIFICATE = {**_CLIENT, "AZURE_CLIENT_CERTIFICATE": "topsecret"}


def _storage(config: dict[str, str], text: str, environment: dict[str, str] | None = None) -> Storage:
    return location_storage("velero.io/azure", {"storageAccount": "acc", **config}, text, environment=environment)


@pytest.mark.parametrize(
    ("config", "text", "environment", "variables"),
    [
        ({"storageAccountKeyEnvVar": "MYKEY"}, "# note\nMYKEY=topsecret\n", {}, _KEY),
        ({}, "AZURE_STORAGE_ACCOUNT_ACCESS_KEY=topsecret", {}, _KEY),
        ({}, "", {"AZURE_CREDENTIALS_FILE": "{folder}/cloud"}, _KEY),
        ({"useAAD": "true"}, f"{_IDENTITY}AZURE_CLIENT_SECRET=topsecret", {}, _SECRET),
        (_MANAGED, f"{_IDENTITY}AZURE_CLIENT_CERTIFICATE=topsecret", {}, _CERTIFICATE),
        ({}, "AZURE_CLIENT_CERTIFICATE_PATH={folder}/certificate.pem", _CLIENT, _CERTIFICATE),
        ({"useAAD": "true"}, f"{_SAS}=topsecret", {}, {_SAS: "topsecret"}),
        # kopia itself would prefer the signature.
        ({}, "AZURE_STORAGE_KEY=topsecret", {_SAS: "of another account"}, _KEY),
        # The workload identity of the pod is left to kopia, before a client without a secret.
        ({"useAAD": "true"}, "AZURE_CLOUD_NAME=AzurePublicCloud", _WORKLOAD, _CLIENT),
        ({"useAAD": "true"}, "AZURE_TENANT_ID=other\nAZURE_CLIENT_ID=other", _WORKLOAD, _CLIENT),
        # As in Velero, a secret takes precedence over a certificate, and that over a user.
        ({}, f"{_IDENTITY}AZURE_USERNAME=u\nAZURE_CLIENT_SECRET=topsecret", {}, _SECRET),
        ({}, f"{_IDENTITY}AZURE_USERNAME=u\nAZURE_CLIENT_CERTIFICATE=topsecret\n{_CHAIN}=false", {}, _CERTIFICATE),
    ],
)
async def test_credentials_become_kopias_variables(
    tmp_path: Path, config: dict[str, str], text: str, environment: dict[str, str], variables: dict[str, str]
) -> None:
    (tmp_path / "certificate.pem").write_text("topsecret")
    (tmp_path / "cloud").write_text("AZURE_STORAGE_KEY=topsecret", "utf-8-sig")
    inherited = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    storage = _storage(config, text.format(folder=tmp_path), inherited)
    assert await storage.with_fetched_credentials(SystemClock(), Redactor()) is storage
    access = storage.access(WorkDir(tmp_path, tmp_path / "cache"))
    assert access.environment == {_SAS: "", **variables}
    assert access.arguments == ["azure", "--container=bkt", "--prefix=kopia/app/", "--storage-account=acc"]
    assert access.secrets({}) == [value for value in variables.values() if value == "topsecret"]


def test_a_file_with_comments_and_quotes_is_parsed() -> None:
    text = """\
# the account
export AZURE_TENANT_ID = t   # ours
AZURE_CLIENT_ID: 'c # d'
AZURE_CLIENT_CERTIFICATE="-----BEGIN\\nkey=
-----END"\r
AZURE_STORAGE_KEY=a2V5==# ours
AZURE_CLIENT_SECRET="a\\"b\\\\c\\r"
AZURE_USERNAME="a\\"
AZURE_PASSWORD=a'b#c
EMPTY=
"""
    assert parse_variables(CredentialsText(text, "file")) == {
        "AZURE_TENANT_ID": "t",
        "AZURE_CLIENT_ID": "c # d",
        "AZURE_CLIENT_CERTIFICATE": "-----BEGIN\nkey=\n-----END",
        "AZURE_STORAGE_KEY": "a2V5==",
        "AZURE_CLIENT_SECRET": 'a"b\\c\r',
        "AZURE_USERNAME": "a\\",
        "AZURE_PASSWORD": "a'b#c",
        "EMPTY": "",
    }


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
    ("config", "cloud", "domain", "authority"),
    [
        ({}, "AzureChinaCloud", "blob.core.chinacloudapi.cn", "https://login.chinacloudapi.cn/"),
        ({}, "AzureUSGovernment", "blob.core.usgovcloudapi.net", "https://login.microsoftonline.us/"),
        ({}, "AZUREPUBLICCLOUD", None, ""),
        ({"storageAccountURI": "https://acc.z1.blob.example.net/"}, "", "z1.blob.example.net", ""),
        ({"activeDirectoryAuthorityURI": "https://login.example.net/"}, "", None, "https://login.example.net/"),
    ],
)
def test_sovereign_clouds_differ(config: dict[str, str], cloud: str, domain: str | None, authority: str) -> None:
    access = _storage(config, f"AZURE_CLOUD_NAME={cloud}\nAZURE_STORAGE_KEY=k").access(WorkDir(Path(), Path()))
    assert access.arguments[4:] == ([f"--storage-domain={domain}"] if domain else [])
    assert access.environment.get("AZURE_AUTHORITY_HOST", "") == authority


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"storageAccountKeyEnvVar": "MYKEY"}, "AZURE_TENANT_ID=t", "storageAccountKeyEnvVar: not in the credentials"),
        ({}, "AZURE_CLOUD_NAME=MyCloud", 'AZURE_CLOUD_NAME: unknown cloud "MyCloud"'),
        ({"storageAccountURI": "https://10.0.0.1/acc"}, "", "storageAccountURI: must be https://acc"),
        ({"storageAccountURI": "http://acc.z1.blob.example.net"}, "", "storageAccountURI: must be https://acc"),
        ({"storageAccountURI": "https://[acc"}, "", "storageAccountURI: invalid"),
        ({}, "AZURE_CLIENT_CERTIFICATE_PATH=/no/such/file", "cannot read credentials file /no/such/file"),
        ({"useAAD": "maybe"}, "AZURE_CLIENT_SECRET=s", "config.useAAD: must be true or false"),
        ({}, "AZURE_CLIENT_SECRET=topsecret\nAZURE_CLIENT_ID=c", "not in the credentials: AZURE_TENANT_ID"),
        ({"useAAD": "true"}, "", "useAAD: kopia cannot read and write blobs with the managed identity"),
        ({}, "AZURE_CLIENT_ID=c", "no key in the credentials, .* not set: resourceGroup and subscriptionId"),
        ({"resourceGroup": "g"}, "", "not set: subscriptionId"),
        (_MANAGED, "AZURE_USERNAME=u\nAZURE_PASSWORD=topsecret", "AZURE_USERNAME: not supported by kopia"),
        ({}, "AZURE_CLIENT_CERTIFICATE=c\nAZURE_CLIENT_CERTIFICATE_PASSWORD=topsecret", "CERTIFICATE_PASSWORD: not"),
        ({}, f"AZURE_CLIENT_CERTIFICATE=c\n{_CHAIN}=true", "SEND_CERTIFICATE_CHAIN: not"),
    ],
)
def test_what_is_invalid_or_impossible_is_refused(config: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=f"BackupStorageLocation default: .*{message}") as caught:
        _storage(config, text)
    assert "topsecret" not in str(caught.value)
