"""The ConfigMap of `--repo-maintenance-job-configmap` configures maintenance Jobs."""

import json
from datetime import timedelta
from typing import Any

import pytest

from core.errors import ConfigError
from core.kube.errors import ServerError
from core.kube.resources import CONFIG_MAPS
from core.models.base import JsonDict
from core.models.storage import RepositoryKey
from exposer.pods import JobSettings
from nodeagent.config.repositories import MaintenanceConfig, MaintenanceSettings, ParsedMaintenance, parse_maintenance
from nodeagent.config.windows import Window, parse_time_zone
from tests.support.fakekube import FakeKube
from tests.support.scripted import rejection, scripted_client

pytestmark = pytest.mark.looptime

_NAME = "maintenance-config"
_OWN = "app1-default-kopia"
_KEY = RepositoryKey("app1", "default")
_OTHER = RepositoryKey("app2", "default")


def _config_map(data: dict[str, str]) -> JsonDict:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "velero", "name": _NAME}, "data": data}


def _parse(**entries: Any) -> ParsedMaintenance:
    """Return the result of a ConfigMap with these entries; `own` is that of app1."""
    names = {"own": _OWN, "common": "global"}
    return parse_maintenance(_config_map({names.get(key, key): json.dumps(value) for key, value in entries.items()}))


def _settings(**entries: Any) -> MaintenanceSettings:
    return _parse(**entries).settings_for(_KEY)


def _reader(kube: FakeKube) -> MaintenanceConfig:
    return MaintenanceConfig(kube.client, "velero", _NAME)


def _pool(name: str) -> JsonDict:
    return {"nodeSelector": {"matchLabels": {"pool": name}}}


def _in_pool(name: str) -> tuple[JsonDict, ...]:
    return ({"key": "pool", "operator": "In", "values": [name]},)


_SMALL = {"cpuRequest": "10m", "memoryRequest": "32Mi", "cpuLimit": "1", "memoryLimit": "512Mi"}
_LARGE = {"cpuRequest": "1", "memoryRequest": "1Gi", "cpuLimit": "2", "memoryLimit": "2Gi"}
_SMALL_RESOURCES = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
_LARGE_RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
_NO_MEMORY_LIMIT = {"limits": {"cpu": "2"}}


@pytest.mark.parametrize(
    ("own", "common", "expected"),
    [
        pytest.param(None, None, None, id="none"),
        pytest.param(None, _SMALL, _SMALL_RESOURCES, id="global"),
        pytest.param(_LARGE, _SMALL, _LARGE_RESOURCES, id="own before global"),
        pytest.param(_LARGE, None, _LARGE_RESOURCES, id="own"),
        pytest.param({}, _SMALL, {}, id="own is an empty object"),
        pytest.param({"memoryLimit": "2Gi"}, _SMALL, {"limits": {"memory": "2Gi"}}, id="own is never completed"),
        pytest.param(_LARGE | {"memoryLimit": "0"}, None, _LARGE_RESOURCES | _NO_MEMORY_LIMIT, id="0 is unbounded"),
        pytest.param(_LARGE | {"memoryLimit": "2GB"}, _SMALL, _SMALL_RESOURCES, id="own is invalid"),
        pytest.param(_LARGE | {"memoryLimit": "1Mi"}, _SMALL, _SMALL_RESOURCES, id="own request above its limit"),
        pytest.param(None, _SMALL | {"memoryLimit": "1Mi"}, None, id="global request above its limit"),
    ],
)
def test_resources_count_as_a_whole(own: Any, common: Any, expected: JsonDict | None) -> None:
    entries = {"own": own, "common": common}
    resources = {name: {"podResources": value} for name, value in entries.items() if value is not None}
    assert _settings(**resources).job.resources == expected


def test_affinity_of_any_mode_has_alternatives() -> None:
    common = {"loadAffinity": [_pool("a"), _pool("b")], "loadAffinityMode": "any"}
    assert _settings(common=common).job.alternatives == (_in_pool("a"), _in_pool("b"))
    own = {"loadAffinity": [_pool("c"), _pool("d")]}
    assert _settings(common=common, own=own).job.alternatives == (_in_pool("c"), _in_pool("d"))


def test_labels_and_expressions_are_one_term_also_with_a_storage_class() -> None:
    entry = {
        "nodeSelector": {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]},
        "storageClass": "fast",
    }
    parsed = _parse(common={"loadAffinity": [entry]})
    requirements = ({"key": "a", "operator": "In", "values": ["1"]}, {"key": "b", "operator": "Exists"})
    assert parsed.settings_for(_KEY).job.alternatives == (requirements,)
    assert parsed.warnings == ["global.loadAffinity[0].storageClass: has no effect on maintenance"]


@pytest.mark.parametrize(
    ("own", "common", "expected"),
    [(None, None, 3), (None, 5, 5), (0, 5, 0), (7, None, 7), (7, 0, 7), (-1, 5, 5), (None, -1, 3)],
)
def test_the_repositorys_number_of_jobs_counts_also_if_0(own: int | None, common: int | None, expected: int) -> None:
    named = {"own": {"keepLatestMaintenanceJobs": own}, "common": {"keepLatestMaintenanceJobs": common}}
    assert _settings(**named).keep_jobs == expected


def test_tolerations_of_global_apply_to_every_repository() -> None:
    toleration = {"key": "backup", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    for key, expected in (("common", (toleration,)), ("own", ())):
        assert _settings(**{key: {"tolerations": [toleration]}}).job.tolerations == expected


def test_our_own_keys_of_global() -> None:
    window = {"schedule": "0 22 * * *", "timeZone": "Europe/Berlin", "duration": "6h"}
    common = {
        "maxConcurrentJobs": 4,
        "windows": [window, {"schedule": "@weekly", "duration": "1h30m"}],
        "activeDeadline": "12h",
        "memoryLimitMax": "8Gi",
        "verifyBlobLimit": 0,
    }
    parsed = _parse(common=common)
    assert parsed.warnings == []
    assert parsed.settings_for(_KEY) == MaintenanceSettings(
        job=JobSettings(active_deadline=timedelta(hours=12)),
        max_concurrent_jobs=4,
        windows=(
            Window("0 22 * * *", parse_time_zone("Europe/Berlin"), timedelta(hours=6)),
            Window("0 0 * * 0", parse_time_zone("UTC"), timedelta(minutes=90)),
        ),
        memory_limit_max_bytes=8 * 2**30,
        verify_blob_limit=0,
    )


def test_without_a_key_the_defaults_apply() -> None:
    settings = MaintenanceSettings()
    assert _settings() == _settings(common={}, own={}) == _settings(common=None, own=None) == settings
    assert (settings.keep_jobs, settings.max_concurrent_jobs, settings.windows) == (3, 1, ())
    assert (settings.memory_limit_max_bytes, settings.verify_blob_limit) == (4 * 2**30, 100_000)
    assert settings.job == JobSettings(None, (), None, {}, {}, timedelta(hours=6))


_WINDOW = {"schedule": "0 22 * * *", "duration": "6h"}


@pytest.mark.parametrize(
    ("common", "expected"),
    [
        ({"maxConcurrentJobs": 0}, "global.maxConcurrentJobs: expected a number of at least 1, found the number 0"),
        ({"loadAffinityMode": "all"}, "global.loadAffinityMode: expected 'first' or 'any', found the string"),
        ({"activeDeadline": "6"}, "global.activeDeadline: expected a positive duration"),
        ({"activeDeadline": "500ms"}, "global.activeDeadline: expected a duration from 1s to 596523h, found"),
        ({"activeDeadline": "596524h"}, "global.activeDeadline: expected a duration from 1s to 596523h"),
        ({"memoryLimitMax": "4GB"}, "global.memoryLimitMax: expected a quantity"),
        ({"memoryLimitMax": "0"}, "global.memoryLimitMax: expected a quantity"),
        ({"verifyBlobLimit": -1}, "global.verifyBlobLimit: expected a number of at least 0"),
        ({"windows": [{"schedule": "0 22 * * *"}]}, "global.windows[0].duration: required key is missing"),
        ({"windows": [_WINDOW | {"duration": "0s"}]}, "global.windows[0].duration: expected a positive duration"),
        ({"windows": [_WINDOW | {"timeZone": "Berlin"}]}, "global.windows[0].timeZone: expected a time zone"),
        ({"windows": [_WINDOW | {"schedule": "0 25 * * *"}]}, "(25 is not from 0 to 23)"),
    ],
)
def test_an_invalid_key_of_ours_counts_as_absent_and_the_others_stay(common: JsonDict, expected: str) -> None:
    parsed = _parse(common=common | {"keepLatestMaintenanceJobs": 8})
    assert parsed.settings_for(_KEY) == MaintenanceSettings(keep_jobs=8)
    (warning,) = parsed.warnings
    assert expected in warning
    assert warning.endswith("; it counts as absent")


def test_of_the_windows_an_invalid_one_is_dropped() -> None:
    parsed = _parse(common={"windows": [_WINDOW | {"schedule": "x"}, _WINDOW]})
    assert (len(parsed.settings_for(_KEY).windows), len(parsed.errors)) == (1, 1)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"podLabels": {"a b": "1"}}, 'podLabels["a b"]'),
        ({"podLabels": {"role": "node-agent"}}, "podLabels"),
        ({"priorityClassName": "High Priority"}, "priorityClassName"),
        ({"loadAffinity": [_pool("a"), _pool("not valid")]}, "loadAffinity[1].nodeSelector.matchLabels.pool"),
    ],
)
def test_what_the_api_server_would_reject_counts_as_absent(entry: JsonDict, expected: str) -> None:
    parsed = _parse(own=entry)
    assert [error.path for error in parsed.errors] == [f"{_OWN}.{expected}"]
    assert parsed.settings_for(_KEY) == MaintenanceSettings()
    assert parsed.unreadable == {}


def test_findings_about_what_velero_treats_in_another_way() -> None:
    parsed = _parse(
        common={"podResources": {"cpuRequest": "1"}, "maxconcurrentjobs": 2, "window": []},
        own={"priorityClassName": "low", "podLabels": {"velero.io/repo-name": "x"}, "maxConcurrentJobs": 2},
        extra={},
    )
    missing = "missing, counts as 0; a Velero server starts no Job without it"
    ignored = "applies only if global has none; ignored according to Velero's documentation"
    assert parsed.errors == ()
    assert parsed.warnings == [
        f"{_OWN}.maxConcurrentJobs: has an effect in global only; ignored",
        f"{_OWN}.priorityClassName: {ignored}",
        f"{_OWN}.podLabels: {ignored}",
        f'{_OWN}.podLabels["velero.io/repo-name"]: reserved; ignored',
        "extra: applies to no repository: neither global nor <namespace>-<location>-kopia",
        "global.maxconcurrentjobs: read as maxConcurrentJobs (keys are case-sensitive elsewhere)",
        "global.window: unknown key; ignored (did you mean windows?)",
        f"global.podResources.memoryRequest: {missing}",
        f"global.podResources.cpuLimit: {missing}",
        f"global.podResources.memoryLimit: {missing}",
    ]


_UNREADABLE = {
    "no JSON": ("{", "is not JSON"),
    "no object": ("[]", "is not a JSON object"),
    "number for text": ('{"priorityClassName": 1}', "priorityClassName: expected a string"),
    "number in a map": ('{"podLabels": {"a": 1}}', "podLabels.a: expected a string"),
}


@pytest.mark.parametrize(("text", "problem"), _UNREADABLE.values(), ids=_UNREADABLE.keys())
def test_an_unreadable_value_means_defaults_for_everything_that_it_concerns(text: str, problem: str) -> None:
    good = '{"keepLatestMaintenanceJobs": 9, "maxConcurrentJobs": 4}'
    common = parse_maintenance(_config_map({"global": text, _OWN: '{"keepLatestMaintenanceJobs": 9}'}))
    assert common.settings_for(_KEY) == common.settings_for(_OTHER) == MaintenanceSettings()
    own = parse_maintenance(_config_map({"global": good, _OWN: text}))
    assert own.settings_for(_KEY) == MaintenanceSettings()
    assert own.settings_for(_OTHER) == MaintenanceSettings(keep_jobs=9, max_concurrent_jobs=4)
    (warning,) = own.warnings
    assert warning.startswith(f"its key {_OWN}: ")
    assert problem in warning
    assert warning.endswith("; all defaults are used")


async def test_a_value_that_velero_cannot_read_stops_the_agent_at_start_whatever_its_key() -> None:
    kube = FakeKube()
    kube.put(_config_map({"global": "{}", "a key of no repository": "[]"}))
    place = "ConfigMap velero/maintenance-config: its key a key of no repository: "
    with pytest.raises(ConfigError, match=f"{place}.* is not a JSON object"):
        await _reader(kube).check()


@pytest.mark.parametrize(
    ("data", "expected"),
    [(None, "does not exist: create it, or start without --repo-maintenance-job-configmap"), ({}, "has no data")],
    ids=["absent", "empty"],
)
async def test_a_named_config_map_must_exist_and_have_data(data: dict[str, str] | None, expected: str) -> None:
    kube = FakeKube()
    if data is not None:
        kube.put(_config_map(data))
    with pytest.raises(ConfigError, match=expected):
        await _reader(kube).check()


async def test_an_invalid_value_of_ours_does_not_stop_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.put(_config_map({"global": '{"windows": 1, "maxConcurrentJobs": "x"}'}))
    await _reader(kube).check()
    assert "global.windows: expected a list" in caplog.text
    assert "global.maxConcurrentJobs: expected a whole number" in caplog.text


async def test_an_edit_is_read_for_the_next_job_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.put(_config_map({"global": '{"keepLatestMaintenanceJobs": 5}'}))
    reader, client = _reader(kube), kube.client
    assert (await reader.settings_for(_KEY)).keep_jobs == 5
    await client.patch(CONFIG_MAPS, "velero", _NAME, {"data": {"global": '{"keepLatestMaintenanceJobs": 6, "x": 1}'}})
    for _ in range(3):
        assert (await reader.settings_for(_KEY)).keep_jobs == 6
    assert caplog.text.count("global.x: unknown key; ignored") == 1
    await client.patch(CONFIG_MAPS, "velero", _NAME, {"data": None})
    assert await reader.settings_for(_KEY) == MaintenanceSettings()
    assert "it has no data; all defaults are used" in caplog.text
    await client.delete(CONFIG_MAPS, "velero", _NAME)
    assert await reader.settings_for(_KEY) == MaintenanceSettings()
    assert "it does not exist; all defaults are used" in caplog.text


async def test_a_read_that_fails_is_not_taken_for_defaults() -> None:
    """They have no windows."""
    reader = MaintenanceConfig(scripted_client(lambda _: rejection(500, "InternalError")), "velero", _NAME)
    with pytest.raises(ServerError):
        await reader.settings_for(_KEY)
    with pytest.raises(ConfigError, match="cannot be read"):
        await reader.check()
