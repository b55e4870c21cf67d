"""The folder where a mover keeps what only lives as long as it does.

Knows which places may be written to. Does not know what kopia keeps in them.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ConfigError

__all__ = ["WorkFolder", "open_work_folder"]

_SCRATCH: Final = "/scratch"
"""Where the agent's DaemonSet, and so every mover pod, mounts an empty folder."""

_PREFIX: Final = "datamover-"
_CACHE: Final = "kopia-cache"


@dataclass(frozen=True)
class WorkFolder:
    """A private folder, mode 0700, and where kopia's cache lies: in it or on a volume of its own."""

    path: Path
    cache: Path

    @property
    def config_file(self) -> Path:
        """Kopia's own configuration: which repository it is connected to."""
        return self.path / "repository.config"

    def write(self, name: str, content: bytes) -> Path:
        """Write a file that only this user may read, and return its path."""
        path = self.path / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path


@contextmanager
def open_work_folder(
    environment: Mapping[str, str], cache_volume: str = "", *, leaves_cache: bool = False
) -> Iterator[WorkFolder]:
    """Make a work folder, and remove it at the end.

    It is made in `VELERO_SCRATCH_DIR`, `/scratch`, or the system's folder for temporary
    files, whichever can be written to first: the root file system may be read-only.

    Args:
        environment: the variables of this process.
        cache_volume: where a volume for the cache is mounted; "" where there is none.
        leaves_cache: the cache stays, for whoever removes the volume that it lies on: thousands
            of files are removed in seconds, and somebody waits for the end.

    Raises:
        ConfigError: none of them can be written to.
    """
    path = _make_folder(environment)
    cache = (Path(cache_volume) if cache_volume else path) / _CACHE
    try:
        yield WorkFolder(path, cache)
    finally:
        if leaves_cache:
            _empty(path, but=cache)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _make_folder(environment: Mapping[str, str]) -> Path:
    tried = [environment.get("VELERO_SCRATCH_DIR", ""), _SCRATCH, ""]
    for parent in tried:
        if parent and not Path(parent).is_dir():
            continue
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or None))
    raise ConfigError("no folder can be written to: mount one at /scratch, or name it by VELERO_SCRATCH_DIR")


def _empty(folder: Path, *, but: Path) -> None:
    """Remove all that lies in `folder`, secrets among it, except for one; what cannot be removed stays."""
    with suppress(OSError):
        for one in list(folder.iterdir()):
            if one == but:
                continue
            with suppress(OSError):
                if one.is_dir():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink()
