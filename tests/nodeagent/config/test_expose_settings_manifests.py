"""Configurations by transfers: the pod and the claims of each, whole, as they are sent to the API server.

Everything between a ConfigMap's document and a request is the product's: parsing, plan, kind,
exposer, builders. The cluster is the exposers' small one.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from nodeagent.app import build_kinds
from nodeagent.transfers.kinds.base import Kind
from tests.exposer.support.inputs import template
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import Cut, World, no_guard
from tests.exposer.test_pod_volume import Scene
from tests.nodeagent.support.configured import build_settings
from tests.support.golden import assert_golden, recorded

SPOT = {"key": "spot", "operator": "DoesNotExist"}
CONFIGURATIONS: dict[str, JsonDict] = {
    "default": {},
    "everything": {
        "backupPVC": {
            "hostpath": {"storageClass": "fast", "readOnly": True, "spcNoRelabeling": True, "annotations": {"a/b": "c"}}
        },
        "cachePVC": {"storageClass": "fast", "residentThresholdInMB": 1},
        "nodeagent.io": {"moverServiceAccount": "node-agent-mover", "excludedMetadata": ["k8s.io/"]},
        "loadAffinity": [
            {"nodeSelector": {"matchLabels": {"pool": "movers"}}},
            {"nodeSelector": {"matchLabels": {"disk": "ssd"}, "matchExpressions": [SPOT]}, "storageClass": "fast"},
        ],
        "podAnnotations": {"note": "x"},
        "podLabels": {"team": "storage"},
        "podResources": {"cpuRequest": "100m", "memoryLimit": "2Gi", "ephemeralStorageRequest": "6Gi"},
        "priorityClassName": "data-mover-low",
        "privilegedFsBackup": True,
        "restorePVC": {"ignoreDelayBinding": True},
        "tolerations": [{"key": "storage", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
    },
    "inheriting": {
        "cachePVC": {"storageClass": "kept"},
        "loadAffinity": [{"nodeSelector": {"matchLabels": {"pool": pool}}} for pool in ("movers", "spare")],
        "loadAffinityMode": "any",
        "tolerations": "inherit",
    },
}
"""What a good deal of users do not set, may set, and set for other reasons; see docs/configuration.md."""


class Sent(Cut):
    """A transport that keeps what is created."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kube)
        self.created: list[JsonDict] = []

    async def request(self, request: Request) -> Response:
        if request.method == "POST":
            self.created.append(json.loads(request.body or b""))
        return await super().request(request)


def late_backup() -> World:
    """A source whose volume is made where its first pod goes: in one zone."""
    world = BackupScene(binding="WaitForFirstConsumer").world
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}
    terms = [{"matchExpressions": [zone]}]
    volume: JsonDict = {"metadata": {"name": "pvc-source"}, "apiVersion": "v1", "kind": "PersistentVolume"}
    world.kube.put(volume | {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}})
    return world


def pod_volume(kind: str, **volume: Any) -> World:
    scene = Scene(kind)
    if volume:
        scene.spec["volumes"] = [{"name": "fs"} | volume]
        scene.put_pod({"phase": "Running"})
    return scene.world


TRANSFERS: dict[str, tuple[str, Callable[[], World]]] = {
    "upload": ("dataupload", lambda: BackupScene().world),
    "upload-block": ("dataupload", lambda: BackupScene(mode="Block").world),
    "upload-late": ("dataupload", late_backup),
    "download": ("datadownload", lambda: RestoreScene().world),
    "download-block": ("datadownload", lambda: RestoreScene(mode="Block").world),
    "download-late": ("datadownload", lambda: RestoreScene(binding="WaitForFirstConsumer", node="node-b").world),
    "pod-volume-backup": ("podvolumebackup", lambda: pod_volume("podvolumebackup")),
    "pod-volume-backup-empty-dir": ("podvolumebackup", lambda: pod_volume("podvolumebackup", emptyDir={})),
    "pod-volume-restore": ("podvolumerestore", lambda: pod_volume("podvolumerestore")),
}


def kind_of(recording: str, sent: Sent, document: JsonDict) -> Kind[Any]:
    client = World.client_over(sent)
    causes, settings = World.causes_over(client), build_settings(document, template())
    kinds = build_kinds(client, causes, lambda: settings, frozenset({""}), node="node-a")
    return next(kind for kind in kinds if kind.spec.name.lower() == recording)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
async def test_what_a_transfer_gets_is_its_golden_list(configuration: str, transfer: str) -> None:
    recording, build = TRANSFERS[transfer]
    world = build()
    sent = Sent(world)
    kind = kind_of(recording, sent, CONFIGURATIONS[configuration])
    cr = kind.parse(recorded(recording))

    await world.until_exposed(lambda: kind.ensure_exposed(cr, no_guard))

    created = [one for one in sent.created if one["kind"] in {PODS.kind, PERSISTENT_VOLUME_CLAIMS.kind}]
    assert_golden(f"table/{configuration}-{transfer}", {"apiVersion": "v1", "kind": "List", "items": created})
