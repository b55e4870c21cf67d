"""Where a test bed keeps its files. All of it is below one temporary folder, which the janitor removes."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The project's folder."""

_ON_DISK = "/var/tmp"


@dataclass(frozen=True)
class Layout:
    """The folders and files of one test bed."""

    base: Path

    @property
    def logs(self) -> Path:
        """One file for each component, and the audit log of the API server."""
        return self.base / "logs"

    @property
    def volumes(self) -> Path:
        """Where the volumes of the storage are: of each, its mounted file system, or a link to its device."""
        return self.base / "volumes"

    @property
    def s3(self) -> Path:
        """The S3 server's buckets, each a folder."""
        return self.base / "s3"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.base / "control-plane" / "admin.kubeconfig"

    def node(self, index: int) -> Path:
        """What one node keeps: images, containers, configuration."""
        return self.base / f"node-{index}"


def make_layout() -> Layout:
    """A new folder that is on a disk, as images and volumes are too large for memory."""
    parent = tempfile.gettempdir()
    if _file_system(Path(parent)) == "tmpfs":
        parent = _ON_DISK
    return Layout(Path(tempfile.mkdtemp(prefix="node-agent-bed-", dir=parent)))


def _file_system(path: Path) -> str:
    """The type of the file system that holds an existing path."""
    best, found = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mountpoint, kind, *_ = line.split(" ")
        if path.is_relative_to(mountpoint) and len(mountpoint) >= len(best):
            best, found = mountpoint, kind
    return found
