"""What keeps a load from going on: mover pods that cannot start, storage that fails, claims nobody made.

A broken mover pod is put where the agent finds it, labelled and owned as if an earlier run had
made it: so the real scheduler and the real kubelet say what is wrong, and no other load is hit.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core.models.names import OWNER_UID_LABEL
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.settings import AGENT_IMAGE
from tests.testbed.storage.faults import CONFIG_MAP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tests.cluster.conftest import Bed
    from tests.cluster.scenes import Volume
    from tests.testbed.api import Json

__all__ = [
    "HELD_TOLERATION",
    "MISSING",
    "break_storage",
    "build_mover",
    "build_pod_volume_load",
    "build_target",
    "build_waiting_pod",
    "tainted",
]

MISSING = "nobody-made-it"

_TAINT_KEY, _TAINT_EFFECT = "causes.node-agent.test/held", "NoSchedule"
_TAINT = f"{_TAINT_KEY}:{_TAINT_EFFECT}"

HELD_TOLERATION = {"key": _TAINT_KEY, "operator": "Exists", "effect": _TAINT_EFFECT}
"""For pods of others on a node that is `tainted` beside them."""


def build_mover(load: Json, *, spec: Mapping[str, object], container: Mapping[str, object]) -> Json:
    """A mover pod of `load` that does nothing, changed by fields of its spec and of its container."""
    meta = load["metadata"]
    owner = {"apiVersion": load["apiVersion"], "kind": load["kind"], "name": meta["name"], "uid": meta["uid"]}
    sleeper = {
        "name": "mover",
        "image": AGENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": NAMESPACE,
            "name": meta["name"],
            "labels": {OWNER_UID_LABEL: meta["uid"]},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{**sleeper, **container}],
            **spec,
        },
    }


def build_waiting_pod(namespace: str, name: str) -> Json:
    """A workload's pod that no node takes, with an init container that would wait for its data."""
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    container = {"image": AGENT_IMAGE, "command": ["sleep", "infinity"], **mount}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "nodeSelector": {MISSING: "true"},
            "initContainers": [{"name": "restore-wait", **container}],
            "containers": [{"name": "app", **container}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }


def build_pod_volume_load(kind: str, name: str, *, pod: Mapping[str, str], location: str) -> Json:
    """A PodVolumeBackup or PodVolumeRestore of the volume `scratch` of a pod: its namespace, name and uid."""
    spec = {
        "pod": {"kind": "Pod", **pod},
        "volume": "scratch",
        "backupStorageLocation": location,
        "repoIdentifier": "",
        "uploaderType": "kopia",
    }
    more = (
        {"node": "nowhere"} if kind == "PodVolumeBackup" else {"snapshotID": "0", "sourceNamespace": pod["namespace"]}
    )
    metadata = {"namespace": NAMESPACE, "name": name}
    return {"apiVersion": "velero.io/v1", "kind": kind, "metadata": metadata, "spec": {**spec, **more}}


@contextmanager
def break_storage(bed: Bed, space: str, faults: Iterable[tuple[str, str, str]]) -> Iterator[None]:
    """Let the storage go wrong: what (`provision`, `snapshot`), for which NAMESPACE/NAME, and in which way.

    `space` tells them apart from those of others, who may break it at the same time.
    """
    _own_faults(bed, space, {"data": {space: "\n".join(" ".join(fault) for fault in faults)}})
    try:
        yield
    finally:
        _own_faults(bed, space, {})


def _own_faults(bed: Bed, owner: str, content: Mapping[str, object]) -> None:
    """Have this be all that an owner has of the ConfigMap with the storage's faults."""
    namespace, name = CONFIG_MAP
    metadata = {"namespace": namespace, "name": name}
    faults = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **content}
    # The API server knows whose key is whose, and removes what its owner names no more.
    options = ["--server-side", f"--field-manager={owner}", "-f", "-"]
    bed.user.kubectl("apply", *options, stdin=json.dumps(faults))


@contextmanager
def tainted(bed: Bed, *nodes: str) -> Iterator[None]:
    """Let some nodes take no new pod that does not tolerate it."""
    bed.user.kubectl("taint", "nodes", *nodes, _TAINT)
    try:
        yield
    finally:
        bed.user.kubectl("taint", "nodes", *nodes, f"{_TAINT}-")


def build_target(volume: Volume, name: str, *, storage_class: str) -> Json:
    """A claim of that class which waits for a volume that a DataDownload makes."""
    claim = volume.target(name)
    claim["spec"]["storageClassName"] = storage_class
    return claim
