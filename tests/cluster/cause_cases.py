"""Every cause of a pending or failed transfer that the test bed can produce, and what must be reported.

Knows the messages of scheduler, kubelet and storage. `tests.cluster.breakage` produces the causes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.cluster.breakage import MISSING

OPEN = "open"
"""A storage location that can be used."""

ELSEWHERE = "elsewhere"
"""A storage class whose volumes are on a node that is tainted for a while."""

_HUGE = {"resources": {"requests": {"cpu": "1000"}}}
_NO_IMAGE = "localhost:1/missing:dev"
_SECRET_VOLUME = {"volumes": [{"name": "keys", "secret": {"secretName": MISSING}}]}


@dataclass(frozen=True)
class Case:
    """One cause. Objects of the test have short names here: `called` returns those in the cluster.

    Attributes:
        message: Pattern of the transfer's message; `{name}` is the transfer, `{space}` its volume's namespace.
        reason: The reason of the Event on the transfer.
        visible: The reason of the Event by which the cluster reports it, on a pod or claim of the transfer's name;
            empty: it exists before the transfer.
        pod: The mover pod that the agent finds: fields of its spec.
        container: And of its container.
        bound: That pod is bound to its node by the test, past the scheduler.
        fault: What is wrong with the storage of the transfer's claim.
        snapshot: What is wrong with its source snapshot.
        source: Its claim, if not the module's.
        storage_class: Of its claim.
        foreign: That pod has no owner.
        heals: It completes once nothing is broken anymore.
        expected: It also occurs in healthy transfers.
    """

    message: str
    reason: str
    visible: str = ""
    kind: str = "DataUpload"
    pod: Mapping[str, object] | None = None
    container: Mapping[str, object] = field(default_factory=dict)
    bound: bool = False
    fault: str = ""
    snapshot: str = ""
    source: str = ""
    storage_class: str = ""
    foreign: bool = False
    heals: bool = False
    expected: bool = False

    @property
    def permanent(self) -> bool:
        """Whether the transfer fails because of it."""
        return self.reason == "Failed"


def called(space: str, word: str) -> str:
    """Return the name of a transfer, its snapshot or target, a location or a class: unique among all tests."""
    return f"{space}-{word}"


def _broken(
    message: str, reason: str, visible: str, *, spec: Mapping[str, object] | None = None, **container: object
) -> Case:
    return Case(message, reason, visible, pod=spec or {}, container=container)


_NO_NODE = r"Pod velero/{name} cannot be scheduled: 0/\d+ nodes are available: .*"
_CANNOT_START = r"Pod velero/{name} cannot start on node \S+ yet: "
_NO_VOLUME = r"PersistentVolumeClaim velero/{name} of Pod velero/{name} is not bound: "
_TARGET = r"target PVC {space}/{name} "

CASES = {
    "taint": Case(
        _NO_NODE + "untolerated taint", "Unschedulable", "FailedScheduling", storage_class=ELSEWHERE, heals=True
    ),
    "affinity": _broken(
        _NO_NODE + "didn't match Pod's node affinity/selector",
        "Unschedulable",
        "FailedScheduling",
        spec={"nodeSelector": {MISSING: "true"}},
    ),
    "resources": _broken(_NO_NODE + "Insufficient cpu", "Unschedulable", "FailedScheduling", **_HUGE),
    "provisioning-failed": Case(
        _NO_VOLUME + "ProvisioningFailed: .*the pool is full",
        "ProvisioningFailed",
        "ProvisioningFailed",
        fault="fail:the pool is full",
        heals=True,
    ),
    "provisioner-silent": Case(
        _NO_VOLUME + "ExternalProvisioning: Waiting for a volume to be created",
        "ClaimUnbound",
        "ExternalProvisioning",
        fault="never",
        heals=True,
        expected=True,
    ),
    "claim-class-missing": Case(
        _NO_VOLUME + f'ProvisioningFailed: .*"{MISSING}" not found',
        "ProvisioningFailed",
        "ProvisioningFailed",
        storage_class=MISSING,
    ),
    "image-pull": _broken(
        r"image of Pod velero/{name} is not available on node \S+: "
        r"(ErrImagePull|ImagePullBackOff): .*connection refused",
        "ImagePullBackOff",
        "Failed",
        image=_NO_IMAGE,
    ),
    "image-never": _broken(
        r"Pod velero/{name} cannot start on node \S+: ErrImageNeverPull: ",
        "Failed",
        "ErrImageNeverPull",
        image=_NO_IMAGE,
        imagePullPolicy="Never",
    ),
    "image-name": _broken(
        r"Pod velero/{name} cannot start on node \S+: InvalidImageName: ", "Failed", "InspectFailed", image="No//Name"
    ),
    "secret-not-mounted": _broken(
        _CANNOT_START + f'FailedMount: .*secret "{MISSING}" not found',
        "FailedMount",
        "FailedMount",
        spec=_SECRET_VOLUME,
        volumeMounts=[{"name": "keys", "mountPath": "/keys"}],
    ),
    "secret-not-in-environment": _broken(
        _CANNOT_START + f'CreateContainerConfigError: secret "{MISSING}" not found',
        "CreateContainerConfigError",
        "Failed",
        envFrom=[{"secretRef": {"name": MISSING}}],
    ),
    "start-error": _broken(
        r"data mover pod ended: StartError \(exit code 128\): .*no such file",
        "Failed",
        "Failed",
        command=["/no/such/program"],
    ),
    "kubelet-rejection": Case(
        "data mover pod velero/{name} was rejected by its kubelet, will be recreated: OutOfcpu: ",
        "OutOfcpu",
        pod={},
        container=_HUGE,
        bound=True,
        heals=True,
    ),
    "name-taken": Case(
        "Pod velero/{name} already exists and does not belong to DataUpload {name}", "Failed", pod={}, foreign=True
    ),
    "snapshot-error": Case(
        "VolumeSnapshot {space}/{name} is not ready: .*the array is offline",
        "SnapshotError",
        snapshot="fail:the array is offline",
        heals=True,
    ),
    "snapshot-unfinished": Case(
        "VolumeSnapshot {space}/{name} is not ready yet",
        "SnapshotNotReady",
        snapshot="never",
        expected=True,
        heals=True,
    ),
    "source-claim-missing": Case("PersistentVolumeClaim {space}/missing does not exist", "Failed", source=MISSING),
    "target-claim-missing": Case(
        f"PersistentVolumeClaim {{space}}/{MISSING} to restore into does not exist",
        "TargetClaimMissing",
        kind="DataDownload",
        source=MISSING,
        expected=True,
    ),
    "target-claim-bound": Case(
        "cannot restore into target PVC {space}/data: it is already bound to PersistentVolume",
        "Failed",
        kind="DataDownload",
        source="data",
    ),
    "target-claim-unconsumed": Case(
        _TARGET + "is not used by a pod yet",
        "TargetClaimUnconsumed",
        kind="DataDownload",
        storage_class="bed-wait",
        expected=True,
    ),
    "target-class-missing": Case(
        f"StorageClass {MISSING} of " + _TARGET + "does not exist",
        "TargetClassMissing",
        kind="DataDownload",
        storage_class=MISSING,
    ),
    "workload-gone": Case(
        "workload pod {space}/missing is not available: it does not exist",
        "Failed",
        kind="PodVolumeBackup",
        source=MISSING,
    ),
    "workload-not-running": Case(
        "workload pod {space}/pending is not running: phase Pending", "Failed", kind="PodVolumeBackup"
    ),
    "workload-not-waiting": Case(
        "init container restore-wait of workload pod {space}/pending is not running",
        "WorkloadNotWaiting",
        kind="PodVolumeRestore",
        expected=True,
    ),
}
