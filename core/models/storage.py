"""Models of BackupStorageLocation and BackupRepository, and the addresses of storages as users give them.

Source: Velero v1.18, pkg/apis/velero/v1, as recorded in tests/recordings/velero-1.18.2/crds.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple, Self
from urllib.parse import urlsplit

from msgspec import field

from core.errors import ConfigError, RepositoryError
from core.models.base import CustomResource, JsonDict, SparseModel, Time, WireModel
from core.models.names import REPOSITORY_TYPE_LABEL, STORAGE_LOCATION_LABEL, VOLUME_NAMESPACE_LABEL, label_value

REPOSITORY_TYPE: Final = "kopia"
"""The only supported `spec.repositoryType`."""

CACHE_LIMIT_KEY: Final = "cacheLimitMB"
"""In `spec.repositoryConfig`: limit of kopia's cache, in MiB."""

FULL_INTERVAL_KEY: Final = "fullMaintenanceInterval"
"""In `spec.repositoryConfig`: how often kopia's full maintenance is due, a key of FULL_INTERVAL_SECONDS."""

FULL_INTERVAL_SECONDS: Final = {"normalGC": 86_400, "fastGC": 43_200, "eagerGC": 21_600}
"""Source: Velero v1.18, pkg/repository/udmrepo/repo_options.go."""

DEFAULT_CACHE_LIMIT_MIB: Final = 5000
"""The cache limit where `spec.repositoryConfig` sets none.

Source: Velero v1.18, pkg/repository/udmrepo/kopialib/backend/common.go (MB there are MiB).
"""


class BlockHash(StrEnum):
    """The hash that names the contents of a kopia repository, by kopia's name; chosen when it is created.

    Source: kopia 0.23.1, and its fork by Velero at d946b1e75197, repo/hashing/*_hashes.go.
    """

    BLAKE2B_256 = "BLAKE2B-256"
    BLAKE2B_256_128 = "BLAKE2B-256-128"
    BLAKE2S_128 = "BLAKE2S-128"
    BLAKE2S_256 = "BLAKE2S-256"
    BLAKE3_256 = "BLAKE3-256"
    BLAKE3_256_128 = "BLAKE3-256-128"
    HMAC_SHA224 = "HMAC-SHA224"
    HMAC_SHA256 = "HMAC-SHA256"
    HMAC_SHA256_128 = "HMAC-SHA256-128"
    HMAC_SHA3_224 = "HMAC-SHA3-224"
    HMAC_SHA3_256 = "HMAC-SHA3-256"


class SecretKey(WireModel):
    """One key of a Secret in the same namespace."""

    name: str = ""
    key: str


class ObjectStorage(SparseModel):
    """`spec.objectStorage`: the bucket and its CA. `ca_cert` is base64 of PEM."""

    bucket: str
    prefix: str = ""
    ca_cert: str | None = None
    ca_cert_ref: SecretKey | None = None


class BackupStorageLocationSpec(SparseModel):
    """`spec` of a BackupStorageLocation."""

    provider: str
    config: dict[str, str] = field(default_factory=dict)
    credential: SecretKey | None = None
    object_storage: ObjectStorage
    access_mode: str | None = None
    validation_frequency: str | None = None


class BackupStorageLocationStatus(SparseModel):
    """`status` of a BackupStorageLocation; without a phase it counts as available."""

    phase: str | None = None
    message: str | None = None
    last_validation_time: Time | None = None


class BackupStorageLocation(CustomResource):
    """A bucket or directory with backup repositories."""

    kind_name: ClassVar[str] = "BackupStorageLocation"
    spec: BackupStorageLocationSpec
    status: BackupStorageLocationStatus = field(default_factory=BackupStorageLocationStatus)

    @property
    def available(self) -> bool:
        """Whether transfers can use the location."""
        return self.status.phase in {None, "Available"}

    @property
    def read_only(self) -> bool:
        """Whether the location is read-only."""
        return self.spec.access_mode == "ReadOnly"


class RepositoryPhase(StrEnum):
    """`status.phase` of a BackupRepository; absent reads as NEW."""

    NEW = "New"
    READY = "Ready"
    NOT_READY = "NotReady"


class RepositoryKey(NamedTuple):
    """Identity of a BackupRepository, by its spec: its name and labels do not prove it.

    The names of two pairs can be the same ("app-dr" and "default", "app" and "dr-default"), long
    label values are hashed, and users can edit labels.
    """

    volume_namespace: str
    location: str
    repository_type: str = REPOSITORY_TYPE

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Return the key of a BackupRepository as JSON dict; an absent type reads as kopia."""
        spec = raw.get("spec") or {}
        repository_type = spec.get("repositoryType") or REPOSITORY_TYPE
        return cls(spec.get("volumeNamespace", ""), spec.get("backupStorageLocation", ""), repository_type)

    def __str__(self) -> str:
        return (
            f'volume namespace "{self.volume_namespace}", backup storage location "{self.location}" '
            f'and repository type "{self.repository_type}"'
        )


class BackupRepositorySpec(SparseModel):
    """`spec` of a BackupRepository."""

    volume_namespace: str
    backup_storage_location: str
    repository_type: str | None = None
    maintenance_frequency: str
    repository_config: dict[str, str] = field(default_factory=dict)


class MaintenanceOutcome(StrEnum):
    """`result` of an entry of `status.recentMaintenance`."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class MaintenanceEntry(SparseModel, omit_defaults=True):
    """One Job of the maintenance history; `start_timestamp` is the Job's creation. A success has no message."""

    result: MaintenanceOutcome | None = None
    start_timestamp: Time | None = None
    complete_timestamp: Time | None = None
    message: str | None = None


class BackupRepositoryStatus(SparseModel):
    """`status` of a BackupRepository; the history is ordered from oldest to newest."""

    phase: RepositoryPhase | None = None
    message: str | None = None
    last_maintenance_time: Time | None = None
    recent_maintenance: list[MaintenanceEntry] = field(default_factory=list)


class BackupRepository(CustomResource):
    """One kopia repository: a volume namespace in a backup storage location."""

    kind_name: ClassVar[str] = "BackupRepository"
    spec: BackupRepositorySpec
    status: BackupRepositoryStatus = field(default_factory=BackupRepositoryStatus)

    @property
    def phase(self) -> RepositoryPhase:
        """`status.phase`; absent reads as New."""
        return self.status.phase or RepositoryPhase.NEW

    @property
    def key(self) -> RepositoryKey:
        """Its identity; an absent type reads as kopia."""
        spec = self.spec
        return RepositoryKey(
            spec.volume_namespace, spec.backup_storage_location, spec.repository_type or REPOSITORY_TYPE
        )

    def check_key(self, wanted: RepositoryKey) -> None:
        """Raise RepositoryError, with both keys, unless the repository has the key `wanted`."""
        if self.key != wanted:
            shown = f"{self.kind_name} {self.place}"
            raise RepositoryError(f"{shown} is for {self.key}, not for {wanted}")


def repository_labels(volume_namespace: str, location: str) -> dict[str, str]:
    """Return the labels that Velero selects a BackupRepository by."""
    return {
        VOLUME_NAMESPACE_LABEL: label_value(volume_namespace),
        STORAGE_LOCATION_LABEL: label_value(location),
        REPOSITORY_TYPE_LABEL: REPOSITORY_TYPE,
    }


def repository_name(volume_namespace: str, location: str) -> str:
    """Return the name that Velero gives a BackupRepository."""
    return f"{volume_namespace}-{location}-{REPOSITORY_TYPE}"


def build_backup_repository(namespace: str, key: RepositoryKey) -> JsonDict:
    """Return a new BackupRepository in `namespace`, as Velero's data mover creates it: its controller sets the rest."""
    return {
        "apiVersion": "velero.io/v1",
        "kind": BackupRepository.kind_name,
        "metadata": {
            "name": repository_name(key.volume_namespace, key.location),
            "namespace": namespace,
            "labels": repository_labels(key.volume_namespace, key.location),
        },
        "spec": {
            "backupStorageLocation": key.location,
            "maintenanceFrequency": "0s",
            "repositoryType": REPOSITORY_TYPE,
            "volumeNamespace": key.volume_namespace,
        },
    }


_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::(?P<port>[0-9]{1,5}))?")
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f]")
_LAST_PORT: Final = 65535
_EXAMPLE: Final = "examples: https://s3.example.com:9000, or with an IPv6 address https://[fd00::1]:9000"


def parse_endpoint(url: str) -> tuple[str, bool]:
    """Return host and port of an endpoint's S3 URL, and whether it uses TLS; raise ConfigError if it is none."""
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
    except ValueError:
        raise ConfigError(f"invalid S3 URL: {_EXAMPLE}") from None
    if "@" in parts.netloc:
        # Not quoted: it may contain a password.
        raise ConfigError("invalid S3 URL: it must not contain a user or password (keys come from the credentials)")
    # kopia would take it for a host that does not answer. urlsplit removes some of these characters.
    address = _ADDRESS.fullmatch(parts.netloc)
    if parts.scheme not in {"http", "https"} or not address or _BLANK.search(url):
        raise ConfigError(f'invalid S3 URL: "{url}" ({_EXAMPLE})')
    if not 0 < int(address["port"] or 1) <= _LAST_PORT:
        raise ConfigError(f'invalid S3 URL: it has no such port: "{url}"')
    if parts.path.strip("/") or parts.query or parts.fragment:
        # Velero rejects a path too: if it was ignored, the data would not be where the user expects it.
        raise ConfigError(f'invalid S3 URL: it must not have a path: "{url}" (the prefix is a separate setting)')
    return parts.netloc, parts.scheme == "https"
