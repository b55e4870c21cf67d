"""The storage of kopia repositories in S3, or a service compatible with it, and the identities that AWS knows.

Source: Velero v1.18, pkg/repository/config/aws.go; AWS SDKs, settings of shared files; kopia 0.23.1, cli/storage_s3.go,
repo/blob/s3; for what kopia does by itself: minio-go 7.2, pkg/credentials/env_aws.go, iam_aws.go and assume_role.go.
"""

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import ClassVar, Final, Self

from core.errors import ConfigError, RepositoryError
from core.models.base import JsonDict
from core.models.storage import parse_endpoint
from datamover.runtime.work_dir import WorkDir
from datamover.storage.providers import BucketStorage, CredentialsText, KopiaAccess, strip_quotes, trust_variables

_DEFAULT_PROFILE: Final = "default"
_ROLE: Final = "AWS_ROLE_ARN"
_ROLE_FILE: Final = "AWS_WEB_IDENTITY_TOKEN_FILE"

DEFAULT_SESSION: Final = "node-agent"
"""The default name of the sessions of a role, which AWS's log of requests shows."""

_GLOBAL_REGION: Final = "us-east-1"
"""The region for which requests to the global endpoint are signed."""

_REGION: Final = re.compile(r"[A-Za-z0-9-]*")
"""A part of the host name of AWS's token service: with any other character, tokens could be sent to another host."""

_UNSUPPORTED: Final = ("role_arn", "source_profile", "credential_source", "credential_process", "sso_session")
"""Keys of a profile with a source of credentials that kopia does not support, except the roles below."""

_OF_ROLE: Final = ("external_id", "mfa_serial")
"""What kopia cannot pass on when it assumes a role. Source: kopia 0.23.1, repo/blob/s3/s3_options.go."""

_KEYS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_NO_KEY: Final = re.compile("[\\x00-\\x1f\\x7f-\\xa0\\xad\\u2000-\\u206f\\ufeff\\ufffd]")
"""What editors and web pages put into a key that is copied: the storage would only say that its signature is wrong."""

_COMMENT: Final = re.compile(r"[ \t][#;]")
_SECTION: Final = re.compile(r"\[(.*?)\](?:[#;].*)?")
_VALUE: Final = re.compile(r"([^=:]*)[=:](.*)", re.DOTALL)

_NEEDED: Final = "which needs keys, or role_arn with source_profile or web_identity_token_file"
_ONE_ROLE: Final = "which assumes one role, with the keys of a user"


@dataclass(frozen=True)
class AwsKeys:
    """Keys of an S3 user; the token is empty for permanent keys."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that make kopia use them."""
        # An empty token too: an inherited one belongs to other keys.
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.session_token,
        }

    @property
    def config(self) -> dict[str, str]:
        """The keys of kopia's configuration that make it use them."""
        return {"accessKeyID": self.access_key, "secretAccessKey": self.secret_key, "sessionToken": self.session_token}

    origin: ClassVar[None] = None
    """The origin to name if access is denied; None: the location names it."""


@dataclass(frozen=True)
class AwsRole:
    """A role that is assumed with the token in a file, again before its keys expire."""

    arn: str
    token_file: str
    session_name: str = ""
    region: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The variables that make kopia assume it; inherited keys would take precedence."""
        wanted = {_ROLE: self.arn, _ROLE_FILE: self.token_file, "AWS_ROLE_SESSION_NAME": self.session_name}
        region = {"AWS_REGION": self.region} if self.region else {}
        return {**AwsKeys("", "").variables, **wanted, **region}

    @property
    def origin(self) -> str | None:
        """The origin to name if access is denied: kopia continues without keys if it cannot assume a role."""
        return f"keys of role {self.arn}, if the token in {self.token_file} is allowed to assume it"


@dataclass(frozen=True)
class AwsAssumedRole:
    """A role that kopia assumes with the keys of a user, again before its own keys expire."""

    arn: str
    keys: AwsKeys
    profile: str
    session_name: str = DEFAULT_SESSION
    region: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The variables of kopia's processes: no inherited keys. The role is in its configuration."""
        return AwsKeys("", "").variables

    @property
    def config(self) -> dict[str, str]:
        """The keys of kopia's configuration that make it assume the role.

        Source: kopia 0.23.1, repo/blob/s3/s3_options.go.
        """
        return {
            **self.keys.config,
            "roleARN": self.arn,
            "sessionName": self.session_name,
            "roleEndpoint": token_service(self.region),
            "roleRegion": self.region or _GLOBAL_REGION,
        }

    @property
    def origin(self) -> str | None:
        """The origin to name if access is denied, by AWS's token service or by the bucket."""
        return f'keys of role {self.arn}, if the keys of profile "{self.profile}" are allowed to assume it'


AwsIdentity = AwsKeys | AwsRole | AwsAssumedRole
"""Who asks for a bucket."""


def find_aws_identity(
    source: CredentialsText | None, environment: Mapping[str, str], *, profile: str = "", region: str = ""
) -> AwsIdentity | None:
    """Return the keys or the role to use; None to let kopia use its environment, then the identity of pod or node.

    Args:
        source: the credentials file, if there is one.
        environment: of this process; contains the role of a pod's service account.
        profile: of the file; by default the one that the environment names.
        region: the default region in which a role is assumed; "": AWS's global endpoint.

    Raises:
        RepositoryError: there is no such profile, kopia does not support its content, or the region of a role is none.
    """
    found: AwsIdentity | None = None
    if source is not None:
        found = parse_aws_profile(source, profile or environment.get("AWS_PROFILE", ""))
    found = found or _inherited_role(environment)
    if not isinstance(found, AwsRole | AwsAssumedRole):
        return found
    role = replace(found, region=found.region or environment.get("AWS_REGION", "") or region)
    if not _REGION.fullmatch(role.region):
        raise RepositoryError(f'region of role {role.arn}: not the name of a region: "{role.region}"')
    return role


def token_service(region: str) -> str:
    """Return the URL of AWS's token service in a region, without one the global URL."""
    host = f"sts.{region}.amazonaws.com" if region else "sts.amazonaws.com"
    return f"https://{host}{'.cn' if region.startswith('cn-') else ''}"


def environment_keys(environment: Mapping[str, str]) -> AwsKeys | None:
    """Return the keys that kopia finds in its environment; None if there are none."""
    access = environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_ACCESS_KEY", "")
    secret = environment.get("AWS_SECRET_ACCESS_KEY") or environment.get("AWS_SECRET_KEY", "")
    return AwsKeys(access, secret, environment.get("AWS_SESSION_TOKEN", "")) if access and secret else None


def _inherited_role(environment: Mapping[str, str]) -> AwsRole | None:
    """Return the role of this pod's service account, if it has one and no keys take precedence."""
    arn, token_file = environment.get(_ROLE, ""), environment.get(_ROLE_FILE, "")
    if not arn or not token_file or environment.get("AWS_ACCESS_KEY_ID"):
        return None
    return AwsRole(arn, token_file, environment.get("AWS_ROLE_SESSION_NAME", ""))


def parse_aws_profile(source: CredentialsText, profile: str = "") -> AwsIdentity | None:
    """Return the keys or the role of `profile` (by default `default`), or None; raises RepositoryError for others."""
    wanted = profile or _DEFAULT_PROFILE
    values = _profile(source, wanted)
    role, token_file = values.get("role_arn", ""), values.get("web_identity_token_file", "")
    if role and token_file:
        return AwsRole(role, token_file, values.get("role_session_name", ""), values.get("region", ""))
    if role and values.get("source_profile"):
        return _assumed_role(source, wanted, values)
    _check_supported(values, _UNSUPPORTED, f'{source.origin}: profile "{wanted}"', _NEEDED)
    return _keys(source, wanted, values)


def _assumed_role(source: CredentialsText, profile: str, values: Mapping[str, str]) -> AwsAssumedRole:
    """Return the role of `profile`, with the keys of its source profile, which may be itself."""
    named, shown = values["source_profile"], f'{source.origin}: profile "{profile}"'
    _check_supported(values, ("credential_source", "credential_process", *_OF_ROLE), shown, _ONE_ROLE)
    shown = f'{shown}: source_profile "{named}"'
    if named == profile:
        keys = _keys(source, named, values)
    else:
        others = _profile(source, named)
        _check_supported(others, (*_UNSUPPORTED, "web_identity_token_file"), shown, _ONE_ROLE)
        keys = _keys(source, named, others)
    if keys is None:
        raise RepositoryError(f"{shown}: it has no aws_access_key_id and aws_secret_access_key")
    session, region = values.get("role_session_name", "") or DEFAULT_SESSION, values.get("region", "")
    return AwsAssumedRole(values["role_arn"], keys, named, session, region)


def _check_supported(values: Mapping[str, str], unsupported: Iterable[str], shown: str, needed: str) -> None:
    """Check that kopia can use a profile. Raises RepositoryError if it has one of the `unsupported` keys."""
    if found := [name for name in unsupported if values.get(name)]:
        raise RepositoryError(f"{shown}: {' and '.join(found)}: not supported by kopia, {needed}")


def _keys(source: CredentialsText, profile: str, values: Mapping[str, str]) -> AwsKeys | None:
    """Return the keys of `profile`; None if it has none."""
    access, secret = values.get("aws_access_key_id", ""), values.get("aws_secret_access_key", "")
    if bool(access) != bool(secret):
        raise RepositoryError(
            f'{source.origin}: profile "{profile}": aws_access_key_id or aws_secret_access_key is missing'
        )
    for name in _KEYS:
        if found := _NO_KEY.search(values.get(name, "")):
            raise RepositoryError(
                f'{source.origin}: profile "{profile}": {name} has the character U+{ord(found[0]):04X}, which is in no '
                "key: write it again without typographic quotes, line breaks and other characters that are not shown"
            )
    return AwsKeys(access, secret, values.get("aws_session_token", "")) if access else None


def _profile(source: CredentialsText, wanted: str) -> dict[str, str]:
    sections = _parse_sections(source.text)
    # AWS's config file has sections like [profile name].
    if (values := sections.get(wanted, sections.get(f"profile {wanted}"))) is None:
        found = ", ".join(sections) or "none"
        raise RepositoryError(f'{source.origin}: no profile "{wanted}" (profiles: {found})')
    return values


def _parse_sections(text: str) -> dict[str, dict[str, str]]:
    """Return the values of each section, without settings below an empty value; other lines are ignored, as by AWS.

    Source: aws-sdk-go-v2, internal/ini/tokenize.go, parse.go and strings.go.
    """
    sections: dict[str, dict[str, str]] = {}
    values: dict[str, str] = {}
    last = ""
    for line in text.split("\n"):
        indented, content = line[:1] in {" ", "\t"}, _COMMENT.split(f" {line}", maxsplit=1)[0].strip()
        if section := _SECTION.fullmatch(content):
            values, last = sections.setdefault(" ".join(section[1].split()), {}), ""
        elif found := _VALUE.fullmatch(content):
            if not indented or values.get(last, "more"):
                last = found[1].strip().lower()
                values[last] = strip_quotes(found[2].strip())
        elif indented and content and values.get(last):
            values[last] += f"\n{content}"
    return sections


_NO_KEYS: Final = "no keys in the location: using the keys of the environment, or of the pod or its node"

_PAST: Final = "2000-01-01T00:00:00Z"


@dataclass(frozen=True)
class S3Storage(BucketStorage):
    """A prefix in a bucket of S3 or a compatible service.

    Without `keys`, kopia uses the keys of its environment, else the identity of the pod or its node.
    `in_past` is a view of the bucket's versions at a time before any repository.
    """

    url: str = ""
    region: str = ""
    keys: AwsIdentity | None = None
    verify_tls: bool = True
    ca_pem: bytes = b""
    in_past: bool = False

    def __post_init__(self) -> None:
        """Reject a role that would be assumed without checking who answers."""
        if isinstance(self.keys, AwsAssumedRole) and not self.verify_tls:
            raise ConfigError(
                "source_profile: not supported without a check of certificates (insecureSkipTLSVerify, "
                "--s3-insecure): kopia would not check the certificate of AWS's token service either; set its authority"
            )

    @property
    def description(self) -> str:
        """`s3://bucket/prefix at endpoint`."""
        return f"s3://{self.bucket}/{self.prefix} at {self.url or self._endpoint}"

    @property
    def _endpoint(self) -> str:
        if self.region.startswith("cn-"):
            return f"s3.{self.region}.amazonaws.com.cn"
        return "s3.amazonaws.com"

    @property
    def _address(self) -> tuple[str, bool]:
        """Host and port, and whether TLS is used."""
        return parse_endpoint(self.url) if self.url else (self._endpoint, True)

    def for_bucket_check(self) -> Self:
        """Return a view of the bucket's versions: kopia mistakes a missing bucket for one without a repository.

        Source: kopia 0.23.1, repo/blob/s3/s3_pit.go and translateError in s3_storage.go.
        """
        return replace(self, in_past=True)

    @property
    def credentials_origin(self) -> str | None:
        """The role, or that the location has no keys."""
        return self.keys.origin if self.keys else _NO_KEYS

    @property
    def needs_pod(self) -> bool:
        """Whether there are no keys, of a user or to assume a role with."""
        return not isinstance(self.keys, AwsKeys | AwsAssumedRole)

    def access(self, work_dir: WorkDir) -> KopiaAccess:
        """Return arguments that name a file with the configuration of this storage, and the keys if it has its own.

        Source: kopia 0.23.1, cli/command_repository_connect_from_config.go, repo/token.go.
        """
        token = urlsafe_b64encode(json.dumps({"version": "1", "storage": self.config()}).encode()).rstrip(b"=")
        file = work_dir.write(f"s3-{sha256(token).hexdigest()[:16]}.token", token)
        variables, secrets = self.keys.variables if self.keys else {}, ("", "")
        if isinstance(self.keys, AwsAssumedRole):
            # An authority in the configuration would be the only one, also for AWS's token service.
            variables |= trust_variables(work_dir, self.ca_pem)
            secrets = (self.keys.keys.secret_key, self.keys.keys.session_token)
        return KopiaAccess(["from-config", f"--token-file={file}"], variables, tuple(filter(None, secrets)))

    def config(self) -> JsonDict:
        """Return the bucket and its endpoint, without keys except a role's, for which kopia has no flags.

        With empty keys, kopia reads its environment on each call, then the instance's identity.
        """
        endpoint, tls = self._address
        role = self.keys.config if isinstance(self.keys, AwsAssumedRole) else {}
        config: JsonDict = {
            "bucket": self.bucket,
            "prefix": self.prefix,
            "endpoint": endpoint,
            "region": self.region,
            **AwsKeys("", "").config,
            **role,
        }
        if not tls:
            config["doNotUseTLS"] = True
        elif not self.verify_tls:
            config["doNotVerifyTLS"] = True
        elif self.ca_pem and not role:
            config["rootCA"] = b64encode(self.ca_pem).decode()
        if self.in_past:
            config["pointInTime"] = _PAST
        return {"type": "s3", "config": config}
