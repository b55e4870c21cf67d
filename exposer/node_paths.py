"""Paths on nodes, which are not those of this process: the node may run Linux or Windows.

Does no I/O, so that either agent can be tested on any machine.
Source: Velero v1.18.2, pkg/exposer/host_path.go (ExtractPodVolumeHostPath): backslashes on Windows, also where the
DaemonSet's path has none.
"""

import ntpath
import posixpath
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Final

from exposer.placement import WINDOWS

__all__ = ["node_path", "overlap", "parse_node_path"]

_SYSTEM_DRIVE: Final = PureWindowsPath("C:/")
"""Where a path without a drive is."""


def parse_node_path(path: str, *, node_os: str) -> PurePath:
    r"""Return `path`, an absolute path as manifests have it, in normal form.

    A manifest may have `/` in a path of Windows, and no drive: `/var/lib/kubelet`, which is `\var\lib\kubelet` then.
    """
    if node_os == WINDOWS:
        return PureWindowsPath(ntpath.normpath(path))
    # Two slashes at the start are one: POSIX leaves their meaning open.
    return PurePosixPath("/" + posixpath.normpath(path).lstrip("/"))


def node_path(path: str) -> PurePath:
    """Return `path`, a result of `parse_node_path` as text or a path below it: only those of Linux start with `/`."""
    return PurePosixPath(path) if path.startswith("/") else PureWindowsPath(path)


def overlap(one: PurePath, other: PurePath) -> bool:
    """Return whether one of two results of `parse_node_path` for the same system is the other, or in it."""
    if isinstance(one, PureWindowsPath):
        one, other = _SYSTEM_DRIVE / one, _SYSTEM_DRIVE / other
    return one.is_relative_to(other) or other.is_relative_to(one)
