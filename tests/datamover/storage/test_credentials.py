"""The sources of a bucket's keys, in Velero's order."""

from pathlib import Path

import pytest

from core.errors import RepositoryError
from core.models.storage import BackupStorageLocation
from datamover.storage.credentials import AwsKeys, AwsRole, CredentialsText, parse_aws_profile
from datamover.storage.location import LocationSecrets, build_storage
from datamover.storage.providers import S3Storage

_SECRET = CredentialsText(
    """\
[default]
aws_access_key_id=SECRETS
aws_secret_access_key=SECRETSKEY
[team]
aws_access_key_id=TEAMS
aws_secret_access_key=TEAMSKEY
""",
    "Secret velero/cloud",
)
_FILE = "[default]\naws_access_key_id=FILES\naws_secret_access_key=FILESKEY\n"
_EMPTY = "[default]\nregion=eu-west-1\n"
_OWN_FILE = {"credentialsFile": "/credentials/own"}
_ROLE = {"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
_KEYS = {"AWS_ACCESS_KEY_ID": "KEYID", "AWS_SECRET_ACCESS_KEY": "KEY"}


def _keys(
    config: dict[str, str], environment: dict[str, str], credential: CredentialsText | None
) -> AwsKeys | AwsRole | None:
    location = BackupStorageLocation.parse(
        {
            "apiVersion": "velero.io/v1",
            "kind": "BackupStorageLocation",
            "metadata": {"name": "default", "namespace": "velero"},
            "spec": {"provider": "velero.io/aws", "config": config, "objectStorage": {"bucket": "bkt"}},
        }
    )
    storage = build_storage(location, "app", secrets=LocationSecrets(credential), environment=environment)
    assert isinstance(storage, S3Storage)
    return storage.keys


@pytest.mark.parametrize(
    ("config", "environment", "credential", "keys"),
    [
        ({}, _ROLE | _KEYS, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        ({"profile": "team"}, {"AWS_PROFILE": "other"}, _SECRET, AwsKeys("TEAMS", "TEAMSKEY")),
        ({}, {"AWS_PROFILE": "team"}, _SECRET, AwsKeys("TEAMS", "TEAMSKEY")),
        (_OWN_FILE, {}, _SECRET, AwsKeys("SECRETS", "SECRETSKEY")),
        (_OWN_FILE, {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, None, AwsKeys("FILES", "FILESKEY")),
        ({}, _ROLE, None, AwsRole("arn", "/token")),
        ({}, _ROLE | {"AWS_SHARED_CREDENTIALS_FILE": "/credentials/cloud"}, None, AwsRole("arn", "/token")),
        ({}, _ROLE | _KEYS, None, None),
        ({"region": "eu-west-1"}, _ROLE, None, AwsRole("arn", "/token", region="eu-west-1")),
        ({"region": "minio", "s3Url": "http://h:1"}, _ROLE, None, AwsRole("arn", "/token")),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/no/such/file"}, None, None),
    ],
    ids=[
        "Secret",
        "profile of the location",
        "profile of the environment",
        "Secret before a file",
        "file of the location",
        "role of the pod",
        "role of the pod beside an empty profile",
        "keys of the environment before its role",
        "role in the region of the bucket",
        "role of a bucket elsewhere",
        "nothing",
    ],
)
def test_keys_are_searched_in_veleros_order(
    tmp_path: Path,
    config: dict[str, str],
    environment: dict[str, str],
    credential: CredentialsText | None,
    keys: AwsKeys | AwsRole | None,
) -> None:
    for name, text in (("own", _FILE), ("cloud", _EMPTY)):
        (tmp_path / name).write_text(text)
    here = {name: value.replace("/credentials", str(tmp_path)) for name, value in config.items()}
    inherited = {name: value.replace("/credentials", str(tmp_path)) for name, value in environment.items()}
    assert _keys(here, inherited, credential) == keys


def test_a_file_that_the_location_names_must_exist() -> None:
    with pytest.raises(
        RepositoryError, match=r"BackupStorageLocation default: cannot read credentials file /no/such/file \(config"
    ):
        _keys({"credentialsFile": "/no/such/file"}, {}, None)


def test_a_role_in_a_profile_is_assumed_by_its_token_and_hides_inherited_keys() -> None:
    text = "[default]\nrole_arn=arn\nweb_identity_token_file=/token\nrole_session_name=us\nregion=eu-west-1\n"
    role = parse_aws_profile(CredentialsText(text, "file"))
    assert role == AwsRole("arn", "/token", "us", "eu-west-1")
    assert role.variables == {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_SESSION_TOKEN": "",
        "AWS_ROLE_ARN": "arn",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/token",
        "AWS_ROLE_SESSION_NAME": "us",
        "AWS_REGION": "eu-west-1",
    }


@pytest.mark.parametrize(
    "lines",
    [
        "role_arn=arn\nsource_profile=other\naws_access_key_id=K\naws_secret_access_key=TOPSECRET",
        "credential_process=/bin/keys TOPSECRET",
        "role_arn=arn\ncredential_source=Ec2InstanceMetadata",
    ],
    ids=["another profile", "a program", "the instance"],
)
def test_sources_of_keys_that_kopia_does_not_support_are_rejected(lines: str) -> None:
    """The keys without their role would be wrong."""
    with pytest.raises(
        RepositoryError, match="not supported by kopia, which needs keys, or role_arn with web_identity_token_file"
    ) as rejected:
        parse_aws_profile(CredentialsText(f"[default]\n{lines}\n", "file"))
    assert "TOPSECRET" not in str(rejected.value)
