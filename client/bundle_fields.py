"""What a support bundle may have of each object: an allow-list of fields, and the redaction of what they hold.

Pure. A field that is not listed is left out, whatever its kind: no Secret, no value of an environment variable, no
annotation of another owner. What is listed is redacted, keys too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from core.kube import resources as kube
from core.kube.resources import Resource
from core.kube.types import Event, Object
from core.models.base import JsonDict
from core.models.names import (
    AGENT_DAEMONSET,
    AGENT_DAEMONSET_WINDOWS,
    AGENT_SELECTOR,
    OWNER_UID_LABEL,
    REPO_NAME_LABEL,
)
from core.redact import redact, redact_lines, redact_values

__all__ = ["COLLECTED", "CONFIG_MAP_FIELDS", "Collected", "select_fields"]

_Fields: TypeAlias = "bool | Mapping[str, _Fields]"
"""True: a text, number or truth value, or a list of them. A mapping: these fields, of each element of a list; a key
that ends in `*` stands for all keys that begin so."""


def _texts(words: str) -> "_Fields":
    return dict.fromkeys(words.split(), True)


_ALL: Final[_Fields] = {"*": True}
"""The texts of a map, under any key."""

_CONDITIONS: Final[_Fields] = _texts("type status reason message lastTransitionTime lastProbeTime")
_META: Final[_Fields] = {
    "name": True,
    "namespace": True,
    "generateName": True,
    "uid": True,
    "generation": True,
    "creationTimestamp": True,
    "deletionTimestamp": True,
    "finalizers": True,
    "labels": _ALL,
    "annotations": {"nodeagent.io/*": True, "velero.io/*": True},
    "ownerReferences": {"kind": True, "name": True, "uid": True, "controller": True},
}
_POD_REFERENCE: Final[_Fields] = {"namespace": True, "name": True, "uid": True}
_TRANSFER: Final[_Fields] = {
    "spec": {
        "backupStorageLocation": True,
        "cancel": True,
        "datamover": True,
        "dataMoverConfig": _ALL,
        "uploaderSettings": _ALL,
        "uploaderType": True,
        "operationTimeout": True,
        "parentSnapshot": True,
        "sourceNamespace": True,
        "sourcePVC": True,
        "snapshotType": True,
        "snapshotID": True,
        "snapshotSize": True,
        "csiSnapshot": {"volumeSnapshot": True, "storageClass": True, "snapshotClass": True, "driver": True},
        "targetVolume": {"pvc": True, "pv": True, "namespace": True},
        "pod": _POD_REFERENCE,
        "node": True,
        "nodeOS": True,
        "volume": True,
        "tags": _ALL,
    },
    "status": {
        "phase": True,
        "message": True,
        "progress": {"totalBytes": True, "bytesDone": True},
        "acceptedTimestamp": True,
        "startTimestamp": True,
        "completionTimestamp": True,
        "acceptedByNode": True,
        "node": True,
        "nodeOS": True,
        "path": True,
        "snapshotID": True,
        "incrementalBytes": True,
    },
}
_CONTAINER: Final[_Fields] = {
    "name": True,
    "image": True,
    "imagePullPolicy": True,
    "command": True,
    "args": True,
    "resources": {"requests": _ALL, "limits": _ALL},
    "volumeMounts": {"name": True, "mountPath": True, "readOnly": True, "mountPropagation": True},
    "volumeDevices": {"name": True, "devicePath": True},
    "env": {"name": True},
}
"""Of environment variables the names alone."""

_STATE: Final[_Fields] = {
    key: {"reason": True, "message": True, "exitCode": True, "signal": True, "startedAt": True, "finishedAt": True}
    for key in ("waiting", "running", "terminated")
}
_CONTAINER_STATUS: Final[_Fields] = {
    "name": True,
    "ready": True,
    "restartCount": True,
    "image": True,
    "imageID": True,
    "state": _STATE,
    "lastState": _STATE,
}
_VOLUME: Final[_Fields] = {
    "name": True,
    "persistentVolumeClaim": {"claimName": True},
    "hostPath": {"path": True, "type": True},
    "emptyDir": {"medium": True, "sizeLimit": True},
}
_POD_SPEC: Final[_Fields] = {
    "nodeName": True,
    "nodeSelector": _ALL,
    "serviceAccountName": True,
    "priorityClassName": True,
    "priority": True,
    "hostNetwork": True,
    "restartPolicy": True,
    "schedulerName": True,
    "containers": _CONTAINER,
    "initContainers": _CONTAINER,
    "volumes": _VOLUME,
    "tolerations": {"key": True, "operator": True, "value": True, "effect": True, "tolerationSeconds": True},
}
_POD: Final[_Fields] = {
    "spec": _POD_SPEC,
    "status": {
        "phase": True,
        "reason": True,
        "message": True,
        "startTime": True,
        "qosClass": True,
        "conditions": _CONDITIONS,
        "containerStatuses": _CONTAINER_STATUS,
        "initContainerStatuses": _CONTAINER_STATUS,
    },
}
_WORKLOAD: Final[_Fields] = {
    "spec": {
        "replicas": True,
        "backoffLimit": True,
        "template": {"metadata": {"labels": _ALL}, "spec": _POD_SPEC},
        "updateStrategy": {"type": True},
    },
    "status": {"*": True, "conditions": _CONDITIONS},
}
_REPOSITORY: Final[_Fields] = {
    "spec": {
        "volumeNamespace": True,
        "backupStorageLocation": True,
        "repositoryType": True,
        "maintenanceFrequency": True,
        "repositoryConfig": _ALL,
    },
    "status": {
        "phase": True,
        "message": True,
        "lastMaintenanceTime": True,
        "recentMaintenance": {"result": True, "startTimestamp": True, "completeTimestamp": True, "message": True},
    },
}
_LOCATION: Final[_Fields] = {
    "spec": {
        "provider": True,
        "accessMode": True,
        "default": True,
        "validationFrequency": True,
        "backupSyncPeriod": True,
        "objectStorage": {"bucket": True, "prefix": True},
        "credential": {"name": True, "key": True},
        "config": _texts(
            "region profile s3Url s3ForcePathStyle insecureSkipTLSVerify storageAccount resourceGroup subscriptionId "
            "useAAD fspath"
        ),
    },
    "status": {"phase": True, "message": True, "lastValidationTime": True, "lastSyncedTime": True},
}
_NODE: Final[_Fields] = {
    "spec": {"unschedulable": True, "taints": {"key": True, "value": True, "effect": True}},
    "status": {
        "allocatable": _ALL,
        "conditions": _CONDITIONS,
        "nodeInfo": _texts("architecture operatingSystem osImage kernelVersion kubeletVersion containerRuntimeVersion"),
    },
}
_EVENT: Final[_Fields] = {
    "type": True,
    "reason": True,
    "message": True,
    "count": True,
    "firstTimestamp": True,
    "lastTimestamp": True,
    "eventTime": True,
    "involvedObject": {"kind": True, "namespace": True, "name": True, "uid": True},
    "source": {"component": True, "host": True},
}
_DEFINITION: Final[_Fields] = {
    "spec": {"group": True, "scope": True, "versions": {"name": True, "served": True, "storage": True}},
    "status": {"storedVersions": True, "conditions": _CONDITIONS},
}
_CLASS: Final[_Fields] = _texts(
    "provisioner driver reclaimPolicy deletionPolicy volumeBindingMode allowVolumeExpansion"
)
CONFIG_MAP_FIELDS: Final[_Fields] = {"data": _ALL}
"""Of the ConfigMaps that agents are configured with; of no others."""


@dataclass(frozen=True)
class Collected:
    """One list of objects in a bundle: which, those that `keeps` chooses, and their fields beside the metadata."""

    resource: Resource
    fields: _Fields
    selector: str = ""
    name: str = ""
    keeps: Callable[[Any], bool] = lambda _: True

    @property
    def file(self) -> str:
        """Where it is in the bundle."""
        return f"objects/{self.name or self.resource.plural}.json"


def _is_agents(raw: Object) -> bool:
    return raw["metadata"]["name"] in {AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS}


def _is_of_collected(event: Event) -> bool:
    involved = event.get("involvedObject")
    return isinstance(involved, dict) and involved.get("kind") in {one.resource.kind for one in COLLECTED}


COLLECTED: Final = (
    Collected(kube.DATA_UPLOADS, _TRANSFER),
    Collected(kube.DATA_DOWNLOADS, _TRANSFER),
    Collected(kube.POD_VOLUME_BACKUPS, _TRANSFER),
    Collected(kube.POD_VOLUME_RESTORES, _TRANSFER),
    Collected(kube.BACKUP_REPOSITORIES, _REPOSITORY),
    Collected(kube.BACKUP_STORAGE_LOCATIONS, _LOCATION),
    Collected(kube.PODS, _POD, selector=AGENT_SELECTOR, name="pods-of-agents"),
    Collected(kube.PODS, _POD, selector=OWNER_UID_LABEL, name="pods-of-transfers"),
    Collected(kube.PERSISTENT_VOLUME_CLAIMS, {"status": {"phase": True}}, selector=OWNER_UID_LABEL),
    Collected(kube.JOBS, _WORKLOAD, selector=REPO_NAME_LABEL),
    Collected(kube.DAEMON_SETS, _WORKLOAD, keeps=_is_agents),
    Collected(kube.EVENTS, _EVENT, keeps=_is_of_collected),
    Collected(kube.NODES, _NODE),
    Collected(kube.CUSTOM_RESOURCE_DEFINITIONS, _DEFINITION),
    Collected(kube.STORAGE_CLASSES, _CLASS),
    Collected(kube.VOLUME_SNAPSHOT_CLASSES, _CLASS),
)
"""All lists of objects that a bundle has; namespaced kinds are read in the agents' namespace."""


def select_fields(raw: Mapping[str, Any], fields: _Fields) -> JsonDict:
    """Return what a bundle has of an object as JSON dict: its identity and these fields, redacted."""
    known: dict[str, _Fields] = {"apiVersion": True, "kind": True, "metadata": _META}
    chosen = _select(raw, known | dict(fields) if isinstance(fields, Mapping) else known)
    return redact_values(chosen, redact_lines) if isinstance(chosen, dict) else {}


_NOTHING: Final = object()


def _select(value: object, fields: _Fields) -> object:
    """Return the chosen part of a JSON value, its keys redacted; `_NOTHING` if nothing of it is chosen."""
    if not fields:
        return _NOTHING
    if isinstance(value, list):
        return [part for each in value if (part := _select(each, fields)) is not _NOTHING]
    if isinstance(fields, Mapping):
        if not isinstance(value, dict):
            return _NOTHING
        parts = {key: _select(part, _fields_of(key, fields)) for key, part in value.items()}
        return {redact(key): part for key, part in parts.items() if part is not _NOTHING}
    if isinstance(value, dict):
        return _NOTHING
    return value


def _fields_of(key: str, fields: Mapping[str, _Fields]) -> _Fields:
    if key in fields:
        return fields[key]
    patterns = (pattern for pattern in fields if pattern.endswith("*") and key.startswith(pattern[:-1]))
    return next((fields[pattern] for pattern in patterns), False)
