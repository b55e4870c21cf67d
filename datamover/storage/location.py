"""From a BackupStorageLocation and its secrets to the storage that kopia reaches: the one place.

Knows the peers' providers, config keys, prefixes and where credentials come from. Does not
know how Secrets are read, or kopia's flags (`datamover.storage.providers`).
Source: Velero v1.18, pkg/repository/config, pkg/repository/udmrepo/kopialib/backend.
"""

import base64
import binascii
import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import ConfigError, RepositoryError
from core.models.storage import BackupStorageLocation
from datamover.storage.azure import build_azure
from datamover.storage.credentials import CredentialsText, find_aws_identity, read_credentials, read_inherited
from datamover.storage.providers import FileStorage, GcsStorage, S3Storage, Storage, parse_endpoint

__all__ = ["LocationSecrets", "storage_of"]

_logger = logging.getLogger(__name__)

_AWS_FILE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_AZURE_FILE: Final = "AZURE_CREDENTIALS_FILE"
_GCP_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"

_FILE_KEY: Final = "credentialsFile"
"""Of a location's config: a file in this pod. A Secret goes before, as with the peer, which overwrites the key."""

_TRUE: Final = frozenset({"1", "t", "true"})
"""Source: Velero v1.18, optionalHaveBool; Go, strconv.ParseBool. What is no boolean counts as false there too."""


@dataclass(frozen=True)
class LocationSecrets:
    """What the Secrets that a location names hold; None where it names none."""

    credential: CredentialsText | None = None
    ca_pem: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Place:
    """A location, what is needed to reach it, and the prefix of one volume namespace."""

    location: BackupStorageLocation
    secrets: LocationSecrets
    environment: Mapping[str, str] = field(repr=False)
    prefix: str

    @property
    def config(self) -> dict[str, str]:
        return self.location.spec.config

    @property
    def bucket(self) -> str:
        return self.location.spec.object_storage.bucket.strip("/")

    @property
    def ca_pem(self) -> bytes:
        """The authority to trust: `caCertRef` goes before `caCert`."""
        inline = self.location.spec.object_storage.ca_cert
        if self.secrets.ca_pem is not None:
            if inline:
                _logger.warning("the location has caCert and caCertRef: caCertRef is taken")
            return self.secrets.ca_pem
        try:
            return base64.b64decode(inline, validate=False)
        except binascii.Error as e:
            raise RepositoryError(f"BackupStorageLocation {self.location.name}: caCert is not base64") from e

    def credential(self, variable: str) -> CredentialsText | None:
        """Return the location's own credentials, else those of the inherited file."""
        if self.secrets.credential is None and (path := self.config.get(_FILE_KEY, "")):
            return read_credentials(path, f"config.{_FILE_KEY}")
        return self.secrets.credential or read_inherited(self.environment, variable)


def storage_of(
    location: BackupStorageLocation, namespace: str, *, secrets: LocationSecrets, environment: Mapping[str, str]
) -> Storage:
    """Return the storage of the repository for volumes of `namespace`.

    Args:
        environment: of this process: inherited credentials are found through it.

    Raises:
        RepositoryError: the location's config or credentials cannot be used; names the location.
    """
    # The peer's library writes paths in their shortest form: another one would be another repository.
    outer = location.spec.object_storage.prefix.strip("/")
    prefix = f"{posixpath.normpath(posixpath.join(outer, 'kopia', namespace))}/"
    place = _Place(location, secrets, environment, prefix)
    provider = location.spec.provider
    # A known provider counts whatever the config says; any other one is S3 where it has an address.
    build = _BUILDERS.get(provider.removeprefix("velero.io/")) or (_s3 if place.config.get("s3Url") else None)
    try:
        if build is not None:
            return build(place)
    except (ConfigError, RepositoryError) as e:
        raise RepositoryError(f"BackupStorageLocation {location.name}: {e}") from e
    raise RepositoryError(
        f"BackupStorageLocation {location.name}: provider {provider!r} is none of velero.io/aws, "
        "velero.io/azure, velero.io/gcp, velero.io/fs, and config.s3Url is not set"
    )


def _s3(place: _Place) -> Storage:
    config = place.config
    url, region = config.get("s3Url", ""), config.get("region", "").strip("/")
    if url:
        parse_endpoint(url)
    return S3Storage(
        bucket=place.bucket,
        prefix=place.prefix,
        url=url,
        region=region,
        keys=find_aws_identity(
            place.credential(_AWS_FILE),
            place.environment,
            profile=config.get("profile", ""),
            region="" if url else region,
        ),
        verify_tls=config.get("insecureSkipTLSVerify", "").lower() not in _TRUE,
        ca_pem=place.ca_pem,
    )


def _azure(place: _Place) -> Storage:
    source = place.credential(_AZURE_FILE)
    return build_azure(place.config, source, container=place.bucket, prefix=place.prefix, ca_pem=place.ca_pem)


def _gcs(place: _Place) -> Storage:
    source = place.credential(_GCP_FILE)
    return GcsStorage(place.bucket, place.prefix, source.text if source else "", place.ca_pem)


def _folder(place: _Place) -> Storage:
    root = place.config.get("fspath", "")
    if not root.startswith("/"):
        raise RepositoryError(f"config.fspath {root!r} is no absolute path")
    return FileStorage(Path(root) / place.prefix, Path(root))


_BUILDERS: Final[Mapping[str, Callable[[_Place], Storage]]] = {
    "aws": _s3,
    "azure": _azure,
    "gcp": _gcs,
    "fs": _folder,
}
"""By provider, less the peers' own prefix. Source: Velero v1.18, GetBackendType in pkg/repository/config/config.go."""
