"""The file systems of a mover pod: its volume, its cache, its scratch volume, its Events, and what it inherits.

The scratch volume holds everything that a mover may write: temporary files, and below them
the mount points of volume and cache. The root file system is read-only, and so is every other mount,
except the one that holds a repository in a directory. kopia touches `<target>.kopia-entry` beside the
target of a restore, which is in the scratch volume for that reason.
Source: kopia 0.23.1, snapshot/restore/local_fs_output.go, placeholders of shallow restores.

Does no I/O.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, cast

from core.contract import EVENTS_VARIABLE, VolumeMode
from core.kube.types import EnvVar, Manifest, Volume, VolumeDevice, VolumeMount, VolumeSource
from exposer.host_pods import EVENTS_VOLUME
from exposer.settings import RepositoryMount, StorageAccess
from exposer.template import AgentTemplate

__all__ = ["MoverVolume", "OwnVolumes", "PodFiles", "build_pod_files"]

_SCRATCH_VARIABLE: Final = "VELERO_SCRATCH_DIR"
_SCRATCH_PATH: Final = "/scratch"
_SCRATCH_VOLUME: Final = "mover-scratch"

_VOLUME_NAME: Final = "volume"
_CACHE_NAME: Final = "cache"
"""Mount points in the scratch volume: short, since every byte shortens the paths that fit into PATH_MAX."""

_EVENTS_PATH: Final = "/mover-events"
"""Outside of the scratch volume, in which kopia is confined."""

_REPOSITORY_VOLUME: Final = "mover-repository"

_PRIVATE_SOURCES: Final = ("emptyDir", "ephemeral")
"""Volumes that every pod has for itself."""

_CREDENTIALS_VOLUME: Final = "cloud-credentials"
"""The volume with the credentials of locations that have none of their own.

Source: Velero v1.18, pkg/install/daemonset.go.
"""


@dataclass(frozen=True)
class MoverVolume:
    """The volume of a mover: a `v1.Volume` without its name, and how it is mounted.

    `propagation` is the mount propagation; empty: none.
    """

    source: VolumeSource
    mode: VolumeMode = VolumeMode.FILESYSTEM
    read_only: bool = False
    propagation: str = ""


@dataclass(frozen=True)
class OwnVolumes:
    """The volumes of one mover, named after the UID of its custom resource.

    `moved` is the volume that is backed up or restored, `cache_claim` the PVC for kopia's cache;
    empty: the cache is in the scratch volume. `repository` is the shared volume with the repository.
    With `events`, there is one in which the agent of the node finds the mover's Events.
    """

    uid: str
    moved: MoverVolume | None = None
    cache_claim: str = ""
    repository: RepositoryMount | None = None
    events: bool = False


@dataclass(frozen=True)
class PodFiles:
    """Fields of a pod and its container, as JSON dicts, and the paths that they result in.

    A path is empty if there is no such volume; `volume_path` is a directory, or a device.
    """

    volumes: list[Volume]
    mounts: list[VolumeMount]
    devices: list[VolumeDevice]
    env: list[EnvVar]
    volume_path: str
    cache_path: str


def build_pod_files(own: OwnVolumes, template: AgentTemplate, storage: StorageAccess) -> PodFiles:
    """Return the file systems of the mover pod with these volumes.

    Args:
        own: its own volumes.
        template: what mover pods inherit.
        storage: what the pod needs to reach the bucket.
    """
    uid, volume, scratch = own.uid, own.moved, _scratch_path(template)
    block = volume is not None and volume.mode is VolumeMode.BLOCK
    # A device node cannot be created in a file system of the node.
    volume_path = "" if volume is None else f"/{uid}" if block else f"{scratch}/{_VOLUME_NAME}"
    cache_path = f"{scratch}/{_CACHE_NAME}" if own.cache_claim else ""
    mounts = _inherited_mounts(template, storage, scratch)
    if own.repository is not None:
        # An own mount of the agent at the same path would be a second one.
        mounts = [each for each in mounts if posixpath.normpath(each["mountPath"]) != own.repository.mount_path]
    mounted = {mount["name"] for mount in mounts}
    inherited = [each for each in template.volumes if each["name"] in mounted]
    if not any(mount["mountPath"] == scratch for mount in mounts):
        inherited.append({"name": _SCRATCH_VOLUME, "emptyDir": {}})
        mounts.insert(0, {"name": _SCRATCH_VOLUME, "mountPath": scratch})
    env = _build_env(template)
    if own.events:
        inherited.append({"name": EVENTS_VOLUME, "emptyDir": {}})
        mounts.append({"name": EVENTS_VOLUME, "mountPath": _EVENTS_PATH})
        env.append({"name": EVENTS_VARIABLE, "value": _EVENTS_PATH})
    volumes: list[Volume] = []
    if volume is not None:
        volumes.append({"name": uid, **volume.source})
        if not block:
            mounts.append(_mount_volume(uid, volume, volume_path))
    if (shared := own.repository) is not None:
        volumes.append({"name": _REPOSITORY_VOLUME, **_restrict(shared.source, read_only=storage.read_only)})
        mounts.append(_mount(_REPOSITORY_VOLUME, shared.mount_path, read_only=storage.read_only))
    if own.cache_claim:
        volumes.append({"name": f"{uid}-cache", "persistentVolumeClaim": {"claimName": own.cache_claim}})
        mounts.append({"name": f"{uid}-cache", "mountPath": cache_path})
    devices: list[VolumeDevice] = [{"name": uid, "devicePath": volume_path}] if block else []
    return PodFiles([*volumes, *inherited], mounts, devices, env, volume_path, cache_path)


def _restrict(source: VolumeSource, *, read_only: bool) -> VolumeSource:
    """Return the volume's source; a read-only one has no other mount either that could be written to."""
    fields = cast("Mapping[str, Manifest]", source)
    restricted = {kind: {**part, "readOnly": True} if read_only else part for kind, part in fields.items()}
    return cast("VolumeSource", restricted)


def _mount(name: str, path: str, *, read_only: bool) -> VolumeMount:
    mount: VolumeMount = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return mount


def _mount_volume(uid: str, volume: MoverVolume, path: str) -> VolumeMount:
    mount = _mount(uid, path, read_only=volume.read_only)
    if volume.propagation:
        mount["mountPropagation"] = volume.propagation
    return mount


def _inherited_mounts(template: AgentTemplate, storage: StorageAccess, scratch: str) -> list[VolumeMount]:
    """Return the inherited mounts without those that this mover must not have."""
    private = {each["name"] for each in template.volumes if any(source in each for source in _PRIVATE_SOURCES)}
    mounts: list[VolumeMount] = []
    for mount in template.volume_mounts:
        path = posixpath.normpath(mount["mountPath"])
        if mount["name"] == _CREDENTIALS_VOLUME and not storage.inherits_credentials:
            continue
        if path == scratch:
            # Movers of different tenants must not see each other's temporary files.
            if mount["name"] in private:
                mounts.append(mount | {"mountPath": scratch})
        elif _holds(path, storage.directory) and not storage.read_only:
            mounts.append(mount)
        else:
            mounts.append(mount | {"readOnly": True})
    return mounts


def _holds(path: str, directory: str) -> bool:
    return bool(directory) and PurePosixPath(posixpath.normpath(directory)).is_relative_to(path)


def _scratch_path(template: AgentTemplate) -> str:
    """Return the directory for temporary files that the agent's environment names, or the default."""
    for variable in template.env:
        if variable.get("name") == _SCRATCH_VARIABLE and variable.get("value"):
            return posixpath.normpath(str(variable["value"]))
    return _SCRATCH_PATH


def _build_env(template: AgentTemplate) -> list[EnvVar]:
    if any(variable.get("name") == _SCRATCH_VARIABLE for variable in template.env):
        return list(template.env)
    return [*template.env, {"name": _SCRATCH_VARIABLE, "value": _SCRATCH_PATH}]
