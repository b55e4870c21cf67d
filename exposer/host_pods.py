"""The kubelet's pods directory, as the agent has it mounted: its pods, their volumes, and termination messages.

Lists directories of the kubelet, and reads the files in which it collects termination messages. Never opens what is
mounted in the volumes of workloads: it belongs to tenants, and the server behind it may hang.
"""

import os
from pathlib import Path
from typing import Final

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES
from core.errors import ExposeError
from core.files import read_start
from exposer.workload import join_directory, pod_of_directory, split_directory

__all__ = ["EVENTS_VOLUME", "find_mover_events", "find_volume_directory", "list_pods", "read_termination_message"]

EVENTS_VOLUME: Final = "mover-events"
"""The emptyDir of a mover pod in which its Events are files."""

_SHOWN: Final = 10
"""Directories that fit into a message; a pod rarely has more volumes."""


def list_pods(host_pods: str) -> frozenset[str]:
    """Return the names in `host_pods`, a path in the agent's container: UIDs, or hashes of static pods.

    Raises:
        OSError: it cannot be read.
    """
    return frozenset(path.name for path in Path(host_pods).iterdir())


def find_volume_directory(host_pods: str, directory: str, *, what: str) -> str:
    """Return the directory on the node in which the kubelet has mounted a volume, whichever plugin did it.

    That is `directory` if it exists, or if the agent cannot list it: the mover then reports the cause.

    Args:
        host_pods: the kubelet's pods directory, as the agent has it mounted.
        directory: a result of `exposer.workload.build_volume_directory`, with the plugin's expected name.
        what: the volume, for messages.

    Raises:
        ExposeError: the volume is in no directory of its pod, or in several.

    Source: Velero v1.18, pkg/exposer/host_path.go (GetPodVolumeHostPath).
    """
    pod_directory, plugin, name = split_directory(directory)
    try:
        list_pods(host_pods)
        volumes = _list_volumes(Path(host_pods, pod_of_directory(directory), "volumes"))
    except OSError:
        return directory
    matching = [each for each, names in volumes.items() if name in names]
    if plugin in matching:
        return directory
    if not matching:
        found = _describe([f"{each}/{other}" for each, names in volumes.items() for other in names])
        raise ExposeError(
            f"{what} is not in the kubelet's directories of the pod: looked for volumes/*/{name}, found {found}"
        )
    if len(matching) > 1:
        found = _describe([f"{each}/{name}" for each in matching])
        raise ExposeError(f"{what} is in several of the kubelet's directories of the pod: {found}")
    return join_directory(pod_directory, matching[0], name)


def find_mover_events(host_pods: str, uid: str) -> Path | None:
    """Return the directory with the Events of the mover pod `uid`; None if it has none, or one that cannot be read.

    Source: Kubernetes v1.34, pkg/volume/emptydir/empty_dir.go (getPath).
    """
    directory = Path(host_pods, uid, "volumes", "kubernetes.io~empty-dir", EVENTS_VOLUME)
    # SELinux may deny the agent what the mode permits.
    return directory if host_pods and os.access(directory, os.R_OK | os.X_OK) else None


def read_termination_message(host_pods: str, uid: str, container: str) -> str:
    """Return what a container of the pod `uid` has left as termination message so far; empty if that is nothing.

    The kubelet reports the same once it knows that the container has ended, up to a second later. The container can
    write into the file, but not exchange it: the file alone is mounted.

    Source: Kubernetes v1.34, pkg/kubelet/kuberuntime/kuberuntime_container.go (makeMounts): a file with a name of its
    own for each start of the container, in `<pods>/<uid>/containers/<name>`.
    """
    directory = Path(host_pods, uid, "containers", container)
    try:
        messages = [_read_start(directory / name) for name in _list(directory)]
    except OSError:
        return ""
    return next(filter(None, messages), "")


def _read_start(file: Path) -> str:
    """Return the text of a regular file up to the limit of termination messages; empty if it cannot be read."""
    try:
        return read_start(file, TERMINATION_MESSAGE_LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _list_volumes(directory: Path) -> dict[str, list[str]]:
    """Return the names of the volumes in a pod's directory by plugin, both in order."""
    return {plugin: _list(directory / plugin) for plugin in _list(directory)}


def _list(directory: Path) -> list[str]:
    """Return the names in `directory` in order; none if it does not exist."""
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _describe(directories: list[str]) -> str:
    more = f" and {len(directories) - _SHOWN} more" if len(directories) > _SHOWN else ""
    return f"{', '.join(directories[:_SHOWN])}{more}" or "nothing"
