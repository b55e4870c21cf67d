"""The kubelet's folder of pods, as the agent has it mounted: which pods are in it, and where their volumes are.

Lists folders of the kubelet. Never opens what is mounted in them: it belongs to tenants, and the
server behind it may hang.
"""

from pathlib import Path
from typing import Final

from core.errors import ExposeError
from exposer.workload import join_folder, split_folder

__all__ = ["find_volume_folder", "list_pods"]

_SHOWN: Final = 10
"""Folders that fit into a message; a pod rarely has more volumes."""


def list_pods(host_pods: str) -> frozenset[str]:
    """Return the names in `host_pods`, a path in the agent's container: UIDs, or hashes of static pods.

    Raises:
        OSError: it cannot be read.
    """
    return frozenset(path.name for path in Path(host_pods).iterdir())


def find_volume_folder(host_pods: str, folder: str, *, what: str) -> str:
    """Return the folder on the node in which the kubelet has mounted a volume, whichever plugin did it.

    That is `folder` if it exists, or if the agent cannot look: its mover then reports what is
    wrong with it.

    Args:
        host_pods: the kubelet's folder of pods, as the agent has it mounted.
        folder: a result of `exposer.workload.build_volume_folder`, with the plugin's expected name.
        what: the volume, for messages.

    Raises:
        ExposeError: the volume is in no folder of its pod, or in several.

    Source: Velero v1.18, pkg/exposer/host_path.go (GetPodVolumeHostPath).
    """
    pod_folder, plugin, name = split_folder(folder)
    try:
        list_pods(host_pods)
        volumes = _list_volumes(Path(host_pods, Path(pod_folder).name, "volumes"))
    except OSError:
        return folder
    matching = [each for each, names in volumes.items() if name in names]
    if plugin in matching:
        return folder
    if not matching:
        found = _describe([f"{each}/{other}" for each, names in volumes.items() for other in names])
        raise ExposeError(
            f"{what} is not in the kubelet's folders of the pod: looked for volumes/*/{name}, found {found}"
        )
    if len(matching) > 1:
        found = _describe([f"{each}/{name}" for each in matching])
        raise ExposeError(f"{what} is in several of the kubelet's folders of the pod: {found}")
    return join_folder(pod_folder, matching[0], name)


def _list_volumes(folder: Path) -> dict[str, list[str]]:
    """Return the names of the volumes in a pod's folder by plugin, both in order."""
    return {plugin: _list(folder / plugin) for plugin in _list(folder)}


def _list(folder: Path) -> list[str]:
    """Return the names in `folder` in order; none if it does not exist."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _describe(folders: list[str]) -> str:
    more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
    return f"{', '.join(folders[:_SHOWN])}{more}" or "nothing"
