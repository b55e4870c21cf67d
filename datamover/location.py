"""From a BackupStorageLocation and its secrets to the storage that kopia reaches: the one place.

Knows the peers' providers, config keys, prefixes and where credentials come from. Does not
know how Secrets are read, or kopia's flags (`datamover.storage`).
Source: Velero v1.18, pkg/repository/config, pkg/repository/udmrepo/kopialib/backend.
"""

import base64
import binascii
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import ConfigError, RepositoryError
from core.models.storage import BackupStorageLocation
from datamover.credentials import AwsKeys, CredentialsText, parse_aws_keys, parse_variables, read_inherited
from datamover.storage import AzureStorage, FileStorage, GcsStorage, S3Storage, Storage, parse_endpoint

__all__ = ["LocationSecrets", "storage_of"]

_logger = logging.getLogger(__name__)

_AWS_FILE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_AZURE_FILE: Final = "AZURE_CREDENTIALS_FILE"
_GCP_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"

_AZURE_DEFAULT_KEY: Final = "AZURE_STORAGE_ACCOUNT_ACCESS_KEY"
"""Of a credentials file: the account's key, unless `storageAccountKeyEnvVar` names another."""

_TRUE: Final = frozenset({"1", "t", "true"})
"""Source: Velero v1.18, optionalHaveBool; Go, strconv.ParseBool. What is no boolean counts as false there too."""

_AZURE_IDENTITY: Final = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
_AZURE_DOMAINS: Final = {
    "AzureChinaCloud": "blob.core.chinacloudapi.cn",
    "AzureUSGovernmentCloud": "blob.core.usgovcloudapi.net",
}


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
    outer = location.spec.object_storage.prefix.strip("/")
    prefix = f"{outer}/kopia/{namespace}/" if outer else f"kopia/{namespace}/"
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
    url = config.get("s3Url", "")
    if url:
        parse_endpoint(url)
    keys: AwsKeys | None = None
    if source := place.credential(_AWS_FILE):
        keys = parse_aws_keys(source, config.get("profile", ""))
    return S3Storage(
        bucket=place.bucket,
        prefix=place.prefix,
        url=url,
        region=config.get("region", ""),
        keys=keys,
        verify_tls=config.get("insecureSkipTLSVerify", "").lower() not in _TRUE,
        ca_pem=place.ca_pem,
    )


def _azure(place: _Place) -> Storage:
    config = place.config
    account = config.get("storageAccount", "")
    if not account:
        raise RepositoryError("config.storageAccount is not set")
    source = place.credential(_AZURE_FILE)
    given = parse_variables(source) if source else {}
    variables = {name: given[name] for name in _AZURE_IDENTITY if given.get(name)}
    key = given.get(config.get("storageAccountKeyEnvVar", "") or _AZURE_DEFAULT_KEY, "")
    if key:
        variables["AZURE_STORAGE_KEY"] = key
    return AzureStorage(
        container=place.bucket,
        prefix=place.prefix,
        account=account,
        variables=variables,
        ca_pem=place.ca_pem,
        domain=_AZURE_DOMAINS.get(given.get("AZURE_CLOUD_NAME", ""), ""),
    )


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
