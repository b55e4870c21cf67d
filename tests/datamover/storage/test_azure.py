"""An Azure location becomes kopia's flags and variables, as the peer reads it."""

from pathlib import Path

import pytest

from core.errors import RepositoryError
from core.models.storage import BackupStorageLocation
from datamover.runtime.work_dir import WorkFolder
from datamover.storage.credentials import CredentialsText, parse_variables
from datamover.storage.location import LocationSecrets, storage_of
from datamover.storage.providers import Reach


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path, tmp_path / "cache")


def _reach(folder: WorkFolder, config: dict[str, str], text: str, environment: dict[str, str] | None = None) -> Reach:
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
    return storage_of(location, "app", secrets=secrets, environment=environment or {}).reach(folder)


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
        ({}, "AZURE_CLIENT_CERTIFICATE=topsecret", {"AZURE_CLIENT_CERTIFICATE": "topsecret"}),
        ({}, "", {}),
    ],
    ids=["named key", "key", "client secret", "certificate", "the pod's own identity"],
)
def test_credentials_become_kopias_variables(
    folder: WorkFolder, config: dict[str, str], text: str, variables: dict[str, str]
) -> None:
    reach = _reach(folder, config, text)
    assert reach.environment == variables
    assert reach.arguments == ["azure", "--container=bkt", "--prefix=kopia/app/", "--storage-account=acc"]
    assert reach.secrets({}) == ["topsecret"] * bool(variables)


def test_a_file_that_was_written_by_hand_is_read() -> None:
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


def test_a_certificate_in_a_file_is_read(folder: WorkFolder) -> None:
    (folder.path / "certificate.pem").write_text("topsecret")
    reach = _reach(folder, {}, f"AZURE_CLIENT_CERTIFICATE_PATH={folder.path / 'certificate.pem'}")
    assert reach.environment == {"AZURE_CLIENT_CERTIFICATE": "topsecret"}


def test_the_inherited_file_is_taken_where_the_location_names_no_secret(folder: WorkFolder) -> None:
    (folder.path / "cloud").write_text("AZURE_STORAGE_KEY=topsecret")
    reach = _reach(folder, {}, "", {"AZURE_CREDENTIALS_FILE": str(folder.path / "cloud")})
    assert reach.environment == {"AZURE_STORAGE_KEY": "topsecret"}


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
def test_a_cloud_of_its_own_has_its_own_addresses(
    folder: WorkFolder, config: dict[str, str], text: str, domain: str, authority: str
) -> None:
    reach = _reach(folder, config, text)
    assert [one for one in reach.arguments if "domain" in one] == ([f"--storage-domain={domain}"] if domain else [])
    assert reach.environment == ({"AZURE_AUTHORITY_HOST": authority} if authority else {})


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"storageAccountKeyEnvVar": "MYKEY"}, "AZURE_TENANT_ID=t", "storageAccountKeyEnvVar: the credentials have no"),
        ({}, "AZURE_CLOUD_NAME=MyCloud", "AZURE_CLOUD_NAME 'MyCloud' is no cloud"),
        (
            {"storageAccountURI": "https://10.0.0.1/acc"},
            "",
            "storageAccountURI 'https://10.0.0.1/acc' is no https://acc",
        ),
        ({}, "AZURE_CLIENT_CERTIFICATE_PATH=/no/such/file", "/no/such/file cannot be read"),
    ],
    ids=["key", "cloud", "address", "certificate"],
)
def test_what_cannot_be_used_is_told(folder: WorkFolder, config: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=f"BackupStorageLocation default: .*{message}"):
        _reach(folder, config, text)
