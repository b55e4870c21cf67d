"""Whether the volume of a workload pod is mounted, or only its mount point exists.

After a reboot of the node, the mover may start before the kubelet has mounted the volume again: it would back
up an empty directory, or restore into one.
Source: Kubernetes v1.34, the plugin names in pkg/volume/*; proc_pid_mountinfo(5).
"""

import re
from pathlib import Path
from typing import Final

from core.errors import DataPathError

__all__ = ["MOUNTS", "check_mounted"]

MOUNTS: Final = Path("/proc/self/mountinfo")

_ROOT, _POINT = 3, 4
"""The fields of a line: the root of the mount within its file system, and the mount point."""

_NOT_MOUNTED: Final = re.compile(
    r"/pods/[^/]+/volumes/kubernetes\.io~(?:csi|local-volume|nfs|iscsi|fc|cephfs|rbd)/[^/]+(?:/mount)?(?://deleted)?$"
)
"""The root of a mount that is a mount point of the kubelet: a mounted volume has its own root. These plugins mount
every volume.

An `emptyDir` is a plain directory, and a flexVolume driver decides for itself.
"""


def check_mounted(volume: Path, mounts: Path = MOUNTS) -> None:
    """Check that `volume`, a mount point of this process, is not a kubelet's own directory.

    Does not touch the volume, which may hang.

    Raises:
        DataPathError: it is one.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        # Not Linux.
        return
    # Of several mounts on one point, the last one is visible.
    roots = [fields[_ROOT] for line in lines if len(fields := line.split()) > _POINT and fields[_POINT] == str(volume)]
    if roots and _NOT_MOUNTED.search(roots[-1]):
        raise DataPathError(f"volume of the workload pod is not mounted on the node: {roots[-1]} is a plain directory")
