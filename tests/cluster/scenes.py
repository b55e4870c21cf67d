"""What tests of transfers are made of: a volume with snapshots, storage locations, storage classes.

Everything is done as a user does it, with kubectl.
"""

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.kube.resources import (
    BACKUP_REPOSITORIES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    STORAGE_CLASSES,
    TRANSFERS,
    Resource,
)
from tests.cluster.bed import Bed
from tests.cluster.gate import Gate, open_gate
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import (
    NAMESPACE,
    build_claim,
    build_data_download,
    build_data_upload,
    build_location,
    build_snapshot,
)
from tests.testbed.demonstration.timeline import FINAL
from tests.testbed.processes import LIMIT_SECONDS, BedError, wait_for
from tests.testbed.storage.objects import DRIVER, TOPOLOGY_KEY

RESOURCES: dict[str, Resource] = {resource.kind: resource for resource in TRANSFERS}
RESTORE_UID = "5c1d6f0e-0b8e-4a38-9d0b-6a1f0c6f3b77"
"""Of the Velero Restore that a test pretends there is."""

_POLL_SECONDS = 0.2
_READY = "jsonpath={.status.readyToUse}=true"


@dataclass(frozen=True)
class Place:
    """A storage location in the test bed's bucket; its name is also its prefix."""

    bed: Bed
    name: str

    def build(self, *, url: str = "", secret_key: str = "", bucket: str = "", frequency: str = "0s") -> list[Json]:
        """The Secret and the BackupStorageLocation; arguments replace the valid values.

        The leader validates it only once, unless another `frequency` is given: it starts a process each time.
        """
        env = dict(self.bed.env)
        if secret_key:
            env["BED_S3_SECRET_KEY"] = secret_key
        secret, location = copy.deepcopy(build_location(env))
        secret["metadata"]["name"] = location["spec"]["credential"]["name"] = f"{self.name}-keys"
        location["metadata"]["name"] = self.name
        location["spec"] |= {"default": False, "validationFrequency": frequency}
        location["spec"]["objectStorage"]["prefix"] = self.name
        if bucket:
            location["spec"]["objectStorage"]["bucket"] = bucket
        if url:
            location["spec"]["config"]["s3Url"] = url
        return [secret, location]

    def remove(self, volume_namespace: str, *others: str) -> None:
        """Delete it with its repository of the volumes of a namespace, and other objects of the agents' namespace."""
        left = [f"backuprepository/{volume_namespace}-{self.name}-kopia", f"backupstoragelocation/{self.name}"]
        left += [f"secret/{self.name}-keys", *others]
        self.bed.user.kubectl("delete", *left, "-n", NAMESPACE, "--ignore-not-found", "--wait=false")

    def repository(self, volume_namespace: str) -> Json:
        """A new BackupRepository for the volumes of a namespace."""
        labels = {
            "velero.io/volume-namespace": volume_namespace,
            "velero.io/storage-location": self.name,
            "velero.io/repository-type": "kopia",
        }
        spec = {
            "volumeNamespace": volume_namespace,
            "backupStorageLocation": self.name,
            "repositoryType": "kopia",
            "maintenanceFrequency": "1h0m0s",
        }
        name = f"{volume_namespace}-{self.name}-kopia"
        return build_object(BACKUP_REPOSITORIES, name, NAMESPACE, metadata={"labels": labels}, spec=spec)


@contextmanager
def open_gated_place(bed: Bed, space: str) -> Iterator[tuple[Gate, Place]]:
    """A gate, which is open, and a storage location behind it for the volumes of a namespace, whose name it has."""
    place = Place(bed, space)
    with open_gate() as gate:
        bed.user.apply(*place.build(url=gate.url))
        try:
            yield gate, place
        finally:
            place.remove(space)


@contextmanager
def open_place(bed: Bed, space: str) -> Iterator[Place]:
    """A storage location for the volumes of a namespace, whose name it has; transfers with it in their names go too."""
    place = Place(bed, space)
    bed.user.apply(*place.build())
    yield place
    names = bed.user.names([resource.plural for resource in RESOURCES.values()], "-n", NAMESPACE)
    place.remove(space, *(name for name in names if space in name))


@dataclass(frozen=True)
class Volume:
    """A claim with data in it, and its snapshots."""

    bed: Bed
    namespace: str
    claim: str = "data"

    def fill(self, script: str, *, size: str = "64Mi", block: bool = False) -> None:
        """Create the claim and run a Python script over it, which calls it `/data`: a folder, or a device.

        From outside: a pod would take seconds, and more of the processors than the script.
        """
        claim = build_claim(self.namespace, self.claim, size=size)
        claim["spec"]["volumeMode"] = "Block" if block else "Filesystem"
        self.bed.user.apply(claim)
        subprocess.run([sys.executable, "-c", script.replace("/data", str(self.path()))], check=True)

    def path(self) -> Path:
        """Where the test bed has the volume, once there is one: a folder or a device."""
        volume = wait_for(f"the volume of claim {self.namespace}/{self.claim}", self._find)
        path = self.bed.folder / "volumes" / str(volume["spec"]["csi"]["volumeHandle"])
        return path.resolve()

    def _find(self) -> Json | None:
        found = self.bed.api.get(PERSISTENT_VOLUME_CLAIMS, self.namespace, self.claim) or {"spec": {}}
        return self.bed.api.get(PERSISTENT_VOLUMES, "", found["spec"].get("volumeName") or "none")

    def take_snapshots(self, names: Iterable[str]) -> None:
        names = list(names)
        self.bed.user.apply(*(build_snapshot(self.namespace, name, claim=self.claim) for name in names))
        for name in names:
            self.bed.user.wait(f"volumesnapshot/{name}", _READY, namespace=self.namespace)

    def upload(self, name: str, *, snapshot: str, location: str) -> Json:
        """A DataUpload of one of its snapshots."""
        body = build_data_upload(name, namespace=self.namespace, claim=self.claim, snapshot=snapshot)
        body["spec"]["backupStorageLocation"] = location
        return body

    def target(self, name: str, *, size: str = "64Mi", block: bool = False, storage_class: str = "bed") -> Json:
        """A target PVC, for the volume that a DataDownload creates."""
        claim = build_claim(self.namespace, name, size=size, restored_into=f"{self.namespace}.{name}.x7k2p")
        claim["spec"] |= {"volumeMode": "Block" if block else "Filesystem", "storageClassName": storage_class}
        return claim

    def download(self, name: str, *, snapshot_id: str, location: str) -> Json:
        """The DataDownload of a repository's snapshot into the claim of that name."""
        body = build_data_download(
            name, namespace=self.namespace, claim=name, snapshot_id=snapshot_id, size_bytes=1_000_000
        )
        body["spec"]["backupStorageLocation"] = location
        return body

    def restore(self, target: Json, *, snapshot_id: str, location: str, **spec: object) -> Json:
        """Restore a repository's snapshot into a target PVC; returns the DataDownload of its name, cleaned up."""
        download = self.download(target["metadata"]["name"], snapshot_id=snapshot_id, location=location)
        download["spec"] |= spec
        self.bed.user.apply(target, download)
        return wait_released(self.bed, download)


def build_class(name: str, *, waits: bool, node: str = "") -> Json:
    """A storage class of the test bed: whether its volumes wait for a pod, and the one node they may be on."""
    topology = {"matchLabelExpressions": [{"key": TOPOLOGY_KEY, "values": [node]}]}
    only = {"allowedTopologies": [topology]} if node else {}
    binding = "WaitForFirstConsumer" if waits else "Immediate"
    return build_object(STORAGE_CLASSES, name, provisioner=DRIVER, volumeBindingMode=binding, **only)


def build_pod_transfer(
    kind: str, name: str, pod: Json, *, volume: str = "data", location: str = "default", **spec: object
) -> Json:
    """A PodVolumeBackup of a volume of a pod, or a PodVolumeRestore into it, as a server writes it.

    `spec` has further fields, such as the `snapshotID` of a restore.
    """
    meta = pod["metadata"]
    common = {
        "pod": {"kind": "Pod", **{key: meta[key] for key in ("namespace", "name", "uid")}},
        "volume": volume,
        "backupStorageLocation": location,
        "repoIdentifier": "",
        "uploaderType": "kopia",
    }
    if kind == "PodVolumeBackup":
        return build_object(POD_VOLUME_BACKUPS, name, NAMESPACE, spec=common | {"node": pod["spec"]["nodeName"]} | spec)
    # Its name is not its UID's: garbage collection ignores that there is no such Restore.
    owner = {"apiVersion": "velero.io/v1", "kind": "Restore", "name": "restore", "uid": RESTORE_UID}
    owned, source = {"ownerReferences": [owner]}, {"sourceNamespace": meta["namespace"]}
    return build_object(POD_VOLUME_RESTORES, name, NAMESPACE, metadata=owned, spec=common | source | spec)


def need_two_nodes(bed: Bed) -> None:
    """Fail a test that the second node is missing for."""
    if "bed-2" not in bed.env["BED_NODES"].split():
        pytest.fail("this needs two nodes: python -m tests.testbed --nodes 2 run -- …", pytrace=False)


def wait_until(
    bed: Bed, item: Json, *phases: str, when: Callable[[Json], bool] = lambda _: True, seconds: float = LIMIT_SECONDS
) -> Json:
    """Wait until a transfer is in one of some phases, any final one if none is named, and `when` holds; returns it."""
    name, deadline = item["metadata"]["name"], time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = bed.api.get(RESOURCES[item["kind"]], item["metadata"]["namespace"], name) or {}
        phase, wanted = found.get("status", {}).get("phase"), phases or FINAL
        if phase in wanted and when(found):
            return found
        if phase in FINAL and phase not in wanted:
            break
        time.sleep(_POLL_SECONDS)
    raise BedError(f"{item['kind']} {name} did not reach {phases}: {found.get('status')}")


def wait_released(bed: Bed, item: Json, *phases: str, seconds: float = LIMIT_SECONDS) -> Json:
    """Wait as `wait_until`, and for the cleanup of the transfer; returns it."""
    return wait_until(bed, item, *phases, when=is_released, seconds=seconds)


def watch_ends(pool: ThreadPoolExecutor, bed: Bed, resource: Resource, names: Iterable[str]) -> Future[dict[str, Json]]:
    """Begin to watch for the ends of some objects in the agents' namespace; the result has each as it was deleted.

    At once, and not when they have ended: the API server keeps past changes for little more than a minute.
    """
    return pool.submit(_last_versions, bed, resource, frozenset(names), since=bed.api.snapshot(resource)[1])


def _last_versions(bed: Bed, resource: Resource, names: frozenset[str], *, since: str) -> dict[str, Json]:
    deleted: dict[str, Json] = {}
    for event in bed.api.watch(resource, since, seconds=LIMIT_SECONDS):
        meta = event["object"]["metadata"]
        if event["type"] == "DELETED" and meta["namespace"] == NAMESPACE and meta["name"] in names:
            deleted[meta["name"]] = event["object"]
            if deleted.keys() == names:
                return deleted
    raise BedError(f"of {sorted(names)} only {sorted(deleted)} were deleted")


def is_final(transfer: Json) -> bool:
    return transfer.get("status", {}).get("phase") in FINAL


def is_released(transfer: Json) -> bool:
    """Whether a transfer is in a final phase and cleaned up."""
    return is_final(transfer) and not transfer["metadata"].get("finalizers")
