"""The credentials for a storage: from the location's own Secret, an inherited file, or the environment.

Knows the formats of the files of Azure (`NAME=value` lines) and Google (JSON); `datamover.storage.s3` has AWS's.
Does not know kopia's flags, or how a Secret is read.
Source: Velero v1.18, internal/credentials and pkg/repository/config.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import RepositoryError

__all__ = [
    "AZURE_AUTHORITY",
    "AZURE_METADATA",
    "GOOGLE_FILE",
    "AzureAccountKey",
    "AzureIdentity",
    "CredentialsText",
    "google_token_file",
    "parse_variables",
    "read_credentials",
    "read_inherited",
]

GOOGLE_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
"""The variable that names the credentials file of Google's library."""

AZURE_AUTHORITY: Final = "https://login.microsoftonline.com/"
"""Where identities of the public cloud sign in."""

AZURE_METADATA: Final = "http://169.254.169.254"
"""The instance metadata service of every virtual machine of Azure."""

_VARIABLE: Final = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][\w.]*)[ \t]*[=:][ \t]*"""
    r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>[^\r\n]*))""",
    re.MULTILINE,
)
_COMMENT: Final = re.compile(r"(?:^|\s)#")


@dataclass(frozen=True)
class CredentialsText:
    """The content of a credentials file, and its origin for messages."""

    text: str = field(repr=False)
    origin: str


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
