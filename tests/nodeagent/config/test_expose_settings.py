"""The settings of exposers that follow from each configuration key."""

import json
from dataclasses import replace
from typing import Any

import pytest

from core.contract import MoverMethod
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.resources import DAEMON_SETS
from core.kube.transport import Request, Response
from core.kube.types import NodeRequirement
from core.models.phases import RetryRules
from core.models.transfer_settings import Compression, Exclusions
from exposer.settings import (
    BackupPVCSettings,
    CacheRule,
    CacheVolume,
    CompressionRules,
    ExclusionRule,
    ExclusionRules,
    ExposeSettings,
    MoverOptions,
    PlacementRule,
    PlacementRules,
    PodSettings,
)
from exposer.template import AgentTemplate
from nodeagent.config.expose_settings import build_expose_settings, read_template
from nodeagent.config.parse import parse_config
from tests.exposer.support.inputs import daemonset
from tests.support.scripted import answer, rejection, scripted_client, stored

DEFAULTS = ExposeSettings(AgentTemplate("mover:1"), mover=MoverOptions(log_level="debug"))


def build(priority_class: str | None = None, limit_mib: int = 5000, /, **document: Any) -> ExposeSettings:
    parsed = parse_config(json.dumps(document))
    assert not parsed.errors
    return build_expose_settings(DEFAULTS, parsed.config, priority_class=priority_class, cache_limit_mib=limit_mib)


def configured(**changes: Any) -> ExposeSettings:
    return replace(DEFAULTS, pod=PodSettings(**({"labels": {}, "annotations": {}} | changes)))


def test_the_settings_are_the_defaults_without_configuration() -> None:
    assert build() == configured()


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


SPOT = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
DEDICATED = {"key": "dedicated", "value": "backup", "effect": "NoExecute", "tolerationSeconds": 60}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"podLabels": {"a": "b"}}, {"labels": {"a": "b"}}),
        ({"podAnnotations": {"example.com/A": "any 'text'"}}, {"annotations": {"example.com/A": "any 'text'"}}),
        ({"nodeagent.io": {"moverServiceAccount": "movers"}}, {"service_account": "movers"}),
        ({"privilegedFsBackup": True}, {"privileged_fs_backup": True}),
        ({"tolerations": [SPOT, DEDICATED]}, {"tolerations": (SPOT, DEDICATED)}),
        ({"tolerations": "inherit"}, {"inherit_tolerations": True}),
        (
            {"podResources": {"cpuRequest": "1", "memoryLimit": "2Gi", "ephemeralStorageLimit": "0"}},
            {"resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}}},
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_key_becomes_a_setting_of_pods(document: dict[str, Any], expected: dict[str, Any]) -> None:
    assert build(**document) == configured(**expected)


def test_the_priority_class_is_the_one_that_the_cluster_has() -> None:
    """The configured name counts for nothing as long as the class is missing."""
    assert build(priorityClassName="movers").pod.priority_class_name is None
    assert build("movers", priorityClassName="movers").pod.priority_class_name == "movers"


def test_selectors_of_nodes_become_requirements() -> None:
    selector = {
        "matchLabels": {"pool": "movers", "disk": "ssd"},
        "matchExpressions": [
            {"key": "spot", "operator": "DoesNotExist"},
            {"key": "zone", "operator": "In", "values": ["a", "b"]},
        ],
    }

    found = build(loadAffinity=[{"nodeSelector": selector, "storageClass": "fast"}, {"nodeSelector": {}}])

    requirements: tuple[NodeRequirement, ...] = (
        {"key": "disk", "operator": "In", "values": ["ssd"]},
        {"key": "pool", "operator": "In", "values": ["movers"]},
        {"key": "spot", "operator": "DoesNotExist"},
        {"key": "zone", "operator": "In", "values": ["a", "b"]},
    )
    assert found.nodes == PlacementRules((PlacementRule(requirements, "fast"), PlacementRule(())))
    assert build(loadAffinityMode="any").nodes == PlacementRules((), any_of=True)


def test_claims_of_backups_are_set_up_by_their_sources_class() -> None:
    entry = {
        "storageClass": "shallow",
        "readOnly": True,
        "readWriteOncePod": True,
        "spcNoRelabeling": True,
        "annotations": {"a": "b"},
    }

    found = build(backupPVC={"fast": entry, "slow": {}}, restorePVC={"ignoreDelayBinding": True})

    assert found.backup_pvcs == {
        "fast": BackupPVCSettings("shallow", read_only=True, one_pod=True, no_relabeling=True, annotations={"a": "b"}),
        "slow": BackupPVCSettings(),
    }
    assert found.ignore_delay_binding


def test_secrets_and_config_maps_are_copied_as_each_key_says() -> None:
    entry = {"secretNames": ["token", "token"], "configMapNames": ["token", "kms"]}
    document = {"backupPVC": {"fast": entry, "slow": {}}, "restorePVC": {"secretNames": ["key"]}}

    found, config = build(**document), parse_config(json.dumps(document)).config

    assert found.backup_pvcs["fast"].copies == ("ConfigMap/kms", "ConfigMap/token", "Secret/token")
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


def test_small_restores_leave_their_cache_on_the_node() -> None:
    """A snapshot without a size may be large."""
    rule, gib = CacheRule("fast", 5000, threshold_mib=1024), 1024**3
    cached = [rule.volume_for(size) is not None for size in (0, 1, gib - 1, gib, 9 * gib)]
    assert cached == [True, False, False, True, True]


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
