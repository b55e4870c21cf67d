import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from core.errors import ConfigError, RepositoryError
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.providers import FileStorage, GcsStorage, Storage
from datamover.storage.s3 import S3Storage
from tests.datamover.support.locations import location_storage

_AWS_FILE = "[default]\naws_access_key_id = KEYID\x20\naws_secret_access_key=TOPSECRET\n"


@pytest.fixture
def folder(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path, tmp_path / "cache")


def test_s3_location_becomes_arguments_without_any_key(folder: WorkDir) -> None:
    config = {"s3Url": "https://s3.example.com:9000", "region": "minio", "s3ForcePathStyle": "true"}
    storage = location_storage("velero.io/aws", config, _AWS_FILE, prefix="/p/")
    access = storage.access(folder)
    assert access.arguments == [
        "s3",
        "--bucket=bkt",
        "--prefix=p/kopia/app/",
        "--endpoint=s3.example.com:9000",
        "--region=minio",
        "--access-key=",
        "--secret-access-key=",
        "--session-token=",
    ]
    assert access.environment == {
        "AWS_ACCESS_KEY_ID": "KEYID",
        "AWS_SECRET_ACCESS_KEY": "TOPSECRET",
        "AWS_SESSION_TOKEN": "",
    }
    assert "TOPSECRET" not in repr(storage) + repr(access)


@pytest.mark.parametrize(
    ("prefix", "below"),
    [("", "kopia/app/"), ("/a/b/", "a/b/kopia/app/"), ("a//b", "a/b/kopia/app/"), ("./a/../b", "b/kopia/app/")],
    ids=["none", "slashes around it", "an empty part", "dots"],
)
def test_a_prefix_is_normalized_as_by_velero(folder: WorkDir, prefix: str, below: str) -> None:
    """Source: Velero v1.18, getStorageVariables in pkg/repository/provider/unified_repo.go; Go, path.Join."""
    storage = location_storage("velero.io/aws", {"s3Url": "http://h:1"}, prefix=prefix)
    assert f"--prefix={below}" in storage.access(folder).arguments


def test_a_known_provider_takes_precedence_over_its_config_and_any_other_with_an_s3_url_is_s3() -> None:
    config = {"s3Url": "http://127.0.0.1:1", "storageAccount": "acc", "resourceGroup": "g", "subscriptionId": "s"}
    assert isinstance(location_storage("azure", config), AzureStorage)
    assert isinstance(location_storage("example.com/other", config), S3Storage)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"s3Url": "http://h:1"}, "--disable-tls"),
        ({"s3Url": "https://h:1/"}, "--endpoint=h:1"),
        ({"s3Url": "https://h:1", "insecureSkipTLSVerify": "true"}, "--disable-tls-verification"),
        ({"s3Url": "https://h:1", "insecureSkipTLSVerify": "1"}, "--disable-tls-verification"),
        ({"region": "cn-north-1"}, "--endpoint=s3.cn-north-1.amazonaws.com.cn"),
        ({}, "--endpoint=s3.amazonaws.com"),
    ],
    ids=["plain http", "trailing slash", "unchecked certificate", "unchecked by number", "China", "AWS"],
)
def test_s3_config_becomes_a_flag(folder: WorkDir, config: dict[str, str], flag: str) -> None:
    assert flag in location_storage("velero.io/aws", config).access(folder).arguments


def test_settings_of_veleros_plugin_change_nothing(folder: WorkDir) -> None:
    """Velero's repository ignores them too: kopia has no such flags."""
    config = {"s3Url": "http://h:1", "region": "r"}
    plugins = {
        "publicUrl": "https://public.example.com",
        "s3ForcePathStyle": "false",
        "kmsKeyId": "key",
        "serverSideEncryption": "AES256",
        "customerKeyEncryptionFile": "/file",
        "checksumAlgorithm": "",
        "signatureVersion": "1",
        "tagging": "a=b",
        "enableSharedConfig": "true",
    }
    plain, configured = (location_storage("velero.io/aws", given, _AWS_FILE) for given in (config, config | plugins))
    assert plain.access(folder) == configured.access(folder)


def test_an_authority_is_written_to_a_private_file_and_the_reference_takes_precedence(folder: WorkDir) -> None:
    inline = base64.b64encode(b"inline").decode()
    storage = location_storage("velero.io/aws", ca_pem=b"referenced", caCert=inline)
    (flag,) = [one for one in storage.access(folder).arguments if one.startswith("--root-ca-pem-path=")]
    file = Path(flag.partition("=")[2])
    assert file.read_bytes() == b"referenced"
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_repository_of_an_fs_location_is_below_its_fspath() -> None:
    storage = location_storage("velero.io/fs", {"fspath": "/backups"}, prefix="p")
    assert storage == FileStorage(Path("/backups/p/kopia/app"), Path("/backups"))


def test_a_directory_is_not_created_when_its_root_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        FileStorage(tmp_path / "mnt" / "kopia", tmp_path / "mnt").prepare_creation()


@pytest.mark.parametrize("kind", ["service_account", "external_account"])
def test_google_credentials_are_written_to_a_file(folder: WorkDir, kind: str) -> None:
    """Others than a key, such as of a workload with another identity provider, are left to Google's library."""
    text, file = f'{{"type": "{kind}"}}', folder.path / "google.json"
    access = location_storage("velero.io/gcp", {}, text).access(folder)
    arguments, is_key = ["gcs", "--bucket=bkt", "--prefix=kopia/app/"], kind == "service_account"
    assert access.arguments == [*arguments, *([f"--credentials-file={file}"] if is_key else [])]
    assert access.environment == ({} if is_key else {"GOOGLE_APPLICATION_CREDENTIALS": str(file)})
    assert file.read_text() == text
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nkey=TOPSECRET", "invalid Google credentials file: it must be a JSON object"),
        ('"TOPSECRET"', "invalid Google credentials file: it must be a JSON object"),
        ('{"credential_source": "TOPSECRET"}', "invalid Google credentials file"),
        (
            '{"credential_source": {"executable": {"command": "TOPSECRET"}}}',
            "credential_source.executable: not supported",
        ),
        ('{"credential_source": {"certificate": {}, "file": "TOPSECRET"}}', "file: must be an absolute path"),
        ('{"source_credentials": {"credential_source": {"certificate": {"a": 1}}}}', "certificate: not supported"),
    ],
)
def test_credentials_of_google_that_cannot_be_used_are_rejected_without_quoting_them(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match="BackupStorageLocation default: Secret velero/cloud: .*" + message) as e:
        location_storage("velero.io/gcp", {}, text)
    assert "TOPSECRET" not in str(e.value)


@pytest.mark.parametrize(
    ("provider", "config", "message"),
    [
        ("example.com/other", {}, 'unknown provider "example.com/other"'),
        ("velero.io/azure", {}, "config.storageAccount is not set"),
        ("velero.io/fs", {}, 'config.fspath: must be an absolute path: ""'),
        ("velero.io/aws", {"profile": "none"}, 'Secret velero/cloud: no profile "none" .profiles: default'),
        ("velero.io/aws", {"s3Url": "https://s3.example.com/minio"}, "must not have a path"),
        (
            "velero.io/aws",
            {"s3Url": "https://user:TOPSECRET@s3.example.com"},
            "must not contain a user or password",
        ),
    ],
    ids=["provider", "azure account", "fspath", "profile", "address", "address with a password"],
)
def test_invalid_settings_are_reported_with_the_locations_name_and_without_a_secret(
    provider: str, config: dict[str, str], message: str
) -> None:
    with pytest.raises(RepositoryError, match="BackupStorageLocation default: .*" + message) as rejected:
        location_storage(provider, config, _AWS_FILE)
    assert "TOPSECRET" not in str(rejected.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    "storage",
    [
        S3Storage("b", "p/", "http://127.0.0.1:1", "r"),
        S3Storage("b", "p/", "https://127.0.0.1:1", verify_tls=False),
        S3Storage("b", "p/", "https://127.0.0.1:1", ca_pem=b"x"),
        FileStorage(Path("/no/such/folder")),
        AzureStorage("c", "p/", "a", {"AZURE_STORAGE_KEY": "a2V5"}, b"x", "d"),
        GcsStorage("b", "p/", "{}", b"x"),
    ],
    ids=["s3", "s3 unchecked", "s3 authority", "folder", "azure", "gcs"],
)
def test_kopias_parser_accepts_the_arguments(folder: WorkDir, storage: Storage) -> None:
    """With an unknown flag, kopia parses all of them, and then does nothing."""
    kopia = shutil.which("kopia")
    assert kopia is not None
    argv = [kopia, "repository", "connect", *storage.access(folder).arguments, "--no-such-flag"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "unknown long flag '--no-such-flag'" in done.stderr
