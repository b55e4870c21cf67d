"""Configurations by transfers: the pod and the claims of each, whole, as they are sent to the API server.

Everything between a ConfigMap's document and a request is the product's: parsing, plan, kind,
exposer, builders. The cluster is the exposers' small one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from exposer.manifests import build_backup_claim, build_cache_claim, volume_mode
from exposer.model import LocatedVolume
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import StorageAccess
from nodeagent.app import build_kinds
from nodeagent.transfers.kinds.base import Kind
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request, template
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import World, no_guard
from tests.exposer.test_pod_volume import Scene
from tests.fuzz.distorter import paths_in, replace_at
from tests.nodeagent.support.configured import build_settings
from tests.support.golden import assert_golden, recorded
from tests.support.objects import JsonDict, only

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


def kind_of(recording: str, world: World, document: JsonDict) -> Kind[Any]:
    causes, settings = World.causes_over(world.client), build_settings(document, template())
    kinds = build_kinds(world.client, causes, lambda: settings, frozenset({""}), node="node-a")
    return next(kind for kind in kinds if kind.spec.name.lower() == recording)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
async def test_what_a_transfer_gets_is_its_golden_list(configuration: str, transfer: str) -> None:
    recording, build = TRANSFERS[transfer]
    world = build()
    kind = kind_of(recording, world, CONFIGURATIONS[configuration])
    cr = kind.parse(recorded(recording))

    await world.until_exposed(lambda: kind.ensure_exposed(cr, no_guard))

    created = [json.loads(request.body or b"") for request in world.kube.requests if request.method == "POST"]
    items = [one for one in created if one["kind"] in {PODS.kind, PERSISTENT_VOLUME_CLAIMS.kind}]
    assert_golden(f"table/{configuration}-{transfer}", {"apiVersion": "v1", "kind": "List", "items": items})


_SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["inherit", "1Gi", "In"])
)
_JSON = st.recursive(
    _SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


@st.composite
def documents(draw: st.DrawFn) -> JsonDict:
    """A valid document in which up to three values are replaced."""
    document = CONFIGURATIONS["everything"]
    for _ in range(draw(st.integers(0, 3))):
        document = replace_at(document, draw(st.sampled_from(list(paths_in(document)))), draw(_JSON))
    return document


@given(documents())
def test_every_transfer_can_be_exposed(document: JsonDict) -> None:
    settings = build_settings(document, template())
    upload = replace(snapshot_request(), settings=settings)
    download = replace(restore_request(), settings=settings)
    backup = replace(pod_volume_request(), settings=settings)
    claim: JsonDict = build_backup_claim(upload, size="1Gi", mode=volume_mode(only(spec={})))
    rules = Placement(alternatives=settings.nodes.choose(upload.backup_class))
    cache, storage = settings.cache_for(0), StorageAccess()

    created = [
        claim,
        build_backup_pod(upload, claim, rules, storage=storage),
        build_restore_pod(download, volume_mode(claim), placement=rules, storage=storage),
        build_pod_volume_pod(backup, LocatedVolume("node-a", "/folder"), storage=storage),
        *([build_cache_claim(upload.owner, cache, node="")] if cache else []),
    ]

    assert json.loads(json.dumps(created, allow_nan=False)) == created
