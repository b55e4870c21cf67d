"""The credentials that reach a storage: from the location's own Secret, an inherited file, or the environment.

Knows the forms of the files (AWS: INI with profiles; Azure: `NAME=value` lines; Google: JSON).
Does not know kopia's flags, or how a Secret is read.
Source: Velero v1.18, internal/credentials and pkg/repository/config.
"""

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import RepositoryError

__all__ = ["AwsKeys", "CredentialsText", "parse_aws_keys", "parse_variables", "read_inherited"]

_DEFAULT_PROFILE: Final = "default"


@dataclass(frozen=True)
class CredentialsText:
    """What a credentials file says, and where it was found, for messages."""

    text: str = field(repr=False)
    origin: str


@dataclass(frozen=True)
class AwsKeys:
    """Keys of an S3 user; the token is empty where the keys are permanent."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def read_inherited(environment: Mapping[str, str], variable: str) -> CredentialsText | None:
    """Return the file that `variable` names; None where there is none.

    A variable that names no file is usual: the peer's installer sets all three of them
    whatever the provider is.

    Raises:
        RepositoryError: the file is there but cannot be read.
    """
    path = Path(environment.get(variable, ""))
    if not environment.get(variable) or not path.is_file():
        return None
    try:
        return CredentialsText(path.read_text(), f"file {path}")
    except (OSError, UnicodeDecodeError) as e:
        raise RepositoryError(f"credentials file {path} ({variable}) cannot be read: {e}") from e


def parse_aws_keys(source: CredentialsText, profile: str = "") -> AwsKeys:
    """Return the keys under `profile` (by default the profile `default`).

    Raises:
        RepositoryError: the file has no such profile, or the profile no keys.
    """
    wanted = profile or _DEFAULT_PROFILE
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        parser.read_string(source.text)
    except configparser.Error:
        # The parser's own message quotes the line, which may hold a secret.
        raise RepositoryError(
            f"{source.origin} is no AWS credentials file: sections and `name = value` lines"
        ) from None
    # As AWS's config file spells it: [profile name].
    section = next((name for name in (wanted, f"profile {wanted}") if parser.has_section(name)), None)
    if section is None:
        found = ", ".join(parser.sections()) or "none"
        raise RepositoryError(f"{source.origin} has no profile {wanted!r}; its profiles are: {found}")
    keys = {name: value.strip().strip("\"'") for name, value in parser.items(section)}
    access, secret = keys.get("aws_access_key_id", ""), keys.get("aws_secret_access_key", "")
    if not access or not secret:
        raise RepositoryError(f"{source.origin}: profile {wanted!r} lacks aws_access_key_id or aws_secret_access_key")
    return AwsKeys(access, secret, keys.get("aws_session_token", ""))


def parse_variables(source: CredentialsText) -> dict[str, str]:
    """Return the `NAME=value` lines of a file; comments and blank lines are skipped."""
    pairs = {}
    for line in source.text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            pairs[name.strip()] = value.strip().strip("\"'")
    return pairs
