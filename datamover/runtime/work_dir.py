"""The work directory of a data mover: temporary files, removed at its end.

Knows which directories may be writable. Does not know what kopia keeps in them.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ConfigError

__all__ = ["WorkDir", "open_work_dir"]

_SCRATCH: Final = "/scratch"
"""Where the agent's DaemonSet, and so every mover pod, mounts an emptyDir."""

_MEMORY: Final = "/dev/shm"  # noqa: S108 - a directory with a random name is created in it
"""A file system in memory, which every container has."""

_PREFIX: Final = "datamover-"
_CACHE: Final = "kopia-cache"


@dataclass(frozen=True)
class CacheDir:
    """Where kopia's cache is, and for how long.

    Attributes:
        volume: the mount path of a volume for the cache; None: it is in the work directory.
        limit_mib: what that volume has room for; None: as much as the repository's limit.
        keep: leave the cache to the deletion of its volume: removing thousands of files takes
            seconds, which would delay the end of the mover.
    """

    volume: str | None = None
    limit_mib: int | None = None
    keep: bool = False


@dataclass(frozen=True)
class WorkDir:
    """A private directory, mode 0700, and kopia's cache directory: in it or on a separate volume.

    `cache_limit_mib` is what the cache's volume has room for; None: as much as the repository's limit.
    """

    path: Path
    cache: Path
    cache_limit_mib: int | None = None

    @property
    def config_file(self) -> Path:
        """kopia's configuration: the repository that it is connected to."""
        return self.path / "repository.config"

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of mode 0600 and return its path; `name` may have a directory."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path


@contextmanager
def open_work_dir(
    environment: Mapping[str, str], cache: CacheDir | None = None, *, apart: bool = False
) -> Iterator[WorkDir]:
    """Create a work directory, and remove it at the end.

    It is created in the first writable one of `VELERO_SCRATCH_DIR`, `/scratch` and the system's
    directory for temporary files: the root file system may be read-only.

    Args:
        environment: the variables of this process.
        cache: the cache; None: it is in the work directory, and removed with it.
        apart: create it in memory: the directory for temporary files is the jail in which kopia walks
            the volume, and must hold nothing but the cache.

    Raises:
        ConfigError: none of them is writable.
    """
    scratch = environment.get("VELERO_SCRATCH_DIR", "") or _SCRATCH
    path = _create_directory([_MEMORY, scratch] if apart else [scratch, _SCRATCH])
    cache = cache or CacheDir()
    place = Path(cache.volume or (scratch if apart else path)) / _CACHE
    try:
        yield WorkDir(path, place, cache.limit_mib)
    finally:
        if cache.keep:
            _empty(path, but=place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _create_directory(tried: list[str]) -> Path:
    for parent in (*tried, ""):
        if parent and not Path(parent).is_dir():
            continue
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or None))
    raise ConfigError("no writable directory: mount one at /scratch, or set VELERO_SCRATCH_DIR")


def _empty(directory: Path, *, but: Path) -> None:
    """Remove the contents of `directory`, including secrets, except for `but`; errors are ignored."""
    with suppress(OSError):
        for one in list(directory.iterdir()):
            if one == but:
                continue
            with suppress(OSError):
                if one.is_dir():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink()
