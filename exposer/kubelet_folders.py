"""Where a kubelet mounts the volume of a pod.

Knows the folder of each kind of volume below the kubelet's root. Does not read the node's
file system, nor the cluster: the plugin's name follows from the volume's source.
Source: Kubernetes v1.34, pkg/kubelet/kubelet_getters.go (getPodVolumeDir), the plugin names in
pkg/volume/*, pkg/volume/csi/csi_mounter.go (getTargetPath); Velero v1.18,
pkg/util/kube/utils.go (GetVolumeDirectory).
"""

from typing import Final

from core.errors import ExposeError
from core.models.base import JsonDict

__all__ = ["build_volume_folder", "claim_of", "pod_of_folder"]

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
