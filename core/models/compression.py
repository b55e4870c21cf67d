"""The algorithms by which kopia compresses what a backup stores.

Knows the ones that every reader has. Does not know how an algorithm is chosen (`exposer.settings`),
nor how kopia is given it (`datamover.kopia.policy`).

They are the same in kopia 0.16.0, the version of Velero 1.17 and 1.18, and in all later ones up to 0.23.1, which have
two more: `zstd-best-compression`, deprecated in all of them, and `lz4`, deprecated first, and unreadable in 0.23.1.
Source: kopia 0.16.0, 0.17.0, 0.19.0, 0.21.1, 0.22.3 and 0.23.1, and its fork by Velero at 3ea24d208777 and
d946b1e75197, repo/compression/compressor_*.go.
"""

from enum import StrEnum

from core.errors import ConfigError
from core.spelling import hinted

__all__ = ["Compression", "parse_compression"]


class Compression(StrEnum):
    """An algorithm, by kopia's name."""

    NONE = "none"
    ZSTD_FASTEST = "zstd-fastest"
    ZSTD = "zstd"
    ZSTD_BETTER = "zstd-better-compression"
    S2 = "s2-default"
    S2_BETTER = "s2-better"
    S2_PARALLEL_4 = "s2-parallel-4"
    S2_PARALLEL_8 = "s2-parallel-8"
    GZIP_FASTEST = "gzip-best-speed"
    GZIP = "gzip"
    GZIP_BEST = "gzip-best-compression"
    PGZIP_FASTEST = "pgzip-best-speed"
    PGZIP = "pgzip"
    PGZIP_BEST = "pgzip-best-compression"
    DEFLATE_FASTEST = "deflate-best-speed"
    DEFLATE = "deflate-default"
    DEFLATE_BEST = "deflate-best-compression"


def parse_compression(text: str) -> Compression:
    """Return the algorithm with that name.

    Raises:
        ConfigError: there is none, or kopia has deprecated it.
    """
    try:
        return Compression(text)
    except ValueError:
        allowed = ", ".join(Compression)
        raise ConfigError(hinted(f'must be one of {allowed}: "{text}"', text, Compression)) from None
