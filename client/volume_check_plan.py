"""What a check of a volume works with: the agents' image, a storage class and the snapshot class of its driver."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from client.installation import read_ready_image
from client.permissions import VOLUME_CHECK_PERMISSIONS
from client.volume_check_objects import DEFAULT_SPACE, CheckPlan
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.types import Object, StorageClass, VolumeSnapshotClass
from core.models.storage import BackupStorageLocation
from nodeagent.runtime.permissions import Permission, Scope
from nodeagent.runtime.preflight import missing_permissions

__all__ = ["CheckChoice", "plan_check"]

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_DEFAULT_SNAPSHOT_CLASS = "snapshot.storage.kubernetes.io/is-default-class"
"""Annotations. Source: Kubernetes v1.34, "Storage Classes"; external-snapshotter v8."""


@dataclass(frozen=True)
class CheckChoice:
    """What the user chose; empty: the default of the cluster, or a namespace of the check's own."""

    storage_class: str = ""
    snapshot_class: str = ""
    space: str = ""
    location: str = "default"
    size: str = "64Mi"


async def plan_check(client: KubeClient, namespace: str, choice: CheckChoice) -> CheckPlan:
    """Return the plan of a check by the agents of the namespace.

    Raises:
        ConfigError: a permission, the agents, the location or a class is missing; the message says which flag names it.
        KubeError: the API server rejected a request.
    """
    await _check_user(client, namespace, choice.space)
    image = await read_ready_image(client, namespace, "--namespace")
    await _check_location(client, namespace, choice.location)
    if choice.space and await client.read(kube.NAMESPACES, "", choice.space) is None:
        raise ConfigError(f"--namespace-for-test: Namespace {choice.space} does not exist")
    storage_class = await _find_class(client, choice.storage_class)
    driver = storage_class.get("provisioner", "")
    snapshot_class = await _find_snapshot_class(client, choice.snapshot_class, driver)
    return CheckPlan(
        id=secrets.token_hex(3),
        namespace=namespace,
        space=choice.space or DEFAULT_SPACE,
        image=image,
        size=choice.size,
        storage_class=storage_class["metadata"]["name"],
        snapshot_class=_name(snapshot_class),
        driver=driver,
        location=choice.location,
        retaining=(
            *_retaining("StorageClass", storage_class, "reclaimPolicy"),
            *_retaining("VolumeSnapshotClass", snapshot_class, "deletionPolicy"),
        ),
    )


def _retaining(kind: str, found: Mapping[str, Any], policy: str) -> list[str]:
    return [f"{kind} {_name(found)} has {policy} Retain"] if found.get(policy) == "Retain" else []


async def _check_user(client: KubeClient, namespace: str, space: str) -> None:
    """Check the permissions; with `space`, those on its objects in it alone."""
    needed = [one for one in VOLUME_CHECK_PERMISSIONS if not one.without]
    moved = [one for one in needed if space and _is_of_space(one)]
    missing = [*(await missing_permissions(client, namespace, [one for one in needed if one not in moved])).values()]
    if moved:
        # A Role may permit to get its own namespace.
        there = [replace(one, scope=Scope.OWN_NAMESPACE) for one in moved if one.resource is not kube.NAMESPACES]
        there.append(Permission(Scope.OWN_NAMESPACE, kube.NAMESPACES, ("get",), "whether it exists", names=(space,)))
        found = (await missing_permissions(client, space, there)).values()
        missing += [text.replace("in its namespace", f"in namespace {space}") for text in found]
    if missing:
        raise ConfigError(f"permissions missing: {'; '.join(missing)}: docs/permissions.md has the list")


def _is_of_space(permission: Permission) -> bool:
    resource = permission.resource
    return permission.scope is Scope.CLUSTER and (resource.namespaced or resource is kube.NAMESPACES)


async def _check_location(client: KubeClient, namespace: str, name: str) -> None:
    place = f"BackupStorageLocation {namespace}/{name}"
    raw = await client.read(kube.BACKUP_STORAGE_LOCATIONS, namespace, name)
    if raw is None:
        raise ConfigError(f"{place} does not exist: --storage-location names another")
    location = BackupStorageLocation.parse(raw)
    if not location.available:
        raise ConfigError(f"{place} is {location.status.phase}: {location.status.message or 'no reason'}")
    if location.read_only:
        raise ConfigError(f"{place} is read-only: --storage-location names another")


async def _find_class(client: KubeClient, name: str) -> StorageClass:
    if name:
        found = await client.read(kube.STORAGE_CLASSES, "", name)
        if found is None:
            raise ConfigError(f"--storage-class: StorageClass {name} does not exist")
        return found
    classes = await client.list(Selection(kube.STORAGE_CLASSES))
    default = [one for one in classes if _has(one, _DEFAULT_CLASS)]
    if len(default) != 1:
        problem = "there is no default StorageClass" if not default else "there are several default StorageClasses"
        raise ConfigError(f"{problem}: --storage-class names one of {_names(classes)}")
    return default[0]


async def _find_snapshot_class(client: KubeClient, name: str, driver: str) -> VolumeSnapshotClass:
    classes = [
        one for one in await client.list(Selection(kube.VOLUME_SNAPSHOT_CLASSES)) if not name or _name(one) == name
    ]
    if name and not classes:
        raise ConfigError(f"--volume-snapshot-class: VolumeSnapshotClass {name} does not exist")
    fitting = [one for one in classes if one.get("driver") == driver]
    if name and not fitting:
        other = classes[0].get("driver")
        raise ConfigError(f"--volume-snapshot-class: {name} is of driver {other}, and the storage class of {driver}")
    chosen = [one for one in fitting if _has(one, _DEFAULT_SNAPSHOT_CLASS)] if len(fitting) > 1 else fitting
    if len(chosen) != 1:
        known = _names(fitting or classes)
        raise ConfigError(
            f"no single VolumeSnapshotClass of driver {driver}: --volume-snapshot-class names one of {known}"
        )
    return chosen[0]


def _has(obj: Object, annotation: str) -> bool:
    return (obj["metadata"].get("annotations") or {}).get(annotation) == "true"


def _name(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["name"])


def _names(objects: Sequence[Object]) -> str:
    return ", ".join(sorted(map(_name, objects))) or "none"
