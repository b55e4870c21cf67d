"""The folder where a mover keeps what only lives as long as it does.

Knows which places may be written to. Does not know what kopia keeps in them.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ConfigError

__all__ = ["WorkFolder", "open_work_folder"]

_SCRATCH: Final = "/scratch"
"""Where the agent's DaemonSet, and so every mover pod, mounts an empty folder."""

_PREFIX: Final = "datamover-"


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
def open_work_folder(environment: Mapping[str, str], cache_volume: str = "") -> Iterator[WorkFolder]:
    """Make a work folder, and remove it at the end.

    It is made in `VELERO_SCRATCH_DIR`, `/scratch`, or the system's folder for temporary
    files, whichever can be written to first: the root file system may be read-only.

    Raises:
        ConfigError: none of them can be written to.
    """
    tried = [environment.get("VELERO_SCRATCH_DIR", ""), _SCRATCH, ""]
    for parent in tried:
        if parent and not Path(parent).is_dir():
            continue
        try:
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent or None, ignore_cleanup_errors=True)
        except OSError:
            continue
        with folder as name:
            path = Path(name)
            cache = (Path(cache_volume) if cache_volume else path) / "kopia-cache"
            yield WorkFolder(path, cache)
        return
    raise ConfigError("no folder can be written to: mount one at /scratch, or name it by VELERO_SCRATCH_DIR")
