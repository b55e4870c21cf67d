"""Storages that kopia keeps repositories in, each as arguments and environment.

Knows kopia's flags for S3, a folder and Google (`datamover.storage.azure` has Azure's). Secrets go into
the environment or a file of mode 0600, never into the arguments. Does not know
BackupStorageLocations (`datamover.storage.location`) or what is done with a repository.
Source: kopia 0.23.1, cli/storage_*.go, repo/blob/*.
"""

import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from core.errors import ConfigError
from core.models.base import JsonDict
from datamover.runtime.work_dir import WorkFolder
from datamover.storage.credentials import AwsKeys, AwsRole

__all__ = ["NEARBY", "FileStorage", "GcsStorage", "Reach", "S3Storage", "Storage", "parse_endpoint", "trust_variables"]

NEARBY: Final = "no-repository-here/"
"""Below the prefix of a repository, where there is none."""

_NO_KEYS: Final = "the location names no keys: they are those of the environment, or of the pod or its node"

_SERVICE_ACCOUNT: Final = re.compile(r'"type"\s*:\s*"service_account"')

_HIDDEN_VARIABLES: Final = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_KEY",
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE",
    "AZURE_STORAGE_SAS_TOKEN",
)


@dataclass(frozen=True)
class Reach:
    """How kopia reaches a storage: what follows `repository connect`, and variables of every call."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    def secrets(self, inherited: Mapping[str, str]) -> list[str]:
        """Return the values no text may show, those of the inherited environment among them."""
        variables = {**inherited, **self.environment}
        return [variables[name] for name in _HIDDEN_VARIABLES if variables.get(name)]


class Storage(ABC):
    """Where one repository lies."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The place, as messages name it."""

    @abstractmethod
    def reach(self, folder: WorkFolder) -> Reach:
        """Return how kopia reaches it; files it needs are written into `folder`."""

    @abstractmethod
    def nearby(self) -> Self:
        """Return a place in the same storage that is reached likewise, and holds no repository."""

    def config(self) -> JsonDict | None:
        """Return what `repository connect` would write of this storage; None where that is not known here."""
        return None

    @property
    def look(self) -> list[str]:
        """What makes `repository connect` look whether the bucket itself is there; empty: it does so anyway."""
        return []

    @property
    def credentials_origin(self) -> str:
        """Where its credentials come from, for a message that they are refused; empty: from who named the place."""
        return ""

    def prepare_creation(self) -> None:  # noqa: B027 - most storages need nothing
        """Make what must be there before a repository can be created."""


def parse_endpoint(url: str) -> tuple[str, bool]:
    """Return host and port of an S3 URL, and whether it is reached through TLS.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if "@" in parts.netloc:
        # Not quoted: it may hold a password.
        raise ConfigError("an S3 address holds no user and no password: keys come from the credentials")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(f"{url!r} is no S3 address such as https://s3.example.com:9000")
    if parts.path.strip("/"):
        # The peer refuses one too: left out in silence, the data would go elsewhere than meant.
        raise ConfigError(f"{url!r} has a path: an S3 address is a host and a port, and the bucket's prefix is its own")
    return parts.netloc, parts.scheme == "https"


@dataclass(frozen=True)
class S3Storage(Storage):
    """A prefix in a bucket of S3, or of what speaks its protocol.

    Without `keys` kopia takes them from its environment, else from the identity of the pod or its node.
    """

    bucket: str
    prefix: str
    url: str = ""
    region: str = ""
    keys: AwsKeys | AwsRole | None = None
    verify_tls: bool = True
    ca_pem: bytes = b""

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
        """Host and port, and whether they are reached through TLS."""
        return parse_endpoint(self.url) if self.url else (self._endpoint, True)

    @property
    def look(self) -> list[str]:
        """What asks for the bucket's versions: kopia takes a bucket that is not there for one without a repository.

        Source: kopia 0.23.1, repo/blob/s3/s3_pit.go and translateError in s3_storage.go.
        """
        return ["--point-in-time=2000-01-01T00:00:00Z"]

    @property
    def credentials_origin(self) -> str:
        """Which role, or that nobody gave any keys."""
        return self.keys.origin if self.keys else _NO_KEYS

    def nearby(self) -> Self:
        """Return a prefix below this one."""
        return replace(self, prefix=f"{self.prefix}{NEARBY}")

    def reach(self, folder: WorkFolder) -> Reach:
        """Return kopia's arguments, and the keys where this storage has its own.

        As arguments the keys are given empty: so kopia asks its environment on each call,
        then the instance's identity, and writes none into its configuration.
        """
        endpoint, tls = self._address
        arguments = [
            "s3",
            f"--bucket={self.bucket}",
            f"--prefix={self.prefix}",
            f"--endpoint={endpoint}",
            f"--region={self.region}",
            "--access-key=",
            "--secret-access-key=",
            "--session-token=",
        ]
        if not tls:
            arguments.append("--disable-tls")
        elif not self.verify_tls:
            arguments.append("--disable-tls-verification")
        elif self.ca_pem:
            arguments.append(f"--root-ca-pem-path={folder.write('ca.pem', self.ca_pem)}")
        if self.keys is None:
            return Reach(arguments)
        return Reach(arguments, self.keys.variables)

    def config(self) -> JsonDict:
        """Return the bucket and how it is reached, without keys, as `reach` has it."""
        endpoint, tls = self._address
        config: JsonDict = {
            "bucket": self.bucket,
            "prefix": self.prefix,
            "endpoint": endpoint,
            "region": self.region,
            "accessKeyID": "",
            "secretAccessKey": "",
            "sessionToken": "",
        }
        if not tls:
            config["doNotUseTLS"] = True
        elif not self.verify_tls:
            config["doNotVerifyTLS"] = True
        elif self.ca_pem:
            config["rootCA"] = b64encode(self.ca_pem).decode()
        return {"type": "s3", "config": config}


@dataclass(frozen=True)
class FileStorage(Storage):
    """A folder; it is made where it is absent, but only below `root`, if there is one."""

    path: Path
    root: Path | None = None

    @property
    def description(self) -> str:
        """The folder's path."""
        return str(self.path)

    def config(self) -> JsonDict:
        """Return the folder and its modes."""
        return {"type": "filesystem", "config": {"path": str(self.path), "fileMode": 0o600, "dirMode": 0o700}}

    def nearby(self) -> Self:
        """Return the folder that this one is in."""
        return replace(self, path=self.path.parent)

    def reach(self, folder: WorkFolder) -> Reach:  # noqa: ARG002 - a folder needs no files
        """Return kopia's arguments; files and folders are this user's alone, as the peer makes them."""
        return Reach(["filesystem", f"--path={self.path}", "--file-mode=0600", "--dir-mode=0700"])

    def prepare_creation(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made, or its root is not there: a volume not mounted.
        """
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(f"folder {self.root} is not there")
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as e:
            raise ConfigError(f"repository folder {self.path} cannot be made: {e.strerror}") from e


@dataclass(frozen=True)
class GcsStorage(Storage):
    """A prefix in a Google bucket; without `credentials` kopia takes the instance's identity."""

    bucket: str
    prefix: str
    credentials: str = field(default="", repr=False)
    ca_pem: bytes = b""

    @property
    def description(self) -> str:
        """`gs://bucket/prefix`."""
        return f"gs://{self.bucket}/{self.prefix}"

    def nearby(self) -> Self:
        """Return a prefix below this one."""
        return replace(self, prefix=f"{self.prefix}{NEARBY}")

    def reach(self, folder: WorkFolder) -> Reach:
        """Return kopia's arguments; the credentials go into a file.

        kopia's flag takes the key of a service account alone; Google's library takes all forms.
        Source: kopia 0.23.1, repo/blob/gcs/gcs_storage.go.
        """
        arguments = ["gcs", f"--bucket={self.bucket}", f"--prefix={self.prefix}"]
        trust = trust_variables(folder, self.ca_pem)
        if not self.credentials:
            return Reach(arguments, trust)
        file = str(folder.write("gcs.json", self.credentials.encode()))
        if _SERVICE_ACCOUNT.search(self.credentials):
            return Reach([*arguments, f"--credentials-file={file}"], trust)
        return Reach(arguments, {**trust, "GOOGLE_APPLICATION_CREDENTIALS": file})


def trust_variables(folder: WorkFolder, ca_pem: bytes) -> dict[str, str]:
    """Return the variable that makes Go trust `ca_pem` beside the system's own authorities."""
    return {"SSL_CERT_FILE": str(folder.write("ca.pem", ca_pem))} if ca_pem else {}
