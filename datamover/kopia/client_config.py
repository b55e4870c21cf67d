"""kopia's client configuration, as flags of `repository connect` and as its file: identity, cache directory and limit.

Source: kopia 0.23.1, repo/local_config.go, repo/content/caching_options.go.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.models.base import JsonDict
from core.models.storage import CACHE_LIMIT_KEY
from core.models.transfer_settings import BandwidthLimits
from core.models.units import parse_count

_logger = logging.getLogger(__name__)

_CLIENT: Final = "default"
"""The identity that Velero uses: so each side finds the other's snapshots as its own."""

IDENTITY: Final = f"{_CLIENT}@{_CLIENT}"
"""How kopia writes it, for example as the owner of maintenance."""

IDENTITY_FLAGS: Final = (f"--override-hostname={_CLIENT}", f"--override-username={_CLIENT}")

_DEFAULT_CACHE_MIB: Final = 5000
_LEAST_MIB: Final = 2
"""With less, the soft limit of data would be 0."""

_MOST_MIB: Final = 2**43 - 1
"""In bytes, the largest number that kopia takes."""

_PACK_MIB: Final = 21
"""About the longest pack. Source: kopia 0.23.1, repo/format/format_provider.go."""

_LIMITS: Final = {
    "content-cache-size-mb": "maxCacheSize",
    "content-cache-size-limit-mb": "contentCacheSizeLimitBytes",
    "metadata-cache-size-mb": "maxMetadataCacheSize",
    "metadata-cache-size-limit-mb": "metadataCacheSizeLimitBytes",
}
"""kopia's flags for the limits of its cache, and their names in its configuration."""

_LIST_CACHE_SECONDS: Final = 30
_FORMAT_CACHE_NANOSECONDS: Final = 900_000_000_000


@dataclass(frozen=True)
class CacheLimit:
    """The limit of kopia's cache on disk, in MiB: 4/5 for data, 1/5 for metadata.

    kopia sweeps each part at a soft limit, where it still keeps what was used a moment ago: as with Velero, 4/5 of the
    hard one. Without a part for data, kopia 0.23.1 crashes (its issue 5406), and would download again what files share.
    Source: Velero v1.18, SetupConnectOptions in pkg/repository/udmrepo/kopialib/backend/common.go.
    """

    total_mib: int = _DEFAULT_CACHE_MIB

    def at_most(self, room_mib: int | None) -> "CacheLimit":
        """Return the limit of a cache on a volume with room for so much; None: the volume sets none."""
        return CacheLimit(room_mib) if room_mib is not None and room_mib < self.total_mib else self

    @property
    def packs(self) -> int:
        """How many packs of data fit in."""
        return self._limits[1] // _PACK_MIB

    @property
    def _limits(self) -> tuple[int, ...]:
        """In MiB: the soft and the hard limit of data, then of metadata."""
        total = max(_LEAST_MIB, min(self.total_mib, _MOST_MIB))
        metadata = total // 5
        return tuple(part for hard in (total - metadata, metadata) for part in (hard * 4 // 5, hard))

    @property
    def config(self) -> JsonDict:
        """The `caching` object that `repository connect` writes for these arguments."""
        limits = {name: mib << 20 for name, mib in zip(_LIMITS.values(), self._limits, strict=True)}
        return {**limits, "maxListCacheDuration": _LIST_CACHE_SECONDS}

    @property
    def arguments(self) -> list[str]:
        """Kopia's arguments."""
        return [f"--{flag}={mib}" for flag, mib in zip(_LIMITS, self._limits, strict=True)]


def parse_cache_limit(config: dict[str, str]) -> CacheLimit:
    """Return the limit in a BackupRepository's `repositoryConfig`; log a warning if it is invalid."""
    text = config.get(CACHE_LIMIT_KEY, "")
    if limit := parse_count(text):
        return CacheLimit(limit)
    if text:
        _logger.warning("%s is not a positive number: using the default", CACHE_LIMIT_KEY)
    return CacheLimit()


def build_config(storage: JsonDict, *, cache: Path, limit: CacheLimit, read_only: bool) -> JsonDict:
    """Return the configuration that connecting to `storage` writes, without its description."""
    return {
        "storage": storage,
        "caching": {"cacheDirectory": str(cache), **limit.config},
        "hostname": _CLIENT,
        "username": _CLIENT,
        **({"readonly": True} if read_only else {}),
        "enableActions": False,
        "formatBlobCacheDuration": _FORMAT_CACHE_NANOSECONDS,
    }


def build_throttle(limits: BandwidthLimits) -> JsonDict:
    """Return kopia's limits for its configuration. Source: kopia 0.23.1, repo/blob/throttling/throttler.go."""
    rates = {
        "maxUploadSpeedBytesPerSecond": limits.upload_bytes_per_second,
        "maxDownloadSpeedBytesPerSecond": limits.download_bytes_per_second,
    }
    return {"throttlingLimits": {name: rate for name, rate in rates.items() if rate}}
