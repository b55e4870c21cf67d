"""Everything the demonstration applies, as a user would write it. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.testbed.api import Json
from tests.testbed.settings import AGENT_IMAGE
from tests.testbed.storage.objects import DRIVER

NAMESPACE = "velero"
"""Where the agent and its custom resources are."""


def build_namespace(name: str) -> Json:
    """A namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def build_location(env: Mapping[str, str]) -> list[Json]:
    """The Secret and the BackupStorageLocation that name the test bed's bucket.

    Args:
        env: The environment of a command in the test bed.
    """
    keys = (
        "[default]\n"
        f"aws_access_key_id = {env['BED_S3_ACCESS_KEY']}\n"
        f"aws_secret_access_key = {env['BED_S3_SECRET_KEY']}\n"
    )
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": NAMESPACE, "name": "cloud-credentials"},
        "stringData": {"cloud": keys},
    }
    location = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"namespace": NAMESPACE, "name": "default"},
        "spec": {
            "provider": "velero.io/aws",
            "default": True,
            "credential": {"name": "cloud-credentials", "key": "cloud"},
            "objectStorage": {"bucket": env["BED_S3_BUCKET"]},
            "config": {"region": "us-east-1", "s3ForcePathStyle": "true", "s3Url": env["BED_S3_URL"]},
        },
    }
    return [secret, location]


def build_claim(namespace: str, name: str, *, size: str, restored_into: str = "") -> Json:
    """A claim of class `bed`.

    Args:
        namespace: Its namespace.
        name: Its name.
        size: A quantity.
        restored_into: If given, the claim asks for a volume that carries this value, as a
            Velero server writes it for a restore: no provisioner makes one for it.
    """
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "bed",
        "resources": {"requests": {"storage": size}},
    }
    if restored_into:
        spec["selector"] = {"matchLabels": {"velero.io/dynamic-pv-restore": restored_into}}
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def build_pod(namespace: str, name: str, *, claim: str, script: Sequence[str], folders: Mapping[str, Path]) -> Json:
    """A pod that runs one of the demonstration's scripts over a claim at `/data`.

    Args:
        namespace: Its namespace.
        name: Its name.
        claim: The claim's name.
        script: Arguments for Python.
        folders: Folders of the machine: where the pod sees each, and where it is.
    """
    volumes: list[Json] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    mounts: list[Json] = [{"name": "data", "mountPath": "/data"}]
    for number, (mount_path, path) in enumerate(folders.items()):
        volumes.append({"name": f"folder-{number}", "hostPath": {"path": str(path), "type": "Directory"}})
        mounts.append({"name": f"folder-{number}", "mountPath": mount_path})
    container = {
        "name": "python",
        "image": AGENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", *script],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name}, "spec": spec}


def build_snapshot(namespace: str, name: str, *, claim: str) -> Json:
    """A VolumeSnapshot of a claim."""
    return {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"volumeSnapshotClassName": "bed", "source": {"persistentVolumeClaimName": claim}},
    }


def build_data_upload(name: str, *, namespace: str, claim: str, snapshot: str) -> Json:
    """The DataUpload of a snapshot of a claim."""
    return {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataUpload",
        "metadata": {"namespace": NAMESPACE, "name": name},
        "spec": {
            "snapshotType": "CSI",
            "csiSnapshot": {
                "volumeSnapshot": snapshot,
                "storageClass": "bed",
                "snapshotClass": "bed",
                "driver": DRIVER,
            },
            "sourceNamespace": namespace,
            "sourcePVC": claim,
            "backupStorageLocation": "default",
            "operationTimeout": "10m0s",
        },
    }


def build_data_download(name: str, *, namespace: str, claim: str, snapshot_id: str, size_bytes: int) -> Json:
    """The DataDownload of a repository's snapshot into a claim of the same namespace."""
    return {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataDownload",
        "metadata": {"namespace": NAMESPACE, "name": name},
        "spec": {
            "targetVolume": {"namespace": namespace, "pvc": claim, "pv": ""},
            "snapshotID": snapshot_id,
            "snapshotSize": size_bytes,
            "sourceNamespace": namespace,
            "backupStorageLocation": "default",
            "operationTimeout": "10m0s",
            "nodeOS": "linux",
        },
    }
