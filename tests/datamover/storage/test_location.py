import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError, RepositoryError
from core.models.storage import BackupStorageLocation
from datamover.arguments import RepositoryOptions
from datamover.local.command import parse_storage
from datamover.runtime.work_dir import CacheDir, WorkDir, open_work_dir
from datamover.storage.azure import AzureStorage
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import CredentialsText, FileStorage, GcsStorage, KopiaAccess
from datamover.storage.s3 import AwsKeys, S3Storage

pytestmark = pytest.mark.processes

_AWS_FILE = """\
[default]
aws_access_key_id = KEYID\x20
aws_secret_access_key=TOPSECRET
[other]
aws_access_key_id=OTHER
aws_secret_access_key=OTHERSECRET
aws_session_token=TOKEN
"""
_CREDENTIAL = LocationSecrets(CredentialsText(_AWS_FILE, "Secret velero/cloud"))


def _location(provider: str, config: dict[str, str] | None = None, **storage: Any) -> BackupStorageLocation:
    return BackupStorageLocation.parse(
        {
            "apiVersion": "velero.io/v1",
            "kind": "BackupStorageLocation",
            "metadata": {"name": "default", "namespace": "velero"},
            "spec": {"provider": provider, "config": config or {}, "objectStorage": {"bucket": "bkt", **storage}},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path, tmp_path / "cache")


def test_s3_location_becomes_arguments_without_any_key(folder: WorkDir) -> None:
    config = {"s3Url": "https://s3.example.com:9000", "region": "minio", "s3ForcePathStyle": "true"}
    storage = build_storage(
        _location("velero.io/aws", config, prefix="/p/"), "app", secrets=_CREDENTIAL, environment={}
    )
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
    location = _location("velero.io/aws", {"s3Url": "http://h:1"}, prefix=prefix)
    storage = build_storage(location, "app", secrets=_CREDENTIAL, environment={})
    assert f"--prefix={below}" in storage.access(folder).arguments


def test_any_provider_with_an_s3_url_is_s3_and_a_profile_is_honored() -> None:
    location = _location("example.com/other", {"s3Url": "http://127.0.0.1:1", "profile": "other"})
    storage = build_storage(location, "app", secrets=_CREDENTIAL, environment={})
    assert isinstance(storage, S3Storage)
    assert storage.keys == AwsKeys("OTHER", "OTHERSECRET", "TOKEN")


def test_a_known_provider_takes_precedence_over_its_config() -> None:
    config = {"s3Url": "http://127.0.0.1:1", "storageAccount": "acc", "resourceGroup": "g", "subscriptionId": "s"}
    location = _location("azure", config)
    assert isinstance(build_storage(location, "app", secrets=LocationSecrets(), environment={}), AzureStorage)


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
    storage = build_storage(_location("velero.io/aws", config), "app", secrets=LocationSecrets(), environment={})
    assert flag in storage.access(folder).arguments


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
    reaches = [
        build_storage(_location("velero.io/aws", given), "app", secrets=_CREDENTIAL, environment={}).access(folder)
        for given in (config, config | plugins)
    ]
    assert reaches[0] == reaches[1]


def test_without_credentials_the_environment_and_the_instance_are_used(folder: WorkDir) -> None:
    storage = build_storage(
        _location("velero.io/aws"),
        "app",
        secrets=LocationSecrets(),
        environment={"AWS_SHARED_CREDENTIALS_FILE": "/no/such/file"},
    )
    assert storage.access(folder).environment == {}


def test_the_inherited_file_is_used_when_the_location_references_no_secret(tmp_path: Path) -> None:
    (tmp_path / "cloud").write_text(_AWS_FILE)
    environment = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "cloud")}
    storage = build_storage(_location("velero.io/aws"), "app", secrets=LocationSecrets(), environment=environment)
    assert isinstance(storage, S3Storage)
    assert storage.keys == AwsKeys("KEYID", "TOPSECRET")


def test_an_authority_is_written_to_a_private_file_and_the_reference_takes_precedence(folder: WorkDir) -> None:
    location = _location("velero.io/aws", caCert=base64.b64encode(b"inline").decode())
    storage = build_storage(location, "app", secrets=LocationSecrets(ca_pem=b"referenced"), environment={})
    (flag,) = [one for one in storage.access(folder).arguments if one.startswith("--root-ca-pem-path=")]
    file = Path(flag.partition("=")[2])
    assert file.read_bytes() == b"referenced"
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_repository_of_an_fs_location_is_below_its_fspath() -> None:
    location = _location("velero.io/fs", {"fspath": "/backups"}, prefix="p")
    storage = build_storage(location, "app", secrets=LocationSecrets(), environment={})
    assert storage == FileStorage(Path("/backups/p/kopia/app"), Path("/backups"))


def test_a_directory_is_not_created_when_its_root_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        FileStorage(tmp_path / "mnt" / "kopia", tmp_path / "mnt").prepare_creation()


def test_google_credentials_are_written_to_a_file(folder: WorkDir) -> None:
    secrets = LocationSecrets(CredentialsText('{"type": "service_account"}', "Secret velero/cloud"))
    access = build_storage(_location("velero.io/gcp"), "app", secrets=secrets, environment={}).access(folder)
    assert access.arguments[-1] == f"--credentials-file={folder.path / 'google.json'}"
    assert (folder.path / "google.json").stat().st_mode & 0o777 == 0o600


def test_other_google_credentials_are_left_to_googles_library(folder: WorkDir) -> None:
    """Such as those of a workload with another identity provider."""
    secrets = LocationSecrets(CredentialsText('{"type": "external_account"}', "Secret velero/cloud"))
    access = build_storage(_location("velero.io/gcp"), "app", secrets=secrets, environment={}).access(folder)
    assert access.arguments == ["gcs", "--bucket=bkt", "--prefix=kopia/app/"]
    assert access.environment == {"GOOGLE_APPLICATION_CREDENTIALS": str(folder.path / "google.json")}
    assert (folder.path / "google.json").read_text() == '{"type": "external_account"}'


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
    secrets = LocationSecrets(CredentialsText(text, "Secret velero/cloud"))
    with pytest.raises(RepositoryError, match="BackupStorageLocation default: Secret velero/cloud: .*" + message) as e:
        build_storage(_location("velero.io/gcp"), "app", secrets=secrets, environment={})
    assert "TOPSECRET" not in str(e.value)


@pytest.mark.parametrize(
    ("provider", "config", "message"),
    [
        ("example.com/other", {}, 'unknown provider "example.com/other"'),
        ("velero.io/azure", {}, "config.storageAccount is not set"),
        ("velero.io/fs", {}, 'config.fspath: must be an absolute path: ""'),
        ("velero.io/aws", {"profile": "none"}, 'Secret velero/cloud: no profile "none" .profiles: default'),
        ("velero.io/aws", {"s3Url": "https://s3.example.com/minio"}, "must not have a path"),
    ],
    ids=["provider", "azure account", "fspath", "profile", "address"],
)
def test_invalid_settings_are_reported_with_the_locations_name(
    provider: str, config: dict[str, str], message: str
) -> None:
    with pytest.raises(RepositoryError, match="BackupStorageLocation default: .*" + message):
        build_storage(_location(provider, config), "app", secrets=_CREDENTIAL, environment={})


def test_an_address_with_a_password_is_rejected_without_quoting_it() -> None:
    with pytest.raises(RepositoryError, match="must not contain a user or password") as rejected:
        build_storage(
            _location("velero.io/aws", {"s3Url": "https://user:TOPSECRET@s3.example.com"}),
            "app",
            secrets=_CREDENTIAL,
            environment={},
        )
    assert "TOPSECRET" not in str(rejected.value)


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
def test_kopias_parser_accepts_the_arguments(folder: WorkDir, storage: S3Storage) -> None:
    """With `--help`, kopia parses all of them, and then does nothing."""
    access: KopiaAccess = storage.access(folder)
    kopia = shutil.which("kopia")
    assert kopia is not None
    done = subprocess.run(
        [kopia, "repository", "connect", *access.arguments, "--no-such-flag"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unknown long flag '--no-such-flag'" in done.stderr


def test_the_work_directory_is_private_and_removed(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()


def test_a_cache_on_its_own_volume_remains_and_nothing_else(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, CacheDir(keep=True)) as folder:
        folder.write("credentials", b"secret")
        folder.config_file.touch()
        (folder.path / "logs").mkdir()
        folder.cache.mkdir()
        (folder.cache / "block").touch()
    assert list(folder.path.rglob("*")) == [folder.cache, folder.cache / "block"]


def test_a_work_directory_that_cannot_be_removed_does_not_lose_the_result(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, CacheDir(keep=True)) as folder:
        folder.path.rmdir()


def test_the_cache_is_on_its_own_volume_if_there_is_one(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, CacheDir("/cache")) as folder:
        assert folder.cache == Path("/cache/kopia-cache")


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("/mnt/backups", FileStorage(Path("/mnt/backups"))),
        ("s3://bkt", S3Storage("bkt", "", "http://h:1", "r")),
        ("s3://bkt/a/b/", S3Storage("bkt", "a/b/", "http://h:1", "r")),
    ],
    ids=["folder", "bucket", "prefix"],
)
def test_local_mode_parses_the_repository(name: str, storage: FileStorage | S3Storage) -> None:
    options = RepositoryOptions(name, "password", endpoint="http://h:1", region="r")
    assert parse_storage(options, {}) == storage


@pytest.mark.parametrize("name", ["ftp://host/x", "s3://"])
def test_a_repository_that_is_neither_directory_nor_bucket_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a directory or s3://bucket/prefix"):
        parse_storage(RepositoryOptions(name, "password"), {})
