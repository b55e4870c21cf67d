"""Velero's recorded objects, built from the same inputs; every difference is listed."""

from typing import Any

import pytest

from core.contract import VolumeMode
from core.models.names import ATTEMPT_LABEL, EXCLUDE_LABEL, OWNER_KIND_ANNOTATION, OWNER_UID_LABEL
from exposer.manifests import (
    SOURCE_ANNOTATION,
    build_backup_claim,
    build_backup_content,
    build_backup_snapshot,
    build_restore_claim,
    parse_snapshot_source,
)
from exposer.model import LocatedVolume, Owner
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import StorageAccess
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request
from tests.support.golden import recorded
from tests.support.objects import JsonDict

_STORED = {
    "metadata.creationTimestamp",
    "metadata.generation",
    "metadata.resourceVersion",
    "metadata.uid",
    "status",
    "metadata.finalizers",
    # Defaults and admission: the recording has the pod as the API server stored it.
    "spec.dnsPolicy",
    "spec.enableServiceLinks",
    "spec.preemptionPolicy",
    "spec.priority",
    "spec.schedulerName",
    "spec.serviceAccount",
    "spec.tolerations",
    "spec.dataSourceRef",
}
_IN_CONTAINER = {"terminationMessagePath"}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf of `value` by its path; named elements of a list are keyed by their name."""
    leaves: dict[str, Any] = {}
    if isinstance(value, dict) and value:
        for key, item in value.items():
            leaves |= flat(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            leaves |= flat(item, f"{path}[{item.get('name', index)}]")
    else:
        leaves[path] = value
    return leaves


def differences(theirs: JsonDict, ours: JsonDict) -> dict[str, tuple[Any, Any]]:
    """Return the leaves that differ, without the API server's additions: path to (Velero's, ours)."""
    velero, mine = flat(theirs), flat(ours)
    found = {}
    for path in sorted(velero.keys() | mine.keys()):
        pair = velero.get(path), mine.get(path)
        stored = any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in _STORED)
        service_account_token = "kube-api-access" in path
        default = path.rsplit(".", 1)[-1] in _IN_CONTAINER
        if pair[0] != pair[1] and not (stored or service_account_token or default):
            found[path] = pair
    return found


def pod_differences(owner: Owner, args: list[str], ours: list[str], verb: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences of every mover pod, with their reasons."""
    container = f"spec.containers[{owner.uid}]"
    expected: dict[str, tuple[Any, Any]] = {
        # The mover is ours.
        f"{container}.command": (["/velero", *verb.split()], ["python", "-m", "datamover"]),
        f"{container}.args": (args, ours),
        # The image may be missing on a newly labeled node: it is pulled then.
        f"{container}.imagePullPolicy": ("Never", "IfNotPresent"),
        # A mover that exits without a message reports the end of its log.
        f"{container}.terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
        # With 0 a pod is deleted from the API while its mover still writes.
        "spec.terminationGracePeriodSeconds": (0, 30),
        **temporary_labels(owner),
        f"metadata.labels.{ATTEMPT_LABEL}": (None, "1"),
        # Root keeps what reading and writing files of any owner needs, and writes nowhere else.
        "spec.securityContext.seccompProfile.type": (None, "RuntimeDefault"),
        f"{container}.securityContext.allowPrivilegeEscalation": (None, False),
        f"{container}.securityContext.capabilities.drop": (None, ["ALL"]),
        f"{container}.securityContext.capabilities.add": (
            None,
            ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SYS_CHROOT"],
        ),
        f"{container}.securityContext.readOnlyRootFilesystem": (None, True),
        f"{container}.volumeMounts[cloud-credentials].readOnly": (None, True),
        # The agent of the node reads the mover's Events there, instead of watching them.
        "spec.volumes[mover-events].name": (None, "mover-events"),
        "spec.volumes[mover-events].emptyDir": (None, {}),
        f"{container}.volumeMounts[mover-events].name": (None, "mover-events"),
        f"{container}.volumeMounts[mover-events].mountPath": (None, "/mover-events"),
        f"{container}.env[DATA_MOVER_EVENTS_DIR].name": (None, "DATA_MOVER_EVENTS_DIR"),
        f"{container}.env[DATA_MOVER_EVENTS_DIR].value": (None, "/mover-events"),
    }
    if f"--volume-mode={VolumeMode.BLOCK}" not in ours:
        # kopia writes a file beside its target, which the read-only root does not allow.
        path = f"{container}.volumeMounts[{owner.uid}].mountPath"
        expected[path] = (f"/{owner.uid}", "/scratch/volume")
    # A mover mounts its own volume, not those of all pods of its node.
    for name, mount, path in (
        ("host-pods", "/host_pods", "/var/lib/kubelet/pods"),
        ("host-plugins", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins"),
    ):
        expected |= {
            f"{container}.volumeMounts[{name}].name": (name, None),
            f"{container}.volumeMounts[{name}].mountPath": (mount, None),
            f"{container}.volumeMounts[{name}].mountPropagation": ("HostToContainer", None),
            f"spec.volumes[{name}].name": (name, None),
            f"spec.volumes[{name}].hostPath.path": (path, None),
            f"spec.volumes[{name}].hostPath.type": ("", None),
        }
    return expected


INHERITED = StorageAccess(inherits_credentials=True)
"""Of a location without credentials of its own: Velero's movers always inherit the agent's."""


def our_volume_path(owner: Owner, mode: VolumeMode = VolumeMode.FILESYSTEM) -> str:
    return f"--volume-path={f'/{owner.uid}' if mode is VolumeMode.BLOCK else '/scratch/volume'}"


LOGGING = ["--log-level=info", "--log-format=text"]


@pytest.mark.parametrize("block", [False, True], ids=["file system", "block"])
def test_a_backup_pod_differs_from_velero_only_as_listed(block: bool) -> None:
    prefix = "block-" if block else ""
    mode = VolumeMode.BLOCK if block else VolumeMode.FILESYSTEM
    request = snapshot_request(f"{prefix}dataupload")
    owner = request.owner
    claim: JsonDict = build_backup_claim(request, size="2Gi", mode=mode)
    at, volume_mode = f"--volume-path=/{owner.uid}", f"--volume-mode={mode}"
    name, timeout = f"--data-upload={owner.name}", "--resource-timeout=10m0s"
    args = ["backup", name, our_volume_path(owner, mode), volume_mode, "--mover=one-open", timeout, *LOGGING]
    ours = build_backup_pod(request, claim, Placement(), storage=INHERITED)
    assert differences(recorded(f"{prefix}pod-of-dataupload"), ours) == pod_differences(
        owner, [at, volume_mode, name, timeout], args, "data-mover backup"
    )


@pytest.mark.parametrize("block", [False, True], ids=["file system", "block"])
def test_a_restore_pod_differs_from_velero_only_as_listed(block: bool) -> None:
    prefix = "block-" if block else ""
    mode = VolumeMode.BLOCK if block else VolumeMode.FILESYSTEM
    request = restore_request(f"{prefix}datadownload")
    owner = request.owner
    at, volume_mode = f"--volume-path=/{owner.uid}", f"--volume-mode={mode}"
    name, timeout = f"--data-download={owner.name}", "--resource-timeout=10m0s"
    theirs = [at, volume_mode, name, timeout, "--cache-volume-path="]  # an empty flag has no effect: omitted
    args = ["restore", name, our_volume_path(owner, mode), volume_mode, "--mover=one-open", timeout, *LOGGING]
    ours = build_restore_pod(request, mode, placement=Placement(), storage=INHERITED)
    assert differences(recorded(f"{prefix}pod-of-datadownload"), ours) == pod_differences(
        owner, theirs, args, "data-mover restore"
    )


@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_a_pod_volume_pod_differs_from_velero_only_as_listed(verb: str) -> None:
    theirs = recorded(f"pod-of-podvolume{verb}", 1)
    request = pod_volume_request(f"podvolume{verb}")
    owner = request.owner
    volume = f"spec.volumes[{owner.uid}].hostPath"
    directory = flat(theirs)[f"{volume}.path"]
    container, path = f"spec.containers[{owner.uid}]", our_volume_path(owner)
    name, timeout = f"--pod-volume-{verb}={owner.name}", "--resource-timeout=10m0s"
    their_args = theirs["spec"]["containers"][0]["args"]
    ours = build_pod_volume_pod(request, LocatedVolume("node-a", directory), storage=INHERITED)
    expected = pod_differences(
        owner,
        their_args,
        [verb, name, path, "--volume-mode=Filesystem", "--mover=one-open", timeout, *LOGGING],
        f"pod-volume {verb}",
    )
    # A missing directory fails the mount, instead of counting as an empty volume.
    expected[f"{volume}.type"] = ("", "Directory")
    if verb == "backup":
        # A backup mounts its volume read-only.
        expected[f"{container}.volumeMounts[{owner.uid}].readOnly"] = (None, True)
    assert differences(theirs, ours) == expected


def source_objects(mode: VolumeMode = VolumeMode.FILESYSTEM) -> tuple[JsonDict, JsonDict, JsonDict]:
    """Return the recorded source: snapshot and content when ready, and its PVC."""
    content_name = "snapcontent-f925c1b6-086b-4e7e-bee5-e1ac13c7ea42"
    claim = {"spec": {"volumeMode": str(mode), "resources": {"requests": {"storage": "1Gi"}}}}
    return recorded("volumesnapshot-source", -1), recorded("volumesnapshotcontents", 4, called=content_name), claim


def owner_label(owner: Owner) -> dict[str, tuple[Any, Any]]:
    """Return the difference by which garbage collection finds the owner."""
    return {f"metadata.labels.{OWNER_UID_LABEL}": (None, owner.uid)}


def temporary_labels(owner: Owner) -> dict[str, tuple[Any, Any]]:
    """Return the differences of what a Velero backup of the agents' namespace leaves out."""
    return owner_label(owner) | {f"metadata.labels.{EXCLUDE_LABEL}": (None, "true")}


def without_reference(owner: Owner) -> dict[str, tuple[Any, Any]]:
    """Return the differences of a PVC, which garbage collection deletes with its volume, and not Kubernetes."""
    references = {
        f"metadata.ownerReferences[{owner.name}].{key}": (value, None) for key, value in owner.reference.items()
    }
    return temporary_labels(owner) | references | {f"metadata.annotations.{OWNER_KIND_ANNOTATION}": (None, owner.kind)}


def test_a_backup_pvc_matches_velero_with_our_label() -> None:
    request = snapshot_request()
    source = parse_snapshot_source(*source_objects())
    ours = build_backup_claim(request, size=source.size, mode=source.volume_mode)
    assert differences(recorded("pvc-of-dataupload"), ours) == without_reference(request.owner)


def test_a_restore_pvc_matches_velero_with_our_label() -> None:
    request = restore_request()
    target: JsonDict = recorded("target-pvc-of-datadownload")
    ours = build_restore_claim(request.owner, target, node="", excluded=())
    assert differences(recorded("pvc-of-datadownload"), ours) == without_reference(request.owner)


def test_snapshot_and_content_match_velero_with_our_annotations() -> None:
    request = snapshot_request()
    owner = request.owner
    snapshot, content, claim = source_objects()
    source = parse_snapshot_source(snapshot, content, claim)
    our_content: JsonDict = build_backup_content(owner, content, source)
    our_snapshot = build_backup_snapshot(owner, our_content, snapshot, excluded=())
    assert differences(recorded("volumesnapshot-of-dataupload"), our_snapshot) == temporary_labels(owner)
    assert differences(recorded("volumesnapshotcontents", called=owner.name), our_content) == owner_label(owner) | {
        # The source is deleted; its record is needed afterward.
        f"metadata.annotations.{SOURCE_ANNOTATION}": (None, source.to_json()),
        # The content is created before the snapshot, so that a restarted agent can continue: its
        # controller adds the snapshot that it is bound to.
        "spec.volumeSnapshotRef.apiVersion": (None, "snapshot.storage.k8s.io/v1"),
        "spec.volumeSnapshotRef.kind": (None, "VolumeSnapshot"),
        "spec.volumeSnapshotRef.resourceVersion": ("622", None),
        "spec.volumeSnapshotRef.uid": ("748ca852-11b9-47fe-9419-d8ee82e698e0", None),
    }
