"""The pod whose volume is moved while it runs: is it there, does it wait, what does it tolerate?

Knows how the state of a workload's pod reads. Does no I/O, and does not know what is done
with its volume (`exposer.pod_volume`).

Where a kubelet mounts the volume of a pod.

Knows the folder of each kind of volume below the kubelet's root. Does not read the node's
file system, nor the cluster: the plugin's name follows from the volume's source.
Source: Kubernetes v1.34, pkg/kubelet/kubelet_getters.go (getPodVolumeDir), the plugin names in
pkg/volume/*, pkg/volume/csi/csi_mounter.go (getTargetPath); Velero v1.18,
pkg/util/kube/utils.go (GetVolumeDirectory).
"""

from typing import Final

from core.errors import ExposeError
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.model import Pending, WorkloadRef

__all__ = [
    "ONTO_ANY_NODE",
    "RESTORE_WAIT",
    "block_refused",
    "build_volume_folder",
    "check_alive",
    "check_restore_wait",
    "check_running",
    "claim_of",
    "find_volume",
    "pod_of_folder",
    "tolerations_to_stay",
    "took_its_data",
]


RESTORE_WAIT: Final = "restore-wait"
"""The init container that holds a restored pod until its volumes are filled.

Source: Velero v1.18, pkg/restorehelper; tests/recordings/velero-1.18.2/workload-pod-restored.json.
"""


ONTO_ANY_NODE: Final[JsonDict] = {"operator": "Exists", "effect": "NoSchedule"}
"""The toleration of a pod that must get there although nothing new is to be scheduled."""


_ENDED: Final = frozenset({"Succeeded", "Failed"})


def check_alive(ref: WorkloadRef, pod: JsonDict | None) -> JsonDict:
    """Return `pod` (a v1 Pod as JSON dict), which is the one that `ref` means and keeps its volumes.

    Raises:
        ExposeError: it is gone, or about to go, and its volumes with it.
    """
    gone = f"workload pod {ref} is gone"
    if pod is None:
        raise ExposeError(f"{gone}: it does not exist")
    meta = pod["metadata"]
    if not ref.means(pod):
        raise ExposeError(f"{gone}: the pod of that name has the UID {meta['uid']}, not {ref.uid}")
    if meta.get("deletionTimestamp"):
        raise ExposeError(f"{gone}: it is being deleted")
    phase = (pod.get("status") or {}).get("phase", "")
    if phase in _ENDED:
        raise ExposeError(f"{gone}: it has ended ({phase}), and its volumes are unmounted")
    return pod


def check_running(ref: WorkloadRef, pod: JsonDict) -> None:
    """Return if `pod` runs, so that its volumes are mounted and hold what is to be kept.

    Raises:
        ExposeError: it does not run yet.
    """
    phase = (pod.get("status") or {}).get("phase", "Pending")
    if phase != "Running":
        raise ExposeError(f"workload pod {ref} does not run: it is {phase}")


def check_restore_wait(ref: WorkloadRef, pod: JsonDict) -> Pending | None:
    """Return None while `pod` waits in its init container for the data of its volumes.

    Raises:
        ExposeError: it has no such container.
    """
    named = [c for c in pod["spec"].get("initContainers") or [] if c["name"] == RESTORE_WAIT]
    if not named:
        raise ExposeError(f"workload pod {ref} has no init container {RESTORE_WAIT}: it would not wait for its data")
    if "running" in _restore_wait_state(pod):
        return None
    what = f"init container {RESTORE_WAIT} of workload pod {ref} does not run"
    return Pending(PendingReason.WORKLOAD_NOT_WAITING, what)


def took_its_data(ref: WorkloadRef, pod: JsonDict | None) -> bool:
    """Whether the pod saw that its volumes are filled: what became of it then takes nothing back."""
    if pod is None or not ref.means(pod):
        return False
    terminated: JsonDict = _restore_wait_state(pod).get("terminated") or {}
    return bool(terminated) and terminated.get("exitCode") == 0


def find_volume(ref: WorkloadRef, pod: JsonDict, name: str) -> JsonDict:
    """Return the volume of that name from the pod's `spec.volumes`.

    Raises:
        ExposeError: there is none, or no container has it mounted as a file system.
    """
    spec = pod["spec"]
    volume: JsonDict | None = next((v for v in spec.get("volumes") or [] if v["name"] == name), None)
    if volume is None:
        raise ExposeError(f"workload pod {ref} has no volume {name}")
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    if any(device["name"] == name for c in containers for device in c.get("volumeDevices") or []):
        raise block_refused(ref, name)
    if not any(mount["name"] == name for c in containers for mount in c.get("volumeMounts") or []):
        # Source: Kubernetes v1.34, pkg/kubelet/volumemanager/populator: such a volume is skipped.
        raise ExposeError(f"no container of workload pod {ref} mounts volume {name}: it is not on the node")
    return volume


def block_refused(ref: WorkloadRef, name: str) -> ExposeError:
    """Return the refusal of a volume that is a device."""
    return ExposeError(f"volume {name} of workload pod {ref} is a block volume: only file systems are moved pod by pod")


def tolerations_to_stay(pod: JsonDict) -> tuple[JsonDict, ...]:
    """Return what a pod must tolerate to be on the workload's node as long as the workload is.

    Like the workload itself it is not driven away (its NoExecute tolerations, those without an
    effect included), and it gets there although nothing new is to be scheduled: the data is there.
    """
    tolerated = pod["spec"].get("tolerations") or []
    kept = [t | {"effect": "NoExecute"} for t in tolerated if t.get("effect", "") in {"", "NoExecute"}]
    return (ONTO_ANY_NODE, *kept)


def _restore_wait_state(pod: JsonDict) -> JsonDict:
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or []
    state: JsonDict = next((s.get("state") or {} for s in statuses if s["name"] == RESTORE_WAIT), {})
    return state


_CSI: Final = "kubernetes.io~csi"


_MIGRATED: Final = ("awsElasticBlockStore", "azureDisk", "azureFile", "cinder", "gcePersistentDisk", "vsphereVolume")
"""Kubelets hand these to CSI drivers, whatever the object says.

Source: Kubernetes v1.34, pkg/volume/csimigration; each of these is locked to its driver.
"""


_PLUGINS: Final = {
    "csi": _CSI,
    "portworxVolume": _CSI,
    "emptyDir": "kubernetes.io~empty-dir",
    "local": "kubernetes.io~local-volume",
    "nfs": "kubernetes.io~nfs",
    "iscsi": "kubernetes.io~iscsi",
    "fc": "kubernetes.io~fc",
    # Gone since v1.31: nodes of older clusters still mount them.
    "cephfs": "kubernetes.io~cephfs",
    "rbd": "kubernetes.io~rbd",
    "configMap": "kubernetes.io~configmap",
    "secret": "kubernetes.io~secret",
    "downwardAPI": "kubernetes.io~downward-api",
    "projected": "kubernetes.io~projected",
} | dict.fromkeys(_MIGRATED, _CSI)


def claim_of(pod: JsonDict, volume: JsonDict) -> str:
    """Return the name of the claim behind `volume` of `pod`; empty where it has none.

    Source: Kubernetes v1.34, staging/src/k8s.io/component-helpers/storage/ephemeral.
    """
    if "ephemeral" in volume:
        return f"{pod['metadata']['name']}-{volume['name']}"
    return str((volume.get("persistentVolumeClaim") or {}).get("claimName", ""))


def build_volume_folder(kubelet_root: str, pod_uid: str, volume: JsonDict, *, pv: JsonDict | None = None) -> str:
    """Return the node's folder in which the kubelet has mounted a volume.

    Args:
        kubelet_root: the kubelet's folder on the node.
        pod_uid: whose volume it is.
        volume: the entry of the pod's `spec.volumes`.
        pv: the PersistentVolume of its claim, for a volume with one.

    Raises:
        ExposeError: a kubelet mounts nothing in a folder of its own for such a volume.
    """
    source, name = (volume, volume["name"]) if pv is None else (pv["spec"], pv["metadata"]["name"])
    plugin = _plugin_of(source)
    if not plugin:
        kinds = [key for key in source if key in {"hostPath", "image", "gitRepo"}]
        what = kinds[0] if kinds else "an unknown source"
        raise ExposeError(f"volume {volume['name']} is of {what}: no folder of the pod's own holds its data")
    below = "/mount" if plugin == _CSI else ""
    return f"{kubelet_root.rstrip('/')}/pods/{pod_uid}/volumes/{plugin}/{name}{below}"


def pod_of_folder(folder: str) -> str:
    """Return the UID of the pod that `folder`, one of `build_volume_folder`, is of."""
    return folder.rpartition("/volumes/")[0].rpartition("/")[2]


def _plugin_of(source: JsonDict) -> str:
    driver = (source.get("flexVolume") or {}).get("driver", "")
    if driver:
        return str(driver).replace("/", "~")
    return next((plugin for key, plugin in _PLUGINS.items() if source.get(key) is not None), "")
