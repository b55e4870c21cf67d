"""The settings of exposers that follow from each configuration key, and the objects that transfers get by them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.contract import MoverMethod
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.resources import DAEMON_SETS, PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import Request, Response
from core.models.phases import RetryRules
from core.models.transfer_settings import Compression, Exclusions
from exposer.manifests import build_backup_claim, build_cache_claim, volume_mode
from exposer.model import LocatedVolume
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import (
    BackupPVCSettings,
    CacheRule,
    CacheVolume,
    CompressionRules,
    ExclusionRule,
    ExclusionRules,
    ExposeSettings,
    MoverOptions,
    PodSettings,
    StorageAccess,
)
from exposer.template import AgentTemplate
from nodeagent.app import build_kinds
from nodeagent.config.expose_settings import build_expose_settings, read_template
from nodeagent.config.parse import parse_config
from nodeagent.transfers.kinds.base import Kind
from tests.exposer.support.inputs import daemonset, pod_volume_request, restore_request, snapshot_request, template
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import World, no_guard
from tests.exposer.test_pod_volume import Scene
from tests.fuzz.distorter import paths_in, replace_at
from tests.nodeagent.support.configured import build_settings
from tests.support.golden import assert_golden, recorded
from tests.support.objects import JsonDict, only
from tests.support.scripted import answer, rejection, scripted_client, stored

DEFAULTS = ExposeSettings(AgentTemplate("mover:1"), mover=MoverOptions(log_level="debug"))


def build(priority_class: str | None = None, limit_mib: int = 5000, /, **document: Any) -> ExposeSettings:
    parsed = parse_config(json.dumps(document))
    assert not parsed.errors
    return build_expose_settings(DEFAULTS, parsed.config, priority_class=priority_class, cache_limit_mib=limit_mib)


def configured(**changes: Any) -> ExposeSettings:
    return replace(DEFAULTS, pod=PodSettings(**({"labels": {}, "annotations": {}} | changes)))


_RULE = {
    "namespaces": ["a"],
    "storageClasses": ["fast"],
    "patterns": ["*.tmp"],
    "sets": ["lost+found"],
    "oneFileSystem": True,
    "largestSize": "1Gi",
}
_EXCLUDED = Exclusions(patterns=("*.tmp", "/lost+found/"), max_bytes=2**30, one_file_system=True)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            {"retry": {"perKind": {"DataUpload": {"oomMemoryFactor": 2}}}},
            {"retries": {"DataUpload": RetryRules(oom_memory_factor=2)}},
        ),
        (
            {"compression": {"default": "s2-default", "perStorageClass": {"fast": "zstd"}}},
            {"compression": CompressionRules(Compression.S2, {"fast": Compression.ZSTD})},
        ),
        ({"mover": "plain"}, {"mover": replace(DEFAULTS.mover, method=MoverMethod.PLAIN)}),
        ({"requireFileAttributes": True}, {"mover": replace(DEFAULTS.mover, require_attributes=True)}),
        ({"ignoreFilesNamespaces": ["a", "b"]}, {"ignore_files_namespaces": {"a", "b"}}),
        ({"readAllFilesNamespaces": ["a"]}, {"read_all_files_namespaces": {"a"}}),
        (
            {"exclude": {"rules": [_RULE], "annotationNamespaces": ["b"]}},
            {
                "exclusions": ExclusionRules(
                    (ExclusionRule(_EXCLUDED, frozenset("a"), frozenset({"fast"})),), frozenset("b")
                )
            },
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_key_of_ours_becomes_a_setting(own: dict[str, Any], expected: dict[str, Any]) -> None:
    assert build(**{"nodeagent.io": own}) == replace(configured(), **expected)


def test_the_key_takes_precedence_over_the_flag() -> None:
    defaults = replace(DEFAULTS, pod=PodSettings(service_account="of-the-flag"))
    for document, expected in (
        ("{}", "of-the-flag"),
        ('{"nodeagent.io": {"moverServiceAccount": "movers"}}', "movers"),
    ):
        config = parse_config(document).config
        settings = build_expose_settings(defaults, config, priority_class=None, cache_limit_mib=5000)
        assert settings.pod.service_account == expected


def test_secrets_and_config_maps_are_copied_as_each_key_says() -> None:
    entry = {"secretNames": ["token", "token"], "configMapNames": ["token", "kms"], "readWriteOncePod": True}
    document = {"backupPVC": {"fast": entry, "slow": {}}, "restorePVC": {"secretNames": ["key"]}}
    found, config = build(**document), parse_config(json.dumps(document)).config
    copies = ("ConfigMap/kms", "ConfigMap/token", "Secret/token")
    assert found.backup_pvcs["fast"] == BackupPVCSettings(one_pod=True, copies=copies)
    assert (found.backup_pvcs["slow"].copies, found.restore_copies) == ((), ("Secret/key",))
    assert config.copied_secrets == ("token", "key")
    assert config.copied_config_maps == ("token", "kms")


@pytest.mark.parametrize(
    "keys", [("cachePVC", "residentThresholdInMB"), ("cacheVolume", "residentThresholdMB")], ids=str
)
def test_both_spellings_of_the_cache_mean_the_same(keys: tuple[str, str]) -> None:
    found = build("", 100, **{keys[0]: {"storageClass": "fast", keys[1]: 1024}})
    assert found.cache == CacheRule("fast", 100, 1024)
    assert build(cachePVC={"residentThresholdInMB": 1024}).cache is None


@pytest.mark.parametrize(("limit_mib", "size_gib"), [(1, 1), (853, 1), (854, 2), (5120, 6), (5121, 7), (100_000, 118)])
def test_a_cache_volume_is_a_fifth_larger_than_its_limit(limit_mib: int, size_gib: int) -> None:
    assert CacheVolume("fast", limit_mib).size_gib == size_gib


def daemonsets(*names: str, **metadata: object) -> KubeClient:
    found = stored(DAEMON_SETS, metadata=metadata) | {"spec": daemonset()["spec"]}
    served = {DAEMON_SETS.path("velero", name): found for name in names}

    def script(request: Request) -> Response:
        found = served.get(request.path)
        return rejection(404, "not found") if found is None else answer(found)

    return scripted_client(script)


async def test_veleros_daemonset_for_windows_nodes_is_known() -> None:
    """One of an earlier version of ours moves nothing."""
    served = ("node-agent", "node-agent-windows")
    former = daemonsets(*served, labels={"app.kubernetes.io/part-of": "node-agent"})
    clients = (daemonsets("node-agent"), daemonsets(*served), former)
    found = [await read_template(client, "velero") for client in clients]
    assert [template.windows for template in found] == [False, True, False]
    assert len({template.image for template in found}) == 1


async def test_without_a_daemonset_the_agent_cannot_start() -> None:
    with pytest.raises(ConfigError, match="DaemonSet velero/node-agent does not exist"):
        await read_template(daemonsets("node-agent-windows"), "velero")


NOT_SPOT = {"key": "spot", "operator": "DoesNotExist"}
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
            {"nodeSelector": {"matchLabels": {"disk": "ssd"}, "matchExpressions": [NOT_SPOT]}, "storageClass": "fast"},
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
