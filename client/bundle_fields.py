"""What a support bundle may have of each object: an allow-list of fields, and the redaction of what they hold.

Pure. A field that is not listed is left out, whatever its kind: no Secret, no value of an environment variable, no
annotation of another owner. What is listed is redacted, keys too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from core.kube import resources as kube
from core.kube.types import Event
from core.models.base import JsonDict
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, AGENT_SELECTOR, OWNER_UID_LABEL, REPO_NAME_LABEL
from core.redact import redact, redact_lines, redact_values

_Fields: TypeAlias = "bool | Mapping[str, _Fields]"
"""True: a text, number or truth value, or a list of them. A mapping: these fields, of each element of a list; a key
that ends in `*` stands for all keys that begin so."""


def _texts(words: str) -> "dict[str, _Fields]":
    return dict.fromkeys(words.split(), True)


_ALL: Final[_Fields] = {"*": True}
"""The texts of a map, under any key."""

_CONDITIONS: Final = _texts("type status reason message lastTransitionTime lastProbeTime")
_META: Final = _texts("name namespace generateName uid generation creationTimestamp deletionTimestamp finalizers") | {
    "labels": _ALL,
    "annotations": {"nodeagent.io/*": True, "velero.io/*": True},
    "ownerReferences": _texts("kind name uid controller"),
}
_TRANSFER: Final[_Fields] = {
    "spec": {
        **_texts("backupStorageLocation cancel datamover uploaderType operationTimeout parentSnapshot sourceNamespace"),
        **_texts("sourcePVC snapshotType snapshotID snapshotSize node nodeOS volume"),
        "dataMoverConfig": _ALL,
        "uploaderSettings": _ALL,
        "csiSnapshot": _texts("volumeSnapshot storageClass snapshotClass driver"),
        "targetVolume": _texts("pvc pv namespace"),
        "pod": _texts("namespace name uid"),
        "tags": _ALL,
    },
    "status": {
        **_texts("phase message acceptedTimestamp startTimestamp completionTimestamp acceptedByNode node nodeOS path"),
        **_texts("snapshotID incrementalBytes"),
        "progress": _texts("totalBytes bytesDone"),
    },
}
_CONTAINER: Final = _texts("name image imagePullPolicy command args") | {
    "resources": {"requests": _ALL, "limits": _ALL},
    "volumeMounts": _texts("name mountPath readOnly mountPropagation"),
    "volumeDevices": _texts("name devicePath"),
    "env": _texts("name"),
}
"""Of environment variables the names alone."""

_STATE: Final[_Fields] = dict.fromkeys(
    ("waiting", "running", "terminated"), _texts("reason message exitCode signal startedAt finishedAt")
)
_CONTAINER_STATUS: Final = _texts("name ready restartCount image imageID") | {"state": _STATE, "lastState": _STATE}
_POD_SPEC: Final[_Fields] = {
    **_texts("nodeName serviceAccountName priorityClassName priority hostNetwork restartPolicy schedulerName"),
    "nodeSelector": _ALL,
    "containers": _CONTAINER,
    "initContainers": _CONTAINER,
    "volumes": {
        "name": True,
        "persistentVolumeClaim": _texts("claimName"),
        "hostPath": _texts("path type"),
        "emptyDir": _texts("medium sizeLimit"),
    },
    "tolerations": _texts("key operator value effect tolerationSeconds"),
}
_POD: Final[_Fields] = {
    "spec": _POD_SPEC,
    "status": {
        **_texts("phase reason message startTime qosClass"),
        "conditions": _CONDITIONS,
        "containerStatuses": _CONTAINER_STATUS,
        "initContainerStatuses": _CONTAINER_STATUS,
    },
}
_WORKLOAD: Final[_Fields] = {
    "spec": {
        **_texts("replicas backoffLimit"),
        "template": {"metadata": {"labels": _ALL}, "spec": _POD_SPEC},
        "updateStrategy": _texts("type"),
    },
    "status": {"*": True, "conditions": _CONDITIONS},
}
_REPOSITORY: Final[_Fields] = {
    "spec": {
        **_texts("volumeNamespace backupStorageLocation repositoryType maintenanceFrequency"),
        "repositoryConfig": _ALL,
    },
    "status": {
        **_texts("phase message lastMaintenanceTime"),
        "recentMaintenance": _texts("result startTimestamp completeTimestamp message"),
    },
}
_LOCATION: Final[_Fields] = {
    "spec": {
        **_texts("provider accessMode default validationFrequency backupSyncPeriod"),
        "objectStorage": _texts("bucket prefix"),
        "credential": _texts("name key"),
        "config": _texts(
            "region profile s3Url s3ForcePathStyle insecureSkipTLSVerify storageAccount resourceGroup subscriptionId "
            "useAAD fspath"
        ),
    },
    "status": _texts("phase message lastValidationTime lastSyncedTime"),
}
_NODE: Final[_Fields] = {
    "spec": {"unschedulable": True, "taints": _texts("key value effect")},
    "status": {
        "allocatable": _ALL,
        "conditions": _CONDITIONS,
        "nodeInfo": _texts("architecture operatingSystem osImage kernelVersion kubeletVersion containerRuntimeVersion"),
    },
}
_EVENT: Final = _texts("type reason message count firstTimestamp lastTimestamp eventTime") | {
    "involvedObject": _texts("kind namespace name uid"),
    "source": _texts("component host"),
}
_DEFINITION: Final[_Fields] = {
    "spec": {**_texts("group scope"), "versions": _texts("name served storage")},
    "status": {"storedVersions": True, "conditions": _CONDITIONS},
}
_CLASS: Final = _texts("provisioner driver reclaimPolicy deletionPolicy volumeBindingMode allowVolumeExpansion")
CONFIG_MAP_FIELDS: Final[_Fields] = {"data": _ALL}
"""Of the ConfigMaps that agents are configured with; of no others."""


@dataclass(frozen=True)
class Collected:
    """One list of objects in a bundle: which, those that `keeps` chooses, and their fields beside the metadata."""

    resource: kube.Resource
    fields: _Fields
    selector: str = ""
    name: str = ""
    keeps: Callable[[Any], bool] = lambda _: True

    @property
    def file(self) -> str:
        """Where it is in the bundle."""
        return f"objects/{self.name or self.resource.plural}.json"


_AGENTS: Final = frozenset({AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS})


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
    Collected(kube.DAEMON_SETS, _WORKLOAD, keeps=lambda raw: raw["metadata"]["name"] in _AGENTS),
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
