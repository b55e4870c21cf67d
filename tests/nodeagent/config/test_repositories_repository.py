"""The ConfigMap of `--backup-repository-configmap` configures new repositories."""

import asyncio
import json

import pytest

from core.errors import ConfigError
from core.kube.resources import BACKUP_REPOSITORIES, CONFIG_MAPS
from nodeagent.config.repositories import RepositoryConfig, parse_settings_of
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.repository_scene import build_controller, open_scene
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

_NAME = "repository-config"


def _config_map(**data: str) -> JsonDict:
    metadata = {"namespace": "velero", "name": _NAME}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _reader(kube: FakeKube) -> RepositoryConfig:
    return RepositoryConfig(kube.client, "velero", _NAME)


def test_values_are_written_as_velero_writes_them() -> None:
    document = {"cacheLimitMB": 2048, "fullMaintenanceInterval": "fastGC"}
    parsed = parse_settings_of(_config_map(kopia=json.dumps(document), other='{"cacheLimitMB": 1}'))
    assert parsed.settings == {"cacheLimitMB": "2048", "fullMaintenanceInterval": "fastGC"}
    assert parsed.warnings == []


def test_unknown_keys_are_passed_on_and_reported() -> None:
    parsed = parse_settings_of(_config_map(kopia='{"enableCompression": true, "cachelimit": 0.5, "x": null}'))
    assert parsed.settings == {"enableCompression": "true", "cachelimit": "0.5"}
    assert parsed.warnings == [
        "kopia.enableCompression: unknown key; passed on to the BackupRepository",
        "kopia.cachelimit: unknown key; passed on to the BackupRepository (did you mean cacheLimitMB?)",
    ]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"cacheLimitMB": -1}', "kopia.cacheLimitMB: expected a whole number of MiB, found -1"),
        ('{"cacheLimitMB": "2G"}', "kopia.cacheLimitMB: expected a whole number of MiB, found 2G"),
        ('{"cacheLimitMB": {}}', "kopia.cacheLimitMB: expected a string, a number, true or false"),
        ('{"fullMaintenanceInterval": "fastgc"}', "found fastgc (did you mean fastGC?)"),
    ],
)
def test_an_invalid_value_counts_as_unset_and_is_reported(document: str, expected: str) -> None:
    parsed = parse_settings_of(_config_map(kopia=document))
    assert (parsed.settings, parsed.cache_limit_mib) == ({}, 5000)
    (warning,) = parsed.warnings
    assert expected in warning


@pytest.mark.parametrize(
    ("document", "limit_mib", "kept"),
    [('{"cacheLimitMB": 2048}', 2048, {"cacheLimitMB": "2048"}), ('{"cacheLimitMB": 0}', 0, {}), ("null", 5000, {})],
)
def test_a_cache_has_the_configured_limit_and_0_is_none(document: str, limit_mib: int, kept: dict[str, str]) -> None:
    parsed = parse_settings_of(_config_map(kopia=document))
    assert (parsed.cache_limit_mib, parsed.settings) == (limit_mib, kept)


def test_a_type_without_a_key_has_no_settings() -> None:
    assert parse_settings_of(_config_map(restic="{}")).settings == {}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"kopia": "{"}, "is not JSON"),
        ({"kopia": "[]"}, "is not a JSON object"),
        ({}, "has no data"),
        (None, "does not exist"),
    ],
    ids=["no JSON", "no object", "empty", "missing"],
)
async def test_an_unusable_config_map_is_reported_at_start(data: dict[str, str] | None, expected: str) -> None:
    kube = FakeKube()
    if data is not None:
        kube.put(_config_map(**data))
    with pytest.raises(ConfigError, match=expected):
        await _reader(kube).check()


async def test_the_last_valid_settings_stay_when_the_config_map_is_deleted(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.put(_config_map(kopia='{"cacheLimitMB": 7}'))
    reader = _reader(kube)
    assert await reader.settings() == {"cacheLimitMB": "7"}
    await kube.client.delete(CONFIG_MAPS, "velero", _NAME)
    assert await reader.settings() == {"cacheLimitMB": "7"}
    assert reader.cache_limit_mib == 7
    assert "backup repository configuration rejected, the last valid one stays active" in caplog.text


@pytest.mark.parametrize(
    ("spec", "kept"),
    [({}, {"cacheLimitMB": "2048"}), ({"repositoryConfig": {"cacheLimitMB": "5"}}, {"cacheLimitMB": "5"})],
    ids=["none of its own", "its maker's"],
)
async def test_a_new_repository_gets_the_settings_unless_it_has_some(spec: JsonDict, kept: dict[str, str]) -> None:
    scene = open_scene()
    scene.kube.put(_config_map(kopia='{"cacheLimitMB": 2048}'))
    scene.controller = build_controller(scene.kube, RepositoryControllerMode.AUTO, config_map=_NAME)
    client = scene.kube.client
    name = scene.repository["metadata"]["name"]
    await client.patch(BACKUP_REPOSITORIES, "velero", name, {"spec": spec})
    async with scene.running():
        await scene.until_pod()
        await asyncio.sleep(60)
        assert scene.repository["spec"]["repositoryConfig"] == kept
