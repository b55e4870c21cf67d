"""The mapping from a BackupStorageLocation and its secrets to a storage of kopia.

Source: Velero v1.18, pkg/repository/config, pkg/repository/udmrepo/kopialib/backend.
"""

import base64
import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import ConfigError, RepositoryError, Translated
from core.models.storage import BackupStorageLocation, parse_endpoint
from datamover.storage.azure import build_azure, read_azure_variables
from datamover.storage.providers import (
    GOOGLE_FILE,
    CredentialsText,
    FileStorage,
    GcsStorage,
    Storage,
    google_token_file,
    read_credentials,
    read_inherited,
)
from datamover.storage.s3 import S3Storage, find_aws_identity

_logger = logging.getLogger(__name__)

_AWS_FILE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_AZURE_FILE: Final = "AZURE_CREDENTIALS_FILE"

_FILE_KEY: Final = "credentialsFile"
"""A config key that names a file in this pod. A Secret takes precedence, as in Velero; Velero 1.19 ignores the key."""

_CREDENTIALS_DIRECTORY: Final = Path("/credentials")
"""The mount point of the volume `cloud-credentials`. Source: Velero v1.18, pkg/install/daemonset.go."""

_TRUE: Final = frozenset({"1", "t", "true"})
"""Source: Velero v1.18, optionalHaveBool; Go, strconv.ParseBool. Other values count as false there too."""


@dataclass(frozen=True)
class LocationSecrets:
    """The contents of the Secrets that a location references; None without a reference."""

    credential: CredentialsText | None = None
    ca_pem: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Location:
    """A BackupStorageLocation, what is needed to access it, and the prefix of one volume namespace."""

    resource: BackupStorageLocation
    secrets: LocationSecrets
    environment: Mapping[str, str] = field(repr=False)
    prefix: str
    credentials_directory: Path

    @property
    def config(self) -> dict[str, str]:
        return self.resource.spec.config

    @property
    def bucket(self) -> str:
        return self.resource.spec.object_storage.bucket.strip("/")

    @property
    def ca_pem(self) -> bytes:
        """The certificate authority to trust: `caCertRef` takes precedence over `caCert`."""
        inline = self.resource.spec.object_storage.ca_cert
        if self.secrets.ca_pem is not None:
            if inline:
                _logger.warning("the BackupStorageLocation has caCert and caCertRef: using caCertRef")
            return self.secrets.ca_pem
        try:
            return base64.b64decode(inline or "", validate=False)
        except ValueError as e:
            raise RepositoryError(f"BackupStorageLocation {self.resource.name}: caCert: not base64") from e

    def credential(self, variable: str) -> CredentialsText | None:
        """Return the location's own credentials, else the inherited file's."""
        if self.secrets.credential is None and (path := self.config.get(_FILE_KEY, "")) and self._honors(path):
            return read_credentials(path, f"config.{_FILE_KEY}")
        return self.secrets.credential or read_inherited(self.environment, variable)

    def _honors(self, path: str) -> bool:
        """Return whether that file may be read: who writes a location must not choose among all files of this pod."""
        root, wanted = self.credentials_directory, Path(path)
        named = f'BackupStorageLocation {self.resource.name}: config.{_FILE_KEY} "{path}"'
        # The kubelet's own links in the volume of a Secret lead to files below its mount point.
        if ".." in wanted.parts or root not in wanted.parents or root.resolve() not in _resolve(wanted).parents:
            _logger.warning("%s is ignored: it is not below %s; set spec.credential", named, root)
            return False
        _logger.warning(
            "%s will be ignored from the next minor version on, as by Velero 1.19: set spec.credential", named
        )
        return True


def _resolve(path: Path) -> Path:
    """Return the path without links; a relative one if they cannot be followed."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return Path()


def build_storage(
    location: BackupStorageLocation,
    namespace: str,
    *,
    secrets: LocationSecrets,
    environment: Mapping[str, str],
    credentials_directory: Path = _CREDENTIALS_DIRECTORY,
) -> Storage:
    """Return the storage of the repository for volumes of `namespace`.

    The environment of this process names inherited credentials. A location may name a file in `credentials_directory`.

    Raises:
        RepositoryError: the location's config or credentials are invalid; names the location.
    """
    # Velero normalizes paths: another path would be another repository.
    outer = location.spec.object_storage.prefix.strip("/")
    prefix = f"{posixpath.normpath(posixpath.join(outer, 'kopia', namespace))}/"
    found = _Location(location, secrets, environment, prefix, credentials_directory)
    provider = location.spec.provider
    # A known provider takes precedence over the config; any other one is S3 if it has an address.
    build = _BUILD.get(provider.removeprefix("velero.io/")) or (_s3 if found.config.get("s3Url") else None)
    with Translated((ConfigError, RepositoryError), RepositoryError, f"BackupStorageLocation {location.name}"):
        if build is not None:
            return build(found)
    raise RepositoryError(
        f'BackupStorageLocation {location.name}: unknown provider "{provider}" (supported: velero.io/aws, '
        "velero.io/azure, velero.io/gcp, velero.io/fs, or any with config.s3Url)"
    )


def _s3(location: _Location) -> Storage:
    config = location.config
    url, region = config.get("s3Url", ""), config.get("region", "").strip("/")
    if url:
        parse_endpoint(url)
    return S3Storage(
        bucket=location.bucket,
        prefix=location.prefix,
        url=url,
        region=region,
        keys=find_aws_identity(
            location.credential(_AWS_FILE),
            location.environment,
            profile=config.get("profile", ""),
            region="" if url else region,
        ),
        verify_tls=config.get("insecureSkipTLSVerify", "").lower() not in _TRUE,
        ca_pem=location.ca_pem,
    )


def _azure(location: _Location) -> Storage:
    given = read_azure_variables(location.credential(_AZURE_FILE), location.environment)
    return build_azure(
        location.config, given, container=location.bucket, prefix=location.prefix, ca_pem=location.ca_pem
    )


def _gcs(location: _Location) -> Storage:
    if source := location.credential(GOOGLE_FILE):
        google_token_file(source)
    return GcsStorage(location.bucket, location.prefix, source.text if source else "", location.ca_pem)


def _folder(location: _Location) -> Storage:
    root = location.config.get("fspath", "")
    if not root.startswith("/"):
        raise RepositoryError(f'config.fspath: must be an absolute path: "{root}"')
    return FileStorage(Path(root) / location.prefix, Path(root))


_BUILD: Final[Mapping[str, Callable[[_Location], Storage]]] = {"aws": _s3, "azure": _azure, "gcp": _gcs, "fs": _folder}
"""Keyed by provider without its prefix. Source: Velero v1.18, GetBackendType in pkg/repository/config/config.go."""
