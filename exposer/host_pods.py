"""The kubelet's pods directory, as the agent has it mounted: which pods are in it, and where their volumes are.

Lists directories of the kubelet. Never opens what is mounted in them: it belongs to tenants, and the
server behind it may hang.
"""

from pathlib import Path
from typing import Final

from core.errors import ExposeError
from exposer.workload import join_directory, pod_of_directory, split_directory

__all__ = ["find_volume_directory", "list_pods"]

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
