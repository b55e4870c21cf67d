"""What every storage of kopia repositories is, with its credentials, and two: Google Cloud Storage, and a directory.

Credentials are from the location's own Secret, an inherited file, or the environment. Secrets are passed in the
environment or a file of mode 0600, never as arguments.
Source: kopia 0.23.1, cli/storage_*.go, repo/blob/*; Velero v1.18, internal/credentials and pkg/repository/config.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from core.clock import Clock
from core.errors import ConfigError, RepositoryError, Translated
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir, attempting

GOOGLE_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
"""The variable that names the credentials file of Google's library."""

TEXT: Final = "utf-8-sig"
"""The encoding of credentials: an editor of Windows may have put a mark before them, which no cloud's library skips."""

AZURE_AUTHORITY: Final = "https://login.microsoftonline.com/"
"""Where identities of the public cloud sign in."""

AZURE_METADATA: Final = "http://169.254.169.254"
"""The instance metadata service of every virtual machine of Azure."""

_VARIABLE: Final = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][\w.]*)[ \t]*[=:][ \t]*"""
    r"""(?P<value>(?:"[^"\r\n]*"|'[^'\r\n]*'|[^"'#\r\n])*(?=#|\r?$)"""
    r"""|(?:"(?:[^"\\]|\\.)*"|'[^']*')(?=[ \t]*\r?$)|[^\r\n]*)""",
    re.MULTILINE,
)


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
    """Return the file that `variable` names, or None. Raises RepositoryError if it exists but cannot be read.

    Velero's installer sets all three of them for any provider, so a name without a file is common.
    """
    path = environment.get(variable, "")
    return read_credentials(path, variable) if path and Path(path).is_file() else None


def read_credentials(path: str, named_by: str) -> CredentialsText:
    """Return the content of the file. Raises RepositoryError if it cannot be read."""
    with Translated(
        (OSError, UnicodeDecodeError), RepositoryError, f"cannot read credentials file {path} ({named_by})"
    ):
        return CredentialsText(Path(path).read_text(TEXT), f"file {path}")


def parse_variables(source: CredentialsText) -> dict[str, str]:
    """Return the variables in the `NAME=value` lines of a file, with comments and quoting as Velero reads them.

    A value in quotes may have several lines. Source: Velero v1.18.3, pkg/util/dotenv.
    """
    return {found["name"]: _unquote(found["value"].strip()) for found in _VARIABLE.finditer(source.text)}


def _unquote(value: str) -> str:
    inner = strip_quotes(value)
    if inner != value and value[0] == '"':
        for escape, meant in (("\\n", "\n"), ("\\r", "\r"), ("\\\\", "\\"), ('\\"', '"')):
            inner = inner.replace(escape, meant)
    return inner


def strip_quotes(value: str) -> str:
    """Return the value of a setting without quotes at both ends."""
    quoted = len(value) >= len("''") and value[0] in "\"'" and value[0] == value[-1]
    return value[1:-1] if quoted else value


def google_token_file(source: CredentialsText) -> str | None:
    """Return the file with a token that a credentials file of Google names; None: it names none.

    Raises:
        RepositoryError: it is no such file, or it names what a confined kopia cannot use.

    Source: cloud.google.com/go/auth 0.20, credentials/filetypes.go and internal/credsfile/filetype.go.
    """
    try:
        document = json.loads(source.text)
        document = document.get("source_credentials", document)
        origin = document.get("credential_source") or {}
        file = origin.get("file") or None
        unsupported = [name for name in ("executable", "certificate") if origin.get(name)]
    except (ValueError, RecursionError, AttributeError):
        # The parser's own message may quote a secret.
        raise RepositoryError(f"{source.origin}: invalid Google credentials file: it must be a JSON object") from None
    if unsupported:
        raise RepositoryError(
            f"{source.origin}: credential_source.{unsupported[0]}: not supported by the data mover, which needs a "
            "key, or credential_source with file or url"
        )
    if file is not None and not (isinstance(file, str) and Path(file).is_absolute()):
        raise RepositoryError(f"{source.origin}: credential_source.file: must be an absolute path")
    return file


_PROBE_PREFIX: Final = "no-repository-here/"
"""Below the prefix of a repository; no repository is ever created there."""

SECRET_VARIABLES: Final = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SECRET_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AZURE_STORAGE_KEY",
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE",
    "AZURE_STORAGE_SAS_TOKEN",
)


@dataclass(frozen=True)
class KopiaAccess:
    """Arguments after `repository connect`, variables of every call, and secrets in files that arguments name."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    in_files: tuple[str, ...] = field(default=(), repr=False)

    def secrets(self, inherited: Mapping[str, str]) -> list[str]:
        """Return the secret values, including the inherited environment's."""
        variables = {**inherited, **self.environment}
        return [*(variables[name] for name in SECRET_VARIABLES if variables.get(name)), *self.in_files]


class Storage(ABC):
    """The storage of one repository."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The name of the storage in messages."""

    @abstractmethod
    def access(self, work_dir: WorkDir) -> KopiaAccess:
        """Return kopia's access to it; required files are written to `work_dir`."""

    @abstractmethod
    def for_probe(self) -> Self:
        """Return a path in the same storage with the same access, and without a repository."""

    async def with_fetched_credentials(self, clock: Clock, redactor: Redactor) -> Self:  # noqa: ARG002 - most need none
        """Return it with credentials that kopia cannot get itself; `redactor` learns them. Raises RepositoryError."""
        return self

    def config(self) -> JsonDict | None:
        """Return the `storage` object that `repository connect` would write; None if it is unknown."""
        return None

    def for_bucket_check(self) -> Self | None:
        """Return a view of it by which `repository connect` checks that the bucket exists; None: it does so anyway."""
        return None

    @property
    def credentials_origin(self) -> str | None:
        """The origin of its credentials, for the message that access is denied; None: the location."""
        return None

    @property
    def needs_pod(self) -> bool:
        """Whether access depends on the pod, by its identity or a volume of its own, and not on keys alone."""
        return False


@dataclass(frozen=True)
class FileStorage(Storage):
    """A directory; it is created if it does not exist, but only below `root`, if there is one."""

    path: Path
    root: Path | None = None

    @property
    def description(self) -> str:
        """The path of the directory."""
        return str(self.path)

    def config(self) -> JsonDict:
        """Return the directory and its modes."""
        return {"type": "filesystem", "config": {"path": str(self.path), "fileMode": 0o600, "dirMode": 0o700}}

    def for_probe(self) -> Self:
        """Return the parent directory."""
        return replace(self, path=self.path.parent)

    def access(self, work_dir: WorkDir) -> KopiaAccess:  # noqa: ARG002 - a directory needs no files
        """Return kopia's arguments; files and directories are accessible to this user only, as with Velero."""
        return KopiaAccess(["filesystem", f"--path={self.path}", "--file-mode=0600", "--dir-mode=0700"])

    @property
    def needs_pod(self) -> bool:
        """True: movers have the directory, with the account that may read it."""
        return True

    def check_root(self) -> None:
        """Check that the root can be read, if there is one. Raises ConfigError otherwise: a volume is not mounted."""
        if self.root is not None:
            with attempting(f"read directory {self.root}", ConfigError):
                os.scandir(self.root).close()

    def list_folders(self) -> list[str]:
        """Return the names of the folders in the directory, ordered, or none; raises ConfigError."""
        with attempting(f"read directory {self.path}", ConfigError), suppress(FileNotFoundError):
            return sorted(one.name for one in os.scandir(self.path) if one.is_dir())
        return []

    def prepare_creation(self) -> Path:
        """Create and return the directory. Raises ConfigError if it cannot be created, or its root is not mounted."""
        self.check_root()
        with attempting(f"create repository directory {self.path}", ConfigError):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.path


@dataclass(frozen=True)
class BucketStorage(Storage):
    """A prefix in a bucket, or in a container of Azure."""

    bucket: str
    prefix: str

    def for_probe(self) -> Self:
        """Return a prefix below this one, without a repository."""
        return replace(self, prefix=f"{self.prefix}{_PROBE_PREFIX}")


@dataclass(frozen=True)
class GcsStorage(BucketStorage):
    """A prefix in a Google bucket; without `credentials`, kopia uses the instance's identity."""

    credentials: str = field(default="", repr=False)
    ca_pem: bytes = b""

    @property
    def description(self) -> str:
        """`gs://bucket/prefix`."""
        return f"gs://{self.bucket}/{self.prefix}"

    @property
    def needs_pod(self) -> bool:
        """Whether there is no key of a service account."""
        return not self._has_key

    @property
    def _has_key(self) -> bool:
        # It may also be within credentials of another type.
        return bool(self.credentials) and json.loads(self.credentials).get("type") == "service_account"

    def access(self, work_dir: WorkDir) -> KopiaAccess:
        """Return kopia's arguments; credentials are in a file, for kopia's flag or, of other types, Google's library.

        Source: kopia 0.23.1, repo/blob/gcs/gcs_storage.go.
        """
        arguments = ["gcs", f"--bucket={self.bucket}", f"--prefix={self.prefix}"]
        trust = trust_variables(work_dir, self.ca_pem)
        if not self.credentials:
            # Google's library would fail if the inherited variable names no file.
            return KopiaAccess(arguments, {**trust, GOOGLE_FILE: ""})
        file = str(work_dir.write("google.json", self.credentials.encode()))
        if self._has_key:
            return KopiaAccess([*arguments, f"--credentials-file={file}"], trust)
        return KopiaAccess(arguments, {**trust, GOOGLE_FILE: file})


def trust_variables(work_dir: WorkDir, ca_pem: bytes) -> dict[str, str]:
    """Return the variable that makes Go trust `ca_pem` in addition to the system's authorities."""
    return {"SSL_CERT_FILE": str(work_dir.write("ca.pem", ca_pem))} if ca_pem else {}
