"""What all objects of an installation have in common, and the resources that they are."""

from collections.abc import Mapping
from typing import Any, Final

from core.kube import resources as kube
from core.kube.resources import Resource
from core.kube.types import Manifest
from core.models.names import PART_OF_LABELS

__all__ = ["build_object", "place_of", "resource_of"]

_RESOURCES: Final = {
    resource.kind: resource
    for resource in (
        kube.BACKUP_STORAGE_LOCATIONS,
        kube.CLUSTER_ROLES,
        kube.CLUSTER_ROLE_BINDINGS,
        kube.CONFIG_MAPS,
        kube.CUSTOM_RESOURCE_DEFINITIONS,
        kube.DAEMON_SETS,
        kube.JOBS,
        kube.LEASES,
        kube.NAMESPACES,
        kube.NETWORK_POLICIES,
        kube.PRIORITY_CLASSES,
        kube.ROLES,
        kube.ROLE_BINDINGS,
        kube.SECRETS,
        kube.SECURITY_CONTEXT_CONSTRAINTS,
        kube.SERVICE_ACCOUNTS,
    )
}


def build_object(api_version: str, kind: str, name: str, namespace: str = "") -> Manifest:
    """Return an object without content; without `namespace` it is cluster-scoped."""
    metadata: Manifest = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": {**metadata, "labels": dict(PART_OF_LABELS)}}


def resource_of(manifest: Mapping[str, Any]) -> Resource:
    """Return the resource of an object of an installation, or of one that agents create."""
    return _RESOURCES[manifest["kind"]]


def place_of(obj: Mapping[str, Any]) -> str:
    """Return kind, namespace and name of an object as text, such as `DaemonSet velero/node-agent`."""
    meta = obj["metadata"]
    return f"{obj['kind']} {'/'.join(meta[key] for key in ('namespace', 'name') if meta.get(key))}"
