import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from core.errors import ConfigError, RepositoryError
from datamover.runtime.work_dir import WorkDir
from datamover.storage.azure import AzureStorage
from datamover.storage.providers import FileStorage, GcsStorage, Storage
from datamover.storage.s3 import AwsIdentity, AwsKeys, AwsRole, S3Storage
from tests.datamover.support.locations import location_storage
from tests.support.objects import JsonDict

_AWS_FILE = "[default]\naws_access_key_id = KEYID\x20\naws_secret_access_key=TOPSECRET\n"


@pytest.fixture
def folder(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path, tmp_path / "cache")


def _s3_config(storage: Storage, folder: WorkDir) -> JsonDict:
    """Return the configuration in the private file that the arguments for kopia name."""
    command, file = storage.access(folder).arguments
    token = Path(file.removeprefix("--token-file="))
    assert (command, token.stat().st_mode & 0o777) == ("from-config", 0o600)
    decoded: JsonDict = json.loads(base64.urlsafe_b64decode(token.read_bytes() + b"=="))
    assert decoded["version"] == "1"
    assert decoded["storage"] == {"type": "s3", "config": decoded["storage"]["config"]}
    return decoded["storage"]["config"]


def test_s3_location_becomes_a_configuration_without_any_key(folder: WorkDir) -> None:
    """What only Velero's plugin knows changes nothing: its repository ignores it too, as kopia has no such settings."""
    config = {"s3Url": "https://s3.example.com:9000", "region": "minio", "s3ForcePathStyle": "true", "kmsKeyId": "key"}
    storage = location_storage("velero.io/aws", config, _AWS_FILE, prefix="/p/")
    access = storage.access(folder)
    place = {"bucket": "bkt", "prefix": "p/kopia/app/", "endpoint": "s3.example.com:9000", "region": "minio"}
    assert _s3_config(storage, folder) == place | dict.fromkeys(("accessKeyID", "secretAccessKey", "sessionToken"), "")
    assert access.environment == {
        "AWS_ACCESS_KEY_ID": "KEYID",
        "AWS_SECRET_ACCESS_KEY": "TOPSECRET",
        "AWS_SESSION_TOKEN": "",
    }
    assert "TOPSECRET" not in repr(storage) + repr(access)


@pytest.mark.parametrize(
    ("prefix", "below"),
    [("", "kopia/app/"), ("/a/b/", "a/b/kopia/app/"), ("a//b", "a/b/kopia/app/"), ("./a/../b", "b/kopia/app/")],
)
def test_a_prefix_is_normalized_as_by_velero(prefix: str, below: str) -> None:
    """Source: Velero v1.18, getStorageVariables in pkg/repository/provider/unified_repo.go; Go, path.Join."""
    storage = location_storage("example.com/another", {"s3Url": "http://h:1"}, prefix=prefix)
    assert isinstance(storage, S3Storage)
    assert storage.prefix == below


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"s3Url": "http://h:1"}, {"doNotUseTLS": True}),
        ({"s3Url": "https://h:1/"}, {"endpoint": "h:1"}),
        ({"s3Url": "https://h:1", "insecureSkipTLSVerify": "true"}, {"doNotVerifyTLS": True}),
        ({"s3Url": "https://h:1", "insecureSkipTLSVerify": "1"}, {"doNotVerifyTLS": True}),
        ({"region": "cn-north-1"}, {"endpoint": "s3.cn-north-1.amazonaws.com.cn"}),
        ({}, {"endpoint": "s3.amazonaws.com"}),
    ],
)
def test_s3_config_becomes_a_setting_of_kopia(folder: WorkDir, config: dict[str, str], setting: JsonDict) -> None:
    assert setting.items() <= _s3_config(location_storage("velero.io/aws", config), folder).items()


def test_an_authority_is_in_a_private_file_and_the_reference_takes_precedence(folder: WorkDir) -> None:
    inline = base64.b64encode(b"inline").decode()
    storage = location_storage("velero.io/aws", ca_pem=b"referenced", caCert=inline)
    assert base64.b64decode(_s3_config(storage, folder)["rootCA"]) == b"referenced"


def test_the_repository_of_an_fs_location_is_below_its_fspath(tmp_path: Path) -> None:
    storage = location_storage("velero.io/fs", {"fspath": f"{tmp_path}/not-mounted"}, prefix="p")
    assert storage == FileStorage(tmp_path / "not-mounted/p/kopia/app", tmp_path / "not-mounted")
    with pytest.raises(ConfigError, match=r"cannot read directory .*: No such file"):
        storage.prepare_creation()


@pytest.mark.parametrize("kind", ["service_account", "impersonated_service_account"])
def test_google_credentials_are_written_to_a_file(folder: WorkDir, kind: str) -> None:
    """Others than a key, such as of a workload with another identity provider, are left to Google's library."""
    text, file = (
        json.dumps({"source_credentials": {"type": "service_account"}, "type": kind}),
        folder.path / "google.json",
    )
    access = location_storage("velero.io/gcp", {}, text).access(folder)
    arguments, is_key = ["gcs", "--bucket=bkt", "--prefix=kopia/app/"], kind == "service_account"
    assert access.arguments == [*arguments, *([f"--credentials-file={file}"] if is_key else [])]
    assert access.environment == ({} if is_key else {"GOOGLE_APPLICATION_CREDENTIALS": str(file)})
    assert file.read_text() == text
    assert file.stat().st_mode & 0o777 == 0o600
    # An inherited variable would name another.
    assert location_storage("velero.io/gcp").access(folder).environment == {"GOOGLE_APPLICATION_CREDENTIALS": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nkey=TOPSECRET", "invalid Google credentials file: it must be a JSON object"),
        ('"TOPSECRET"', "invalid Google credentials file: it must be a JSON object"),
        ('{"credential_source": "TOPSECRET"}', "invalid Google credentials file"),
        ('{"credential_source": {"executable": {"command": "TOPSECRET"}}}', "source.executable: not supported"),
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
        # A known provider takes precedence over the config.
        ("velero.io/azure", {"s3Url": "http://127.0.0.1:1"}, "config.storageAccount is not set"),
        ("velero.io/fs", {}, 'config.fspath: must be an absolute path: ""'),
        ("velero.io/aws", {"profile": "none"}, 'Secret velero/cloud: no profile "none" .profiles: default'),
        ("velero.io/aws", {"s3Url": "https://s3.example.com/minio"}, "must not have a path"),
        ("velero.io/aws", {"s3Url": "https://user:TOPSECRET@s3.example.com"}, "must not contain a user or password"),
    ],
)
def test_invalid_settings_are_reported_without_a_secret(provider: str, config: dict[str, str], message: str) -> None:
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


_SECRET = """\
[default]
aws_access_key_id=SECRETS
aws_secret_access_key=SECRETSKEY
[team]
aws_access_key_id=TEAMS
aws_secret_access_key=TEAMSKEY
aws_session_token=TEAMSTOKEN
"""
_TEAM = AwsKeys("TEAMS", "TEAMSKEY", "TEAMSTOKEN")
_FILE = "[default]\naws_access_key_id=FILES\naws_secret_access_key=FILESKEY\n"
_NAMED = "BackupStorageLocation default: config.credentialsFile"
_OWN_FILE = {"credentialsFile": "/credentials/own"}
_ROLE = {"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
_KEYS = {"AWS_ACCESS_KEY_ID": "KEYID", "AWS_SECRET_ACCESS_KEY": "KEY"}


def _keys(config: dict[str, str], environment: dict[str, str], text: str, mounted: Path) -> AwsIdentity | None:
    storage = location_storage("velero.io/aws", config, text, environment=environment, mounted=mounted)
    assert isinstance(storage, S3Storage)
    return storage.keys


@pytest.mark.parametrize(
    ("config", "environment", "text", "keys"),
    [
        # A Secret; its profile by location and environment; before any file.
        ({}, _ROLE | _KEYS, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        ({"profile": "team"}, {"AWS_PROFILE": "other"}, _SECRET, _TEAM),
        ({}, {"AWS_PROFILE": "team"}, _SECRET, _TEAM),
        (_OWN_FILE, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/own"}, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        # The file of the location, then an inherited one.
        (_OWN_FILE, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, "", AwsKeys("FILES", "FILESKEY")),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/own"}, "", AwsKeys("FILES", "FILESKEY")),
        # The role of the pod, also beside an empty profile, but not beside keys of the environment.
        ({}, _ROLE, "", AwsRole("arn", "/token")),
        ({}, _ROLE | {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, "", AwsRole("arn", "/token")),
        ({}, _ROLE | _KEYS, "", None),
        # In the region of a bucket of AWS.
        ({"region": "eu-west-1"}, _ROLE, "", AwsRole("arn", "/token", region="eu-west-1")),
        ({"region": "minio", "s3Url": "http://h:1"}, _ROLE, "", AwsRole("arn", "/token")),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/no/such/file"}, "", None),
    ],
)
def test_keys_are_looked_for_in_the_order_of_velero(
    tmp_path: Path, config: dict[str, str], environment: dict[str, str], text: str, keys: AwsIdentity | None
) -> None:
    (tmp_path / "own").write_text(_FILE)
    (tmp_path / "cloud").write_text("[default]\nregion=eu-west-1\n")
    here, inherited = (
        {name: value.replace("/credentials", str(tmp_path)) for name, value in each.items()}
        for each in (config, environment)
    )
    assert _keys(here, inherited, text, tmp_path) == keys


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The credentials directory as a kubelet mounts it, and a file with other keys beside it."""
    (tmp_path / "outside").write_text(_FILE.replace("FILES", "OUTSIDES"))
    mounted = tmp_path / "credentials"
    (mounted / "..2026_11_22").mkdir(parents=True)
    (mounted / "..2026_11_22" / "own").write_text(_FILE)
    (mounted / "..data").symlink_to("..2026_11_22")
    (mounted / "own").symlink_to("..data/own")
    (mounted / "linked").symlink_to("../outside")
    (mounted / "round").symlink_to("round")
    return mounted


def test_a_file_below_the_credentials_is_used_with_a_warning(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _keys({"credentialsFile": f"{mounted}/own"}, {}, "", mounted) == AwsKeys("FILES", "FILESKEY")
    ignored = "will be ignored from the next minor version on, as by Velero 1.19: set spec.credential"
    assert caplog.messages == [f'{_NAMED} "{mounted}/own" {ignored}']
    # Not beside a Secret.
    assert _keys({"credentialsFile": "/etc/passwd"}, {}, _SECRET, mounted) == AwsKeys("SECRETS", "SECRETSKEY")
    assert len(caplog.messages) == 1
    missing = r"BackupStorageLocation default: cannot read credentials file .*/none \(config"
    with pytest.raises(RepositoryError, match=missing):
        _keys({"credentialsFile": f"{mounted}/none"}, {}, "", mounted)


@pytest.mark.parametrize(
    "named",
    [
        # Elsewhere; out of it, and back; by a link out of it, and one to itself.
        "{folder}/outside",
        "{mounted}/../outside",
        "{mounted}/../credentials/own",
        "{mounted}/linked",
        "{mounted}/round",
        "{mounted}/own\x00",
        "{mounted}",
        "{mounted}-more/own",
        "own",
        "/proc/self/environ",
        "/var/run/secrets/kubernetes.io/serviceaccount/token",
    ],
)
def test_any_other_file_is_ignored_with_a_warning(mounted: Path, caplog: pytest.LogCaptureFixture, named: str) -> None:
    """The writer of a location would choose among all files of the data mover."""
    path = named.format(folder=mounted.parent, mounted=mounted)
    environment = {"AWS_SHARED_CREDENTIALS_FILE": f"{mounted}/own"}
    assert _keys({"credentialsFile": path}, environment, "", mounted) == AwsKeys("FILES", "FILESKEY")
    assert caplog.messages == [f'{_NAMED} "{path}" is ignored: it is not below {mounted}; set spec.credential']
