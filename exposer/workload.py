"""Workload pods: their state, their tolerations, and the directories of their volumes on the node.

The rules are pure: a directory follows from the volume's source. Beside them are the only reads of the kubelet's pods
directory, as the agent has it mounted: directories are listed, and the files in which the kubelet collects termination
messages are read. What is mounted in the volumes of workloads is never opened: it belongs to tenants, and the server
behind it may hang.
Source: Kubernetes v1.34, pkg/kubelet/kubelet_getters.go (getPodVolumeDir), the plugin names in pkg/volume/*,
pkg/volume/csi/csi_mounter.go (getTargetPath); Velero v1.18, pkg/util/kube/utils.go (GetVolumeDirectory).
"""

import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Final

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES
from core.errors import ExposeError
from core.kube.event_files import read_start
from core.kube.types import Container, ContainerState, ContainerStatus, PersistentVolume, Pod, PodToleration, Volume
from core.models.names import RESTORE_UID_LABEL
from core.models.reasons import PendingReason
from core.models.transfers import PodReference
from core.text import some_of
from exposer.model import Pending
from exposer.pod_status import STARTING

_RESTORE_WAIT: Final = "restore-wait"
"""The init container that holds a restored pod until its data is restored.

Source: Velero v1.18, pkg/restorehelper; tests/recordings/velero-1.18.2/workload-pod-restored.json.
"""

ONTO_ANY_NODE: Final[PodToleration] = {"operator": "Exists", "effect": "NoSchedule"}
"""The toleration of a pod that must be scheduled to its node in spite of NoSchedule taints."""

_TERMINATED: Final = frozenset({"Succeeded", "Failed"})

_START_TIMEOUT: Final = timedelta(minutes=2)
"""How long the init container may not start: its image or a Secret may be there a minute later.

Source: Velero main at d2241adba, pkg/controller/pod_volume_restore_controller.go, which fails at once.
"""


def check_alive(ref: PodReference, pod: Pod | None) -> Pod:
    """Return `pod` if it is the one that `ref` names, and its volumes stay mounted.

    Raises:
        ExposeError: it was deleted, is being deleted, or has terminated.
    """
    missing = f"workload pod {ref} is not available"
    if pod is None:
        raise ExposeError(f"{missing}: it does not exist")
    meta = pod["metadata"]
    if not ref.matches(meta["uid"]):
        raise ExposeError(f"{missing}: the pod of that name has the UID {meta['uid']}, not {ref.uid}")
    if meta.get("deletionTimestamp"):
        raise ExposeError(f"{missing}: it is being deleted")
    phase = (pod.get("status") or {}).get("phase", "")
    if phase in _TERMINATED:
        raise ExposeError(f"{missing}: phase {phase}, its volumes are unmounted")
    return pod


def check_running(ref: PodReference, pod: Pod) -> Pending | None:
    """Return None while `pod` is running, so that its volumes are mounted; why it is pending if it runs again soon.

    Raises:
        ExposeError: it has not run yet, or its state is unknown.
    """
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if phase == "Running":
        return None
    text = f"workload pod {ref} is not running: phase {phase}"
    if phase != "Pending" or not any(map(_has_ended, status.get("containerStatuses") or [])):
        raise ExposeError(text)
    # Its node was restarted: the init containers run again.
    # Source: Kubernetes v1.34, pkg/kubelet/kubelet_pods.go (getPhase).
    return Pending(PendingReason.WORKLOAD_NOT_STARTING, f"{text}, starting again", blocked=True)


def check_restore_wait(ref: PodReference, pod: Pod) -> Pending | None:
    """Return None while the pod's init container holds it until its data is restored.

    Raises:
        ExposeError: there is no such container, it has terminated, or the state of the pod is unknown.
    """
    named = [c for c in pod["spec"].get("initContainers") or [] if c["name"] == _RESTORE_WAIT]
    if not named:
        raise ExposeError(f"workload pod {ref} has no init container {_RESTORE_WAIT}: it would start without its data")
    if (pod.get("status") or {}).get("phase") == "Unknown":
        raise ExposeError(f"state of workload pod {ref} is unknown: its node does not report it")
    state = _restore_wait_state(pod)
    if "running" in state:
        return None
    what = f"init container {_RESTORE_WAIT} of workload pod {ref}"
    if terminated := state.get("terminated"):
        code = terminated.get("exitCode", 0)
        if code and pod["spec"].get("restartPolicy") != "Never":
            # It ran out of memory, or the node was restarted: the kubelet starts it again, and it waits again.
            return Pending(PendingReason.WORKLOAD_NOT_WAITING, f"{what} has ended (exit code {code}), and starts again")
        raise ExposeError(f"{what} has terminated (exit code {code}): the pod no longer waits for its data")
    waiting = state.get("waiting") or {}
    if (reason := waiting.get("reason", "")) not in STARTING:
        text = ": ".join(part for part in (f"{what} cannot start", reason, waiting.get("message", "")) if part)
        operation = f"start of {_RESTORE_WAIT} in {pod['metadata']['uid']}"
        return Pending(
            PendingReason.WORKLOAD_NOT_STARTING, text, blocked=True, operation=operation, timeout=_START_TIMEOUT
        )
    return Pending(PendingReason.WORKLOAD_NOT_WAITING, f"{what} is not running")


def describe_restore_wait(pod: Pod) -> str | None:
    """Return the state of the init container: running, terminated or not starting; None for any other."""
    state = _restore_wait_state(pod)
    if (state.get("waiting") or {}).get("reason", "") not in STARTING:
        return "not starting"
    return next((name for name in ("running", "terminated") if name in state), None)


def restore_wait_completed(ref: PodReference, pod: Pod | None) -> bool:
    """Return whether the pod's init container found the restored data; later states of the pod do not matter."""
    return pod is not None and ref.matches(pod["metadata"]["uid"]) and _found_data(pod)


_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def check_restore_of(ref: PodReference, pod: Pod, restore: str | None) -> None:
    """Raise ExposeError if the pod waits for the data of another Restore than the one with the UID `restore`.

    Its done file would have another name, and the pod would never start. A program may wait for something else.
    """
    awaited = read_restore_of(pod)
    if awaited != restore and awaited is not None and _UID.fullmatch(awaited):
        raise ExposeError(
            f"init container {_RESTORE_WAIT} of workload pod {ref} waits for the data of Restore {awaited}, and not of "
            f"{restore or 'none'}: the PodVolumeRestore names the UID as its owner, or in the label {RESTORE_UID_LABEL}"
        )


def waits_for_restore(pod: Pod, restore: str | None) -> bool:
    """Return whether `pod` is held until the data of the Velero restore with this UID is there, and writes nothing."""
    return bool(restore) and read_restore_of(pod) == restore and not _found_data(pod)


def read_restore_of(pod: Pod) -> str | None:
    """Return the UID of the Velero restore whose data holds the pod, or held it."""
    args = [c.get("args") or [""] for c in pod["spec"].get("initContainers") or [] if c["name"] == _RESTORE_WAIT]
    return args[0][0] or None if args else None


def find_volume(ref: PodReference, pod: Pod, name: str) -> Volume:
    """Return the volume of that name from the pod; raise ExposeError unless it is mounted as a file system."""
    volume = next((v for v in pod["spec"].get("volumes") or [] if v["name"] == name), None)
    if volume is None:
        raise ExposeError(f"workload pod {ref} has no volume {name}")
    if any(device["name"] == name for c in list_containers(pod) for device in c.get("volumeDevices") or []):
        raise build_block_error(ref, name)
    if not any(mount["name"] == name for c in list_containers(pod) for mount in c.get("volumeMounts") or []):
        raise ExposeError(f"no container of workload pod {ref} mounts volume {name}: it is not mounted on the node")
    return volume


def list_containers(pod: Pod) -> list[Container]:
    """Return all containers of a pod: while it runs, its kubelet mounts what any of them mounts, and nothing else.

    Source: Kubernetes v1.34, pkg/kubelet/volumemanager/populator; pkg/volume/util/util.go (GetPodVolumeNames).
    """
    spec = pod["spec"]
    every = (spec.get("initContainers"), spec.get("containers"), spec.get("ephemeralContainers"))
    return [container for some in every for container in some or []]


def build_block_error(ref: PodReference, name: str) -> ExposeError:
    """Return the error for a block volume."""
    return ExposeError(f"volume {name} of workload pod {ref} is a block volume: pod volumes must be file systems")


def tolerations_to_stay(pod: Pod) -> tuple[PodToleration, ...]:
    """Return the tolerations that keep a pod on the workload's node for as long as the workload.

    The kubelet admits it under the workload's NoExecute taints, and it is not evicted before the workload (tolerations
    without an effect included). No NoSchedule taint is a reason to evict it either, as a descheduler may do.
    """
    tolerated = pod["spec"].get("tolerations") or []
    kept = [t | {"effect": "NoExecute"} for t in tolerated if t.get("effect", "") in {"", "NoExecute"}]
    return (ONTO_ANY_NODE, *kept)


TO_CORDONED_NODE: Final[PodToleration] = {
    "key": "node.kubernetes.io/unschedulable",
    "operator": "Exists",
    "effect": "NoSchedule",
}
"""The toleration of a node that was cordoned after a pod was scheduled to it."""


def tolerations_of_consumers(pods: Iterable[Pod], claim: str) -> tuple[PodToleration, ...]:
    """Return the tolerations that let the `pods` that use the PVC `claim` run on a tainted node."""
    found = list[PodToleration]()
    for pod in pods:
        if all(claim_of(pod, volume) != claim for volume in pod["spec"].get("volumes") or []):
            continue
        tolerated = [t for t in pod["spec"].get("tolerations") or [] if t.get("effect", "") in {"", "NoSchedule"}]
        found += [t for one in tolerated if (t := one | {"effect": "NoSchedule"}) not in found]
    return tuple(found)


def describe_users(pods: Iterable[Pod], claim: str, *, ended: bool = False) -> list[str]:
    """Return the `pods` that use the PVC of their namespace, or with `ended` have used it, with what controls them."""
    return [
        _describe_pod(pod)
        for pod in pods
        if (ended or (pod.get("status") or {}).get("phase") not in _TERMINATED)
        and any(claim_of(pod, volume) == claim for volume in pod["spec"].get("volumes") or [])
    ]


def _describe_pod(pod: Pod) -> str:
    meta = pod["metadata"]
    controller = next((one for one in meta.get("ownerReferences") or [] if one.get("controller")), None)
    whose = f" of {controller['kind']} {controller['name']}" if controller else ""
    return f"pod {meta['namespace']}/{meta['name']}{whose}"


def _has_ended(container: ContainerStatus) -> bool:
    return any("terminated" in (state or {}) for state in (container.get("state"), container.get("lastState")))


def _restore_wait_state(pod: Pod) -> ContainerState:
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or []
    states = (status.get("state") for status in statuses if status["name"] == _RESTORE_WAIT)
    return next(states, None) or {}


def _found_data(pod: Pod) -> bool:
    return (_restore_wait_state(pod).get("terminated") or {}).get("exitCode") == 0


_CSI: Final = "kubernetes.io~csi"

_MIGRATED: Final = ("awsElasticBlockStore", "azureDisk", "azureFile", "cinder", "gcePersistentDisk", "vsphereVolume")
"""Kubelets mount these through CSI drivers, whatever the object names.

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
    # Removed in v1.31; nodes of older clusters still mount them.
    "cephfs": "kubernetes.io~cephfs",
    "rbd": "kubernetes.io~rbd",
    "configMap": "kubernetes.io~configmap",
    "secret": "kubernetes.io~secret",
    "downwardAPI": "kubernetes.io~downward-api",
    "projected": "kubernetes.io~projected",
} | dict.fromkeys(_MIGRATED, _CSI)


_OF_POD: Final = frozenset(_PLUGINS[key] for key in ("emptyDir", "configMap", "secret", "downwardAPI", "projected"))
"""These mount nothing of a PersistentVolume, and no other plugin mounts such a volume. Both may have the same name."""


def claim_of(pod: Pod, volume: Volume) -> str | None:
    """Return the name of the PVC behind `volume` of `pod`; None where it has none.

    Source: Kubernetes v1.34, staging/src/k8s.io/component-helpers/storage/ephemeral.
    """
    if "ephemeral" in volume:
        return f"{pod['metadata']['name']}-{volume['name']}"
    source = volume.get("persistentVolumeClaim")
    return source["claimName"] if source else None


def build_volume_directory(
    kubelet_root: str, pod_uid: str, volume: Volume, *, pv: PersistentVolume | None = None
) -> str:
    """Return the directory on the node in which the kubelet mounts a volume of a pod, an entry of its `spec.volumes`.

    `pv` is the PersistentVolume of its PVC, if it has one. ExposeError: such a volume has no directory in the pod's.
    """
    source, name = (volume, volume["name"]) if pv is None else (pv["spec"], pv["metadata"]["name"])
    plugin = _plugin_of(source)
    if not plugin:
        kinds = [key for key in source if key in {"hostPath", "image", "gitRepo"}]
        what = kinds[0] if kinds else "an unknown source"
        raise ExposeError(f"volume {volume['name']} has source {what}: its data is not in a directory of the pod")
    return join_directory(str(PurePosixPath(kubelet_root, "pods", pod_uid)), plugin, name)


def join_directory(pod_directory: str, plugin: str, name: str) -> str:
    """Return the directory in which a plugin mounts the volume of that name, in the directory of its pod."""
    below = ("mount",) if plugin == _CSI else ()
    return "/".join((pod_directory, "volumes", plugin, name, *below))


_DIRECTORY: Final = re.compile(r"(.*/pods/[^/]+)/volumes/([^/]+)/([^/]+)(?:/mount)?")
"""A volume may be named `volumes` or `mount`."""


def split_directory(directory: str) -> tuple[str, str, str] | None:
    """Return pod directory, plugin and name from `directory`, a result of `join_directory`; None if it is none."""
    parts = _DIRECTORY.fullmatch(directory)
    return (parts[1], parts[2], parts[3]) if parts else None


def pod_of_directory(directory: str) -> str | None:
    """Return the UID of the pod in `directory`, a result of `join_directory`; None if it is none."""
    parts = split_directory(directory)
    return parts[0].rpartition("/")[2] if parts else None


def _plugin_of(source: Mapping[str, Any]) -> str | None:
    driver = (source.get("flexVolume") or {}).get("driver", "")
    if driver:
        return str(driver).replace("/", "~")
    return next((plugin for key, plugin in _PLUGINS.items() if source.get(key) is not None), None)


EVENTS_VOLUME: Final = "mover-events"
"""The emptyDir of a mover pod in which its Events are files."""

_SHOWN: Final = 10
"""Directories that fit into a message; a pod rarely has more volumes."""


def list_pods(host_pods: str) -> frozenset[str]:
    """Return the names in `host_pods`, as the agent has it mounted: UIDs, hashes of static pods; else raise OSError."""
    return frozenset(path.name for path in Path(host_pods).iterdir())


def find_volume_directory(host_pods: str, directory: str, *, what: str) -> str:
    """Return the directory on the node in which the kubelet has mounted a volume, whichever plugin did it.

    That is `directory` if it exists, or if the agent cannot list it: the mover then reports the cause.

    Args:
        host_pods: the kubelet's pods directory, as the agent has it mounted.
        directory: a result of `build_volume_directory`, with the plugin's expected name.
        what: the volume, for messages.

    Raises:
        ExposeError: the volume is in no directory of its pod, or in several.

    Source: Velero v1.18, pkg/exposer/host_path.go (GetPodVolumeHostPath).
    """
    parts = split_directory(directory)
    if parts is None:
        return directory
    pod_directory, plugin, name = parts
    try:
        list_pods(host_pods)
        every = Path(host_pods, Path(pod_directory).name, "volumes")
        volumes = {each: _list(every / each) for each in _list(every)}
    except OSError:
        return directory
    matching = [each for each, names in volumes.items() if name in names]
    if plugin in matching:
        return directory
    # A plugin that is not known here may mount anything.
    of_others = frozenset(_PLUGINS.values()) if plugin in _OF_POD else _OF_POD
    matching = [each for each in matching if each not in of_others]
    if not matching:
        others = [f"{each}/{other}" for each, names in volumes.items() for other in names]
        found = some_of(others, _SHOWN) or "nothing"
        raise ExposeError(
            f"{what} is not in the kubelet's directories of the pod: looked for volumes/*/{name}, found {found}"
        )
    if len(matching) > 1:
        found = some_of([f"{each}/{name}" for each in matching], _SHOWN)
        raise ExposeError(f"{what} is in several of the kubelet's directories of the pod: {found}")
    return join_directory(pod_directory, matching[0], name)


def find_mover_events(host_pods: str | None, uid: str) -> Path | None:
    """Return the directory with the Events of the mover pod `uid`; None if it has none, or one that cannot be read.

    Source: Kubernetes v1.34, pkg/volume/emptydir/empty_dir.go (getPath).
    """
    if host_pods is None:
        return None
    directory = Path(host_pods, uid, "volumes", "kubernetes.io~empty-dir", EVENTS_VOLUME)
    # SELinux may deny the agent what the mode permits.
    return directory if os.access(directory, os.R_OK | os.X_OK) else None


def read_termination_message(host_pods: str, uid: str, container: str) -> str | None:
    """Return what a container of the pod `uid` has left as termination message so far; None if that is nothing.

    The kubelet reports the same once it knows that the container has ended, up to a second later. The container can
    write into the file, but not exchange it: the file alone is mounted.

    Source: Kubernetes v1.34, pkg/kubelet/kuberuntime/kuberuntime_container.go (makeMounts): a file with a name of its
    own for each start of the container, in `<pods>/<uid>/containers/<name>`.
    """
    directory = Path(host_pods, uid, "containers", container)
    try:
        messages = [_read_start(directory / name) for name in _list(directory)]
    except OSError:
        return None
    return next(filter(None, messages), None)


def _read_start(file: Path) -> str | None:
    try:
        return read_start(file, TERMINATION_MESSAGE_LIMIT_BYTES).decode(errors="replace")
    except OSError:
        return None


def _list(directory: Path) -> list[str]:
    """Return the names in `directory` in order; none if it does not exist."""
    try:
        return sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
