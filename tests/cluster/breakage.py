"""What blocks a transfer: mover pods that cannot start, storage that fails, claims that do not exist.

A broken mover pod is put where the agent finds it, labeled and owned as if an earlier run had
created it: so the real scheduler and the real kubelet report the cause, and no other transfer is affected.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from core.kube.resources import CONFIG_MAPS, PODS
from core.models.names import (
    DATA_DOWNLOAD_LABEL,
    DATA_UPLOAD_LABEL,
    OWNER_UID_LABEL,
    POD_VOLUME_BACKUP_LABEL,
    POD_VOLUME_RESTORE_LABEL,
)
from tests.cluster.bed import Bed
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.settings import AGENT_IMAGE
from tests.testbed.storage.objects import FAULT_CONFIG_MAP

MISSING = "missing"

_TAINT_KEY, _TAINT_EFFECT = "causes.node-agent.test/held", "NoSchedule"
_TAINT = f"{_TAINT_KEY}:{_TAINT_EFFECT}"

_MOVER_LABELS = {
    "DataUpload": DATA_UPLOAD_LABEL,
    "DataDownload": DATA_DOWNLOAD_LABEL,
    "PodVolumeBackup": POD_VOLUME_BACKUP_LABEL,
    "PodVolumeRestore": POD_VOLUME_RESTORE_LABEL,
}

HELD_TOLERATION = {"key": _TAINT_KEY, "operator": "Exists", "effect": _TAINT_EFFECT}
"""For pods of other tests on a node that is `tainted` at the same time."""


def build_mover(transfer: Json, *, spec: Mapping[str, object], container: Mapping[str, object]) -> Json:
    """A mover pod of `transfer` that does nothing, changed by fields of its spec and of its container."""
    meta = transfer["metadata"]
    owner = {"apiVersion": transfer["apiVersion"], "kind": transfer["kind"], "name": meta["name"], "uid": meta["uid"]}
    sleeper = {
        "name": "mover",
        "image": AGENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
    }
    labels = {OWNER_UID_LABEL: meta["uid"], _MOVER_LABELS[transfer["kind"]]: meta["name"]}
    common = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{**sleeper, **container}],
    }
    more = {"labels": labels, "ownerReferences": [{**owner, "controller": True}]}
    return build_object(PODS, meta["name"], NAMESPACE, metadata=more, spec={**common, **spec})


def build_waiting_pod(namespace: str, name: str) -> Json:
    """A workload pod that fits no node, with an init container that would wait for its data."""
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    container = {"image": AGENT_IMAGE, "command": ["sleep", "infinity"], **mount}
    spec = {
        "nodeSelector": {MISSING: "true"},
        "initContainers": [{"name": "restore-wait", **container}],
        "containers": [{"name": "app", **container}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    return build_object(PODS, name, namespace, spec=spec)


@contextmanager
def break_storage(bed: Bed, space: str, faults: Iterable[tuple[str, str, str]]) -> Iterator[None]:
    """Make the storage fail: what (`provision`, `snapshot`), for which NAMESPACE/NAME, and in which way.

    `space` separates the faults from those of other tests, which may break the storage at the same time.
    """
    _own_faults(bed, space, {"data": {space: "\n".join(" ".join(fault) for fault in faults)}})
    try:
        yield
    finally:
        _own_faults(bed, space, {})


def _own_faults(bed: Bed, owner: str, content: Mapping[str, object]) -> None:
    """Apply `content` as all that `owner` manages in the ConfigMap with the storage's faults."""
    namespace, name = FAULT_CONFIG_MAP
    faults = build_object(CONFIG_MAPS, name, namespace, **content)
    # A server-side apply removes the keys that their owner no longer names.
    options = ["--server-side", f"--field-manager={owner}", "-f", "-"]
    bed.user.kubectl("apply", *options, stdin=json.dumps(faults))


@contextmanager
def tainted(bed: Bed, *nodes: str) -> Iterator[None]:
    bed.user.kubectl("taint", "nodes", *nodes, _TAINT)
    try:
        yield
    finally:
        bed.user.kubectl("taint", "nodes", *nodes, f"{_TAINT}-")
