"""The credentials for a storage: from the location's own Secret, an inherited file, or the environment.

Knows the formats of the files (AWS: INI with profiles; Azure: `NAME=value` lines; Google: JSON).
Does not know kopia's flags, or how a Secret is read.
Source: Velero v1.18, internal/credentials and pkg/repository/config; for the variables that kopia
reads by itself: minio-go 7, pkg/credentials/env_aws.go and iam_aws.go.
"""

import configparser
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from core.errors import RepositoryError
from core.models.base import JsonDict

__all__ = [
    "AZURE_METADATA",
    "GOOGLE_FILE",
    "AwsKeys",
    "AwsRole",
    "AzureAccountKey",
    "AzureIdentity",
    "CredentialsText",
    "environment_keys",
    "find_aws_identity",
    "google_token_file",
    "own_token_files",
    "parse_aws_profile",
    "parse_variables",
    "read_credentials",
    "read_inherited",
]

GOOGLE_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
"""The variable that names the credentials file of Google's library."""

AZURE_METADATA: Final = "http://169.254.169.254"
"""The instance metadata service of every virtual machine of Azure."""

_DEFAULT_PROFILE: Final = "default"
_ROLE: Final = "AWS_ROLE_ARN"
_ROLE_FILE: Final = "AWS_WEB_IDENTITY_TOKEN_FILE"

_UNSUPPORTED: Final = ("role_arn", "source_profile", "credential_source", "credential_process", "sso_session")
"""Keys of a profile with a source of credentials that kopia does not support, except a role with a token file."""


_VARIABLE: Final = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][\w.]*)[ \t]*[=:][ \t]*"""
    r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>[^\r\n]*))""",
    re.MULTILINE,
)
_COMMENT: Final = re.compile(r"(?:^|\s)#")

_OWN_CREDENTIALS: Final = ("accessKeyID", "storageKey", "sasToken", "ClientSecret", "clientCertificate", "credentials")
"""Secrets in the configuration of a storage, which take precedence over a token file."""

_TOKEN_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    "azureBlob": ("AZURE_FEDERATED_TOKEN_FILE",),
    "gcs": (GOOGLE_FILE,),
}
"""Variables that name such a file, keyed by kopia's type of storage."""


@dataclass(frozen=True)
class CredentialsText:
    """The content of a credentials file, and its origin for messages."""

    text: str = field(repr=False)
    origin: str


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
    def origin(self) -> str:
        """The origin to name if access is denied; empty: the location names it."""
        return ""


@dataclass(frozen=True)
class AwsRole:
    """A role that kopia assumes with the token in a file, again before its keys expire."""

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
    def origin(self) -> str:
        """The origin to name if access is denied: kopia continues without keys if it cannot assume a role."""
        return f"keys of role {self.arn}, if the token in {self.token_file} is allowed to assume it"


@dataclass(frozen=True)
class AzureIdentity:
    """Who asks: a client with a secret or a federated token; with neither, the managed identity of pod or node."""

    authority: str
    tenant: str = ""
    client: str = ""
    secret: str = field(default="", repr=False)
    token_file: str = ""
    metadata: str = AZURE_METADATA

    @property
    def description(self) -> str:
        """Its name in messages."""
        if self.secret or self.token_file:
            return f"client {self.client}"
        return f"managed identity {self.client}" if self.client else "the managed identity of this pod or its node"


@dataclass(frozen=True)
class AzureAccountKey:
    """A storage account whose key is wanted, where its management answers, and who asks."""

    account: str
    subscription: str
    group: str
    management: str
    audience: str
    identity: AzureIdentity
    ca_pem: bytes = b""


def read_inherited(environment: Mapping[str, str], variable: str) -> CredentialsText | None:
    """Return the file that `variable` names; None if there is none.

    A variable that names no file is common: Velero's installer sets all three of them for any
    provider.

    Raises:
        RepositoryError: the file exists but cannot be read.
    """
    path = environment.get(variable, "")
    return read_credentials(path, variable) if path and Path(path).is_file() else None


def read_credentials(path: str, named_by: str) -> CredentialsText:
    """Return the content of the file.

    Raises:
        RepositoryError: it cannot be read.
    """
    try:
        return CredentialsText(Path(path).read_text(), f"file {path}")
    except (OSError, UnicodeDecodeError) as e:
        raise RepositoryError(f"cannot read credentials file {path} ({named_by}): {e}") from e


def find_aws_identity(
    source: CredentialsText | None, environment: Mapping[str, str], *, profile: str = "", region: str = ""
) -> AwsKeys | AwsRole | None:
    """Return the keys or the role to use; None to let kopia use its environment, then the identity of pod or node.

    Args:
        source: the credentials file, if there is one.
        environment: of this process; contains the role of a pod's service account.
        profile: of the file; by default the one that the environment names.
        region: the default region in which a role is assumed; empty: AWS's global endpoint.

    Raises:
        RepositoryError: the file has no such profile, or kopia does not support its content.
    """
    found: AwsKeys | AwsRole | None = None
    if source is not None:
        found = parse_aws_profile(source, profile or environment.get("AWS_PROFILE", ""))
    found = found or _inherited_role(environment)
    if isinstance(found, AwsRole) and not found.region:
        return replace(found, region=environment.get("AWS_REGION", "") or region)
    return found


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


def parse_aws_profile(source: CredentialsText, profile: str = "") -> AwsKeys | AwsRole | None:
    """Return the keys or the role of `profile` (by default `default`); None if it has neither.

    Raises:
        RepositoryError: the file has no such profile, or kopia does not support its content.
    """
    wanted = profile or _DEFAULT_PROFILE
    values = _profile(source, wanted)
    access, secret = values.get("aws_access_key_id", ""), values.get("aws_secret_access_key", "")
    role, token_file = values.get("role_arn", ""), values.get("web_identity_token_file", "")
    if role and token_file:
        return AwsRole(role, token_file, values.get("role_session_name", ""), values.get("region", ""))
    if unsupported := [name for name in _UNSUPPORTED if values.get(name)]:
        raise RepositoryError(
            f'{source.origin}: profile "{wanted}": {" and ".join(unsupported)}: not supported by kopia, '
            "which needs keys, or role_arn with web_identity_token_file"
        )
    if bool(access) != bool(secret):
        raise RepositoryError(
            f'{source.origin}: profile "{wanted}": aws_access_key_id or aws_secret_access_key is missing'
        )
    return AwsKeys(access, secret, values.get("aws_session_token", "")) if access else None


def _profile(source: CredentialsText, wanted: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, default_section="", inline_comment_prefixes=("#", ";"))
    try:
        parser.read_string(source.text.removeprefix("\ufeff"))
    except configparser.Error:
        # The parser's own message quotes the line, which may contain a secret.
        raise RepositoryError(
            f"{source.origin}: invalid AWS credentials file: it must have sections and `name = value` lines"
        ) from None
    # AWS's config file has sections like [profile name].
    section = next((name for name in (wanted, f"profile {wanted}") if parser.has_section(name)), None)
    if section is None:
        found = ", ".join(parser.sections()) or "none"
        raise RepositoryError(f'{source.origin}: no profile "{wanted}" (profiles: {found})')
    return {name: value.strip().strip("\"'") for name, value in parser.items(section)}


def parse_variables(source: CredentialsText) -> dict[str, str]:
    """Return the variables in the `NAME=value` lines of a file, with comments and quoting as Velero reads them."""
    return {found["name"]: _value(found) for found in _VARIABLE.finditer(source.text)}


def _value(found: re.Match[str]) -> str:
    if found["double"] is not None:
        return found["double"].replace("\\n", "\n")
    if found["single"] is not None:
        return found["single"]
    return _COMMENT.split(found["plain"], maxsplit=1)[0].strip()


def google_token_file(source: CredentialsText) -> str:
    """Return the file with a token that a credentials file of Google names; empty: it names none.

    Raises:
        RepositoryError: it is no such file, or it names what a confined kopia cannot use.

    Source: cloud.google.com/go/auth 0.20, credentials/filetypes.go and internal/credsfile/filetype.go.
    """
    try:
        document = json.loads(source.text)
        document = document.get("source_credentials", document)
        origin = document.get("credential_source") or {}
        file = origin.get("file") or ""
        unsupported = [name for name in ("executable", "certificate") if origin.get(name)]
    except (ValueError, RecursionError, AttributeError):
        # The parser's own message may quote a secret.
        raise RepositoryError(f"{source.origin}: invalid Google credentials file: it must be a JSON object") from None
    if unsupported:
        raise RepositoryError(
            f"{source.origin}: credential_source.{unsupported[0]}: not supported by the data mover, which needs a "
            "key, or credential_source with file or url"
        )
    if not isinstance(file, str) or (file and not Path(file).is_absolute()):
        raise RepositoryError(f"{source.origin}: credential_source.file: must be an absolute path")
    return file


def own_token_files(storage: JsonDict, environment: Mapping[str, str]) -> list[str]:
    """Return the files with a token or keys that kopia's library opens by itself, again and again.

    Args:
        storage: the `storage` object of kopia's configuration, with the keys that it has.

    Raises:
        RepositoryError: a credentials file of Google cannot be read.

    Source: minio-go 7, pkg/credentials/iam_aws.go; kopia 0.23.1, repo/blob/azure/azure_storage.go and
    gcs/gcs_storage.go.
    """
    config = storage["config"]
    if any(config.get(key) for key in _OWN_CREDENTIALS):
        return []
    named = [environment.get(name, "") for name in _TOKEN_FILES.get(storage["type"], ())]
    if storage["type"] == "gcs" and (google := read_inherited(environment, GOOGLE_FILE)):
        named.append(google_token_file(google))
    return [file for file in named if Path(file).is_file()]
