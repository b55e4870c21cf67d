"""What a check of a volume needs: its plan, and its objects."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from client.backups.manifests import (
    OPERATION_TIMEOUT,
    SnapshotWay,
    build_snapshot,
    build_upload_spec,
    choose_snapshot_class,
)
from client.installation import read_ready_image
from client.permissions import VOLUME_CHECK_PERMISSIONS
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.types import Manifest, Object, StorageClass, VolumeSnapshotClass
from core.models.backups import SavedClaim
from core.models.names import RESTORE_SELECTOR_LABEL
from core.models.storage import BackupStorageLocation
from core.models.transfers import PLAIN_RESTORE
from nodeagent.runtime.permissions import Permission, Scope
from nodeagent.runtime.preflight import missing_permissions

PREFLIGHT_LABELS: Final = {"nodeagent.io/preflight": "true"}
"""On everything that a check creates, so that a later one finds what an earlier one left."""

DEFAULT_SPACE: Final = "nodeagent-preflight"
"""The namespace of the test's volumes, which is created and deleted with them."""

_USER: Final = 65532
"""The image's user."""

_DATA_BYTES: Final = 1 << 20

_REPORT: Final = "open('/dev/termination-log', 'w').write(hashlib.sha256(data).hexdigest())"
_WRITE: Final = f"""\
import hashlib, os
data = os.urandom({_DATA_BYTES})
with open('/data/preflight', 'wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
{_REPORT}
"""
_READ: Final = f"""\
import hashlib
data = open('/data/preflight', 'rb').read()
{_REPORT}
"""


@dataclass(frozen=True)
class CheckPlan:
    """One check: `space` is the namespace of its volumes, `namespace` has agents and transfers.

    `image` has Python and is the agents'; `size` is a quantity. `retaining` are the classes, as text, by whose policy
    volumes or snapshots stay in the storage.
    """

    id: str
    namespace: str
    space: str
    image: str
    size: str
    storage_class: str
    snapshot_class: str
    driver: str
    location: str
    retaining: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of source claim, snapshot and transfers."""
        return f"nodeagent-preflight-{self.id}"

    @property
    def restored(self) -> str:
        """The name of the target claim."""
        return f"{self.name}-restored"

    def build_namespace(self) -> Manifest:
        """Return the namespace of the volumes."""
        return kube.NAMESPACES.build({"name": self.space, "labels": dict(PREFLIGHT_LABELS)})

    def build_snapshot(self) -> Manifest:
        """Return the VolumeSnapshot of the source claim."""
        return build_snapshot(_meta(self.name, self.space), self.snapshot_class, self.name)

    def build_upload(self) -> Manifest:
        """Return the DataUpload of the snapshot."""
        claim = SavedClaim(namespace=self.space, name=self.name, storage_class=self.storage_class)
        way = SnapshotWay(self.snapshot_class, self.driver)
        spec = build_upload_spec(self.name, way, claim, self.location)
        return kube.DATA_UPLOADS.build(_meta(self.name, self.namespace), spec=spec)

    def build_download(self, snapshot_id: str) -> Manifest:
        """Return the DataDownload of that kopia snapshot into the target claim."""
        spec = {
            "targetVolume": {"namespace": self.space, "pvc": self.restored, "pv": ""},
            "snapshotID": snapshot_id,
            "sourceNamespace": self.space,
            "backupStorageLocation": self.location,
            "operationTimeout": OPERATION_TIMEOUT,
            "nodeOS": "linux",
            **PLAIN_RESTORE,
        }
        return kube.DATA_DOWNLOADS.build(_meta(self.name, self.namespace), spec=spec)

    def build_claim(self, name: str) -> Manifest:
        """Return the source claim, or the target claim, which no provisioner fills."""
        spec: Manifest = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": self.storage_class,
            "resources": {"requests": {"storage": self.size}},
        }
        if name == self.restored:
            spec["selector"] = {"matchLabels": {RESTORE_SELECTOR_LABEL: name}}
        return kube.PERSISTENT_VOLUME_CLAIMS.build(_meta(name, self.space), spec=spec)

    def build_pod(self, name: str) -> Manifest:
        """Return the pod that writes random data into the source claim, or reads the target claim: both of its name.

        It ends with the checksum of the data. Every Pod Security Standard allows it.
        """
        container = {
            "name": "preflight",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python", "-c", _READ if name == self.restored else _WRITE],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "containers": [container],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        }
        return kube.PODS.build(_meta(name, self.space), spec=spec)


def _meta(name: str, namespace: str) -> Manifest:
    return {"name": name, "namespace": namespace, "labels": dict(PREFLIGHT_LABELS)}


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
"""Annotation. Source: Kubernetes v1.34, "Storage Classes"."""


@dataclass(frozen=True)
class CheckChoice:
    """What the user chose; None: the default of the cluster, or a namespace of the check's own."""

    storage_class: str | None = None
    snapshot_class: str | None = None
    space: str | None = None
    location: str = "default"
    size: str = "64Mi"


async def plan_check(client: KubeClient, namespace: str, choice: CheckChoice) -> CheckPlan:
    """Return the plan of a check by the agents of the namespace.

    Raises:
        ConfigError: a permission, the agents, the location or a class is missing; the message says which flag names it.
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


async def _check_user(client: KubeClient, namespace: str, space: str | None) -> None:
    """Check the permissions; with `space`, those on its objects in it alone."""
    needed = [one for one in VOLUME_CHECK_PERMISSIONS if not one.without]
    moved = [one for one in needed if space and _is_of_space(one)]
    missing = [*(await missing_permissions(client, namespace, [one for one in needed if one not in moved])).values()]
    if space and moved:
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


async def _find_class(client: KubeClient, name: str | None) -> StorageClass:
    if name:
        found = await client.read(kube.STORAGE_CLASSES, "", name)
        if found is None:
            raise ConfigError(f"--storage-class: StorageClass {name} does not exist")
        return found
    classes = await client.list(Selection(kube.STORAGE_CLASSES))
    default = [one for one in classes if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    if len(default) != 1:
        problem = "there is no default StorageClass" if not default else "there are several default StorageClasses"
        raise ConfigError(f"{problem}: --storage-class names one of {_names(classes)}")
    return default[0]


async def _find_snapshot_class(client: KubeClient, name: str | None, driver: str) -> VolumeSnapshotClass:
    classes = [
        one for one in await client.list(Selection(kube.VOLUME_SNAPSHOT_CLASSES)) if not name or _name(one) == name
    ]
    if name and not classes:
        raise ConfigError(f"--volume-snapshot-class: VolumeSnapshotClass {name} does not exist")
    fitting = [one for one in classes if one.get("driver") == driver]
    if name and not fitting:
        other = classes[0].get("driver")
        raise ConfigError(f"--volume-snapshot-class: {name} is of driver {other}, and the storage class of {driver}")
    if chosen := choose_snapshot_class(fitting):
        return chosen
    known = _names(fitting or classes)
    raise ConfigError(f"no single VolumeSnapshotClass of driver {driver}: --volume-snapshot-class names one of {known}")


def _name(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["name"])


def _names(objects: Sequence[Object]) -> str:
    return ", ".join(sorted(map(_name, objects))) or "none"
