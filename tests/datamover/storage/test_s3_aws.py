"""Profiles of AWS: keys, roles, and what kopia cannot use."""

import pytest

from core.errors import RepositoryError
from datamover.storage.providers import CredentialsText
from datamover.storage.s3 import AwsAssumedRole, AwsIdentity, AwsKeys, AwsRole, find_aws_identity, parse_aws_profile

_ROLE = "role_arn=arn\nsource_profile=user\n"
_USER = "[profile user]\naws_access_key_id=KEYID\naws_secret_access_key=TOPSECRET\n"
_USERS_KEYS = AwsKeys("KEYID", "TOPSECRET")


def _parse(text: str) -> AwsIdentity | None:
    return parse_aws_profile(CredentialsText(text, "Secret velero/cloud"))


_ONE = "aws_access_key_id=KEYID\naws_secret_access_key=TOP#SECRET\n"


@pytest.mark.parametrize(
    "text",
    [
        "  [default]\n  aws_access_key_id = KEYID # ours\n  aws_secret_access_key = 'TOP#SECRET' ; theirs\n",
        f"; note\n[profile default]\n{_ONE}".replace("\n", "\r\n"),
        f"[default]\ns3 =\n  addressing_style = path\n{_ONE}",
        f"[ default ]\n{_ONE}",
        "[default]\naws_access_key_id=KEYID\n  aws_secret_access_key=TOP#SECRET\n",
        f"region=eu-west-1\n[default]\nkeys\n{_ONE}",
        f'[default]\n{_ONE}aws_session_token=""\n',
    ],
)
def test_a_file_is_parsed_as_by_aws(text: str) -> None:
    assert _parse(text) == AwsKeys("KEYID", "TOP#SECRET")


@pytest.mark.parametrize(
    ("written", "secret"),
    [
        ("it's'", "it's'"),
        ("\"it's'\"", "it's'"),
        ("'\"'", '"'),
        ('"', '"'),
        ('" blanks "', " blanks "),
        ("in\\side = it", "in\\side = it"),
    ],
)
def test_a_secret_has_the_quotes_that_are_not_around_it(written: str, secret: str) -> None:
    text = f"[default]\naws_access_key_id = KEYID\naws_secret_access_key = {written}\n"
    assert _parse(text) == AwsKeys("KEYID", secret)


_ODD = "aws_secret_access_key has the character U"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no file of this kind: TOPSECRET", 'no profile "default" .profiles: none'),
        ("[default]\naws_access_key_id=KEYID\n", "aws_access_key_id or aws_secret_access_key is missing"),
        ("", 'no profile "default" .profiles: none'),
        # What an editor makes of a key.
        *(
            (f"[default]\naws_access_key_id = KEYID\naws_secret_access_key = {odd}\n", rf"{_ODD}\+[0-9A-F]{{4}}")
            for odd in ("“TOPSECRET”", "TOP\n SECRET", "TOP\u200bSECRET", "TOP\xa0SECRET")
        ),
    ],
)
def test_an_invalid_file_is_rejected_without_quoting_it(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=f"^Secret velero/cloud: .*{message}") as rejected:
        _parse(text)
    assert "SECRET" not in str(rejected.value).replace("Secret velero", "")
    assert rejected.value.__context__ is None or rejected.value.__suppress_context__


def test_a_role_in_a_profile_is_assumed_by_its_token_and_hides_inherited_keys() -> None:
    text = "[default]\nrole_arn=arn\nweb_identity_token_file=/token\nrole_session_name=us\nregion=eu-west-1\n"
    role = _parse(text)
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


_SELF = "source_profile=default\naws_access_key_id=KEYID\naws_secret_access_key=TOPSECRET"


@pytest.mark.parametrize(
    ("text", "role"),
    [
        (f"{_ROLE}{_USER}", AwsAssumedRole("arn", _USERS_KEYS, "user")),
        (
            f"{_ROLE}role_session_name=us\nregion=eu-west-1\n{_USER}region=us-east-2",
            AwsAssumedRole("arn", _USERS_KEYS, "user", "us", "eu-west-1"),
        ),
        (
            f"{_ROLE}{_USER}aws_session_token=TOKEN",
            AwsAssumedRole("arn", AwsKeys("KEYID", "TOPSECRET", "TOKEN"), "user"),
        ),
        (f"role_arn=arn\n{_SELF}", AwsAssumedRole("arn", _USERS_KEYS, "default")),
    ],
    ids=["by default", "session and region", "temporary keys", "itself"],
)
def test_a_role_is_assumed_with_the_keys_of_its_source_profile(text: str, role: AwsAssumedRole) -> None:
    assert _parse(f"[default]\n{text}\n") == role
    assert "TOPSECRET" not in repr(role)


@pytest.mark.parametrize(
    ("region", "endpoint", "signed_for"),
    [
        ("", "https://sts.amazonaws.com", "us-east-1"),
        ("eu-west-1", "https://sts.eu-west-1.amazonaws.com", "eu-west-1"),
        ("cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn", "cn-north-1"),
    ],
)
def test_the_token_service_is_that_of_the_region(region: str, endpoint: str, signed_for: str) -> None:
    source = CredentialsText(f"[default]\n{_ROLE}{_USER}", "file")
    role = find_aws_identity(source, {}, region=region)
    assert isinstance(role, AwsAssumedRole)
    assert (role.config["roleEndpoint"], role.config["roleRegion"]) == (endpoint, signed_for)
    assert set(role.variables.values()) == {""}


@pytest.mark.parametrize("region", ["evil.example/", "a@evil.example", "a.b", "a#", "a:1"])
@pytest.mark.parametrize("text", [f"[default]\n{_ROLE}{_USER}", ""], ids=["with keys", "with the pod's token"])
def test_a_region_that_leads_to_another_host_is_rejected(region: str, text: str) -> None:
    """Its token service would get the token of the pod."""
    source = CredentialsText(text, "file") if text else None
    environment = {"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
    for given in ({"AWS_REGION": region}, {}):
        with pytest.raises(RepositoryError, match="region of role arn: not the name of a region"):
            find_aws_identity(source, environment | given, region=region)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("credential_process=/bin/keys TOPSECRET", "credential_process: not supported by kopia, which needs keys, or"),
        ("role_arn=arn\ncredential_source=Ec2InstanceMetadata", "role_arn and credential_source: not supported"),
        ("role_arn=arn", "role_arn: not supported by kopia, which needs keys, or role_arn with source_profile or"),
        ("source_profile=user\naws_access_key_id=K\naws_secret_access_key=TOPSECRET", "source_profile: not supported"),
        (f"{_ROLE}external_id=TOPSECRET", "external_id: not supported by kopia, which assumes one role, with the keys"),
        (f"{_ROLE}mfa_serial=arn", "mfa_serial: not supported"),
        (f"{_ROLE}credential_process=/bin/keys", "credential_process: not supported"),
        ("role_arn=arn\nsource_profile=none", 'no profile "none" .profiles: default, '),
        ("role_arn=arn\nsource_profile=empty", 'source_profile "empty": it has no aws_access_key_id and'),
        ("role_arn=arn\nsource_profile=half", 'profile "half": aws_access_key_id or aws_secret_access_key is missing'),
        ("role_arn=arn\nsource_profile=chain", 'source_profile "chain": role_arn and source_profile: not supported'),
        ("role_arn=arn\nsource_profile=irsa", "role_arn and web_identity_token_file: not supported by kopia, which a"),
        ("role_arn=arn\nsource_profile=run", 'source_profile "run": credential_process: not supported by kopia, which'),
    ],
)
def test_what_kopia_cannot_use_is_rejected_without_quoting_secrets(lines: str, message: str) -> None:
    """Keys without their role would be wrong, and a program is never run for a writer of a Secret."""
    others = (
        f"[empty]\nregion=eu-west-1\n[half]\naws_access_key_id=K\n[chain]\n{_ROLE}"
        "[irsa]\nrole_arn=arn\nweb_identity_token_file=/token\n[run]\ncredential_process=/bin/keys TOPSECRET\n"
    )
    with pytest.raises(RepositoryError, match="Secret velero/cloud: .*" + message) as rejected:
        _parse(f"[default]\n{lines}\n{_USER}{others}")
    assert "TOPSECRET" not in str(rejected.value)
