"""The shell lines that connect a person's kopia to a backup repository, read-only. Pure.

Password and keys are in none of the lines: kubectl reads them from their Secrets when the lines are run, into variables
of that shell. kopia gets them from there, so they are in no argument and not in its configuration, which is a file of
its own: a connection that the person has stays as it is.
Source: kopia 0.23.1, cli/command_repository_connect.go, cli/storage_s3.go, cli/storage_filesystem.go; Velero v1.18,
pkg/repository/config/config.go (the folder of a repository).
"""

import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from core.errors import ConfigError
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET
from core.models.storage import BackupRepository, BackupStorageLocation, SecretKey

__all__ = ["build_connect_lines"]

_IDENTITY: Final = ("--override-username=default", "--override-hostname=default")
"""That of all data movers, by which their snapshots are listed as one's own."""

_INHERITED: Final = SecretKey(name="cloud-credentials", key="cloud")
"""The credentials of locations that name none. Source: Velero v1.18, pkg/install/resources.go."""

_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+")
_PROFILE: Final = re.compile(r"[-._@a-zA-Z0-9]+")
_AWS_KEYS: Final = {"AWS_ACCESS_KEY_ID": "aws_access_key_id", "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key"}
_TRUE: Final = frozenset({"1", "t", "true"})


@dataclass(frozen=True)
class _Secrets:
    """The Secrets of a namespace, which kubectl reads by its own configuration or with these flags."""

    namespace: str
    flags: Sequence[str]

    def read(self, wanted: SecretKey) -> str:
        """Return the command that prints the value of a key of a Secret."""
        return f"{self.read_encoded(wanted)} | base64 -d"

    def read_encoded(self, wanted: SecretKey) -> str:
        """Return the command that prints it in Base64."""
        if not _KEY.fullmatch(wanted.key):
            raise ConfigError(f'Secret {self.namespace}/{wanted.name}: "{wanted.key}" is no key of a Secret')
        template = f'{{{{index .data "{wanted.key}"}}}}'
        words = ("kubectl", *self.flags, "get", "secret", wanted.name, "-n", self.namespace)
        return shlex.join([*words, "-o", f"go-template={template}"])


def build_connect_lines(
    repository: BackupRepository, location: BackupStorageLocation, kubectl_flags: Sequence[str] = ()
) -> list[str]:
    """Return the lines, for a POSIX shell with kubectl, base64, awk and kopia; kubectl gets these flags.

    Raises:
        ConfigError: the location is of another kind than S3 or a directory, or its values cannot be used.
    """
    secrets, spec = _Secrets(repository.metadata.namespace, kubectl_flags), location.spec
    inner = posixpath.join(spec.object_storage.prefix.strip("/"), "kopia", repository.spec.volume_namespace)
    password = secrets.read(SecretKey(name=REPO_CREDENTIALS_SECRET, key=REPO_CREDENTIALS_KEY))
    meta = repository.metadata
    file = shlex.quote(f"nodeagent-{meta.namespace}-{meta.name}.config")
    lines = [f'export KOPIA_CONFIG_PATH="$HOME"/.config/kopia/{file}', f'export KOPIA_PASSWORD="$({password})"']
    provider = spec.provider.removeprefix("velero.io/")
    if provider == "fs":
        path = posixpath.join(spec.config.get("fspath", ""), inner)
        storage = ["filesystem", f"--path={path}"]
    elif provider == "aws" or (provider not in {"azure", "gcp"} and spec.config.get("s3Url")):
        lines += _key_lines(secrets, location)
        storage = _s3(location, f"{inner}/")
    else:
        raise ConfigError(
            f"BackupStorageLocation {location.name}: no command for the provider {spec.provider}: connect kopia by hand"
        )
    flags = [*storage, *_IDENTITY, "--readonly", "--no-persist-credentials", "--no-check-for-updates"]
    words = ["kopia", "repository", "connect", *map(shlex.quote, flags), *_authority(secrets, location)]
    return [*lines, " ".join(words)]


def _key_lines(secrets: _Secrets, location: BackupStorageLocation) -> list[str]:
    """Return the lines that read the keys of the location's profile; those of a session are not supported."""
    profile = location.spec.config.get("profile") or "default"
    if not _PROFILE.fullmatch(profile):
        raise ConfigError(f'BackupStorageLocation {location.name}: "{profile}" is no name of a profile')
    source = secrets.read(location.spec.credential or _INHERITED)
    lines = []
    for variable, name in _AWS_KEYS.items():
        script = f'/^\\[/ {{ on = index($0, "[{profile}]") }} on && $1 == "{name}" {{ print $2 }}'
        lines.append(f"export {variable}=\"$({source} | awk -F '[[:space:]]*=[[:space:]]*' {shlex.quote(script)})\"")
    return lines


def _s3(location: BackupStorageLocation, prefix: str) -> list[str]:
    config, storage = location.spec.config, location.spec.object_storage
    region = config.get("region", "")
    url = urlsplit(config.get("s3Url", ""))
    amazon = f"s3.{region}.amazonaws.com.cn" if region.startswith("cn-") else "s3.amazonaws.com"
    words = [
        "s3",
        f"--bucket={storage.bucket}",
        f"--prefix={prefix}",
        # Without the user and password that a URL may have.
        f"--endpoint={url.netloc.rpartition('@')[2] or amazon}",
        f"--region={region}",
        # Empty: kopia takes them from the environment each time, and writes none to its configuration.
        "--access-key=",
        "--secret-access-key=",
        "--session-token=",
    ]
    if url.scheme == "http":
        words.append("--disable-tls")
    elif config.get("insecureSkipTLSVerify", "").lower() in _TRUE:
        words.append("--disable-tls-verification")
    return words


def _authority(secrets: _Secrets, location: BackupStorageLocation) -> list[str]:
    """Return the flag with the certificate authority, which is no secret."""
    storage = location.spec.object_storage
    if storage.ca_cert_ref is not None:
        return [f'--root-ca-pem-base64="$({secrets.read_encoded(storage.ca_cert_ref)})"']
    return [shlex.quote(f"--root-ca-pem-base64={storage.ca_cert}")] if storage.ca_cert else []
