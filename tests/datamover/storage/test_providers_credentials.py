"""The sources of a bucket's keys, in Velero's order."""

from pathlib import Path

import pytest

from core.errors import RepositoryError
from datamover.storage.s3 import AwsIdentity, AwsKeys, AwsRole, S3Storage
from tests.datamover.support.locations import location_storage

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
_EMPTY = "[default]\nregion=eu-west-1\n"
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
        ({}, _ROLE | _KEYS, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        ({"profile": "team"}, {"AWS_PROFILE": "other"}, _SECRET, _TEAM),
        ({}, {"AWS_PROFILE": "team"}, _SECRET, _TEAM),
        (_OWN_FILE, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/own"}, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        (_OWN_FILE, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, "", AwsKeys("FILES", "FILESKEY")),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/own"}, "", AwsKeys("FILES", "FILESKEY")),
        ({}, _ROLE, "", AwsRole("arn", "/token")),
        ({}, _ROLE | {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, "", AwsRole("arn", "/token")),
        ({}, _ROLE | _KEYS, "", None),
        ({"region": "eu-west-1"}, _ROLE, "", AwsRole("arn", "/token", region="eu-west-1")),
        ({"region": "minio", "s3Url": "http://h:1"}, _ROLE, "", AwsRole("arn", "/token")),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/no/such/file"}, "", None),
    ],
    ids=[
        "Secret",
        "profile of the location",
        "profile of the environment",
        "Secret before a file",
        "file of the location",
        "inherited file",
        "role of the pod",
        "role of the pod beside an empty profile",
        "keys of the environment before its role",
        "role in the region of the bucket",
        "role of a bucket elsewhere",
        "nothing",
    ],
)
def test_keys_are_searched_in_veleros_order(
    tmp_path: Path, config: dict[str, str], environment: dict[str, str], text: str, keys: AwsIdentity | None
) -> None:
    (tmp_path / "own").write_text(_FILE)
    (tmp_path / "cloud").write_text(_EMPTY)
    here = {name: value.replace("/credentials", str(tmp_path)) for name, value in config.items()}
    inherited = {name: value.replace("/credentials", str(tmp_path)) for name, value in environment.items()}
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


def test_a_file_below_the_mounted_credentials_is_used_with_a_warning(
    mounted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _keys({"credentialsFile": f"{mounted}/own"}, {}, "", mounted) == AwsKeys("FILES", "FILESKEY")
    ignored = "will be ignored from the next minor version on, as by Velero 1.19: set spec.credential"
    assert caplog.messages == [f'{_NAMED} "{mounted}/own" {ignored}']


_OUTSIDE = {
    "elsewhere": "{folder}/outside",
    "out of it": "{mounted}/../outside",
    "out and back": "{mounted}/../credentials/own",
    "a link out of it": "{mounted}/linked",
    "a link to itself": "{mounted}/round",
    "no path": "{mounted}/own\x00",
    "the directory": "{mounted}",
    "a directory with a longer name": "{mounted}-more/own",
    "relative": "own",
    "the environment": "/proc/self/environ",
    "a token": "/var/run/secrets/kubernetes.io/serviceaccount/token",
}


@pytest.mark.parametrize("named", _OUTSIDE.values(), ids=_OUTSIDE)
def test_a_file_that_is_not_below_the_mounted_credentials_is_ignored_with_a_warning(
    mounted: Path, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    """The writer of a location would choose among all files of the data mover."""
    path = named.format(folder=mounted.parent, mounted=mounted)
    environment = {"AWS_SHARED_CREDENTIALS_FILE": f"{mounted}/own"}
    assert _keys({"credentialsFile": path}, environment, "", mounted) == AwsKeys("FILES", "FILESKEY")
    assert caplog.messages == [f'{_NAMED} "{path}" is ignored: it is not below {mounted}; set spec.credential']


def test_a_location_with_a_secret_is_not_warned_of_its_file(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _keys({"credentialsFile": "/etc/passwd"}, {}, _SECRET, mounted) == AwsKeys("SECRETS", "SECRETSKEY")
    assert caplog.messages == []


def test_a_file_that_the_location_names_must_exist(mounted: Path) -> None:
    with pytest.raises(
        RepositoryError, match=r"BackupStorageLocation default: cannot read credentials file .*/none \(config"
    ):
        _keys({"credentialsFile": f"{mounted}/none"}, {}, "", mounted)
