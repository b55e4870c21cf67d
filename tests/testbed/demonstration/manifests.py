"""Everything the demonstration applies, as a user would write it. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOTS,
)
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.settings import AGENT_IMAGE
from tests.testbed.storage.objects import DRIVER

NAMESPACE = "velero"
"""Where the agent and its custom resources are."""


def build_namespace(name: str) -> Json:
    return build_object(NAMESPACES, name)


def build_location(env: Mapping[str, str]) -> list[Json]:
    """The Secret and the BackupStorageLocation that name the bucket in the environment of a command in the test bed."""
    keys = (
        "[default]\n"
        f"aws_access_key_id = {env['BED_S3_ACCESS_KEY']}\n"
        f"aws_secret_access_key = {env['BED_S3_SECRET_KEY']}\n"
    )
    spec = {
        "provider": "velero.io/aws",
        "default": True,
        "credential": {"name": "cloud-credentials", "key": "cloud"},
        "objectStorage": {"bucket": env["BED_S3_BUCKET"]},
        "config": {"region": "us-east-1", "s3ForcePathStyle": "true", "s3Url": env["BED_S3_URL"]},
    }
    return [
        build_object(SECRETS, "cloud-credentials", NAMESPACE, stringData={"cloud": keys}),
        build_object(BACKUP_STORAGE_LOCATIONS, "default", NAMESPACE, spec=spec),
    ]


def build_claim(namespace: str, name: str, *, size: str, restored_into: str = "") -> Json:
    """A claim of class `bed`; its size is a quantity.

    With `restored_into` it asks for a volume that carries this value, as a Velero server writes it for a restore: no
    provisioner makes one for it.
    """
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "bed",
        "resources": {"requests": {"storage": size}},
    }
    if restored_into:
        spec["selector"] = {"matchLabels": {"velero.io/dynamic-pv-restore": restored_into}}
    return build_object(PERSISTENT_VOLUME_CLAIMS, name, namespace, spec=spec)


def build_container(name: str, command: Sequence[str], **fields: object) -> Json:
    """A container with the agents' image, which runs a command as root unless a field says otherwise."""
    image = {"image": AGENT_IMAGE, "imagePullPolicy": "IfNotPresent"}
    return {"name": name, **image, "command": list(command), "securityContext": {"runAsUser": 0}, **fields}


def build_pod(namespace: str, name: str, *, claim: str, script: Sequence[str], folders: Mapping[str, Path]) -> Json:
    """A pod that runs Python with the arguments `script` over a claim at `/data`.

    `folders` of the machine: where the pod sees each, and where it is.
    """
    volumes: list[Json] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    mounts: list[Json] = [{"name": "data", "mountPath": "/data"}]
    for number, (mount_path, path) in enumerate(folders.items()):
        volumes.append({"name": f"folder-{number}", "hostPath": {"path": str(path), "type": "Directory"}})
        mounts.append({"name": f"folder-{number}", "mountPath": mount_path})
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [build_container("python", ["python3", *script], volumeMounts=mounts)],
        "volumes": volumes,
    }
    return build_object(PODS, name, namespace, spec=spec)


def build_snapshot(namespace: str, name: str, *, claim: str) -> Json:
    spec = {"volumeSnapshotClassName": "bed", "source": {"persistentVolumeClaimName": claim}}
    return build_object(VOLUME_SNAPSHOTS, name, namespace, spec=spec)


def build_data_upload(name: str, *, namespace: str, claim: str, snapshot: str) -> Json:
    taken = {"volumeSnapshot": snapshot, "storageClass": "bed", "snapshotClass": "bed", "driver": DRIVER}
    spec = {
        "snapshotType": "CSI",
        "csiSnapshot": taken,
        "sourceNamespace": namespace,
        "sourcePVC": claim,
        "backupStorageLocation": "default",
        "operationTimeout": "10m0s",
    }
    return build_object(DATA_UPLOADS, name, NAMESPACE, spec=spec)


def build_data_download(name: str, *, namespace: str, claim: str, snapshot_id: str, size_bytes: int) -> Json:
    """The DataDownload of a repository's snapshot into a claim of the same namespace."""
    spec = {
        "targetVolume": {"namespace": namespace, "pvc": claim, "pv": ""},
        "snapshotID": snapshot_id,
        "snapshotSize": size_bytes,
        "sourceNamespace": namespace,
        "backupStorageLocation": "default",
        "operationTimeout": "10m0s",
        "nodeOS": "linux",
    }
    return build_object(DATA_DOWNLOADS, name, NAMESPACE, spec=spec)
