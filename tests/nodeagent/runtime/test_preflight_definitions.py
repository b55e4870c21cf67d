"""Which fields the served definitions drop, and whether that needs action: by the recorded ones of Velero, and ours."""

from copy import deepcopy

import pytest

from client.install.apply import find_lacking
from client.install.manifests import read_definitions
from nodeagent.runtime.permissions import agent_permissions
from nodeagent.runtime.preflight import find_dropped, judge_definitions
from tests.support.objects import JsonDict
from tests.support.versions import VERSIONS, load_definitions

_UPLOAD, _DOWNLOAD = "datauploads.velero.io", "datadownloads.velero.io"
_NAMES = (_DOWNLOAD, _UPLOAD, "podvolumebackups.velero.io", "podvolumerestores.velero.io")
_NOT_USED = (".spec.csiSnapshot.", ".spec.sourceFSType", ".spec.targetVolume.fsType")


def _ours() -> dict[str, JsonDict]:
    return {one["metadata"]["name"]: deepcopy(one) for one in read_definitions() if one["metadata"]["name"] in _NAMES}


def _veleros(version: str) -> dict[str, JsonDict]:
    return {name: one for name, one in load_definitions(version).items() if name in _NAMES}


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_that_an_older_definition_drops_is_named(version: str, name: str) -> None:
    theirs = _veleros(version)[name]
    lacking = [path.partition(" ")[2] for path in find_lacking(_ours()[name], theirs)]
    used = {path.removeprefix(".") for path in lacking if not path.startswith(_NOT_USED)}
    assert set(find_dropped(theirs)) == used
    assert find_dropped(_ours()[name]) == ()


def test_a_definition_without_the_version_drops_everything() -> None:
    definition = _ours()[_UPLOAD]
    definition["spec"]["versions"][0]["name"] = "v3"
    assert "spec.parentSnapshot" in find_dropped(definition)


def test_a_schema_that_keeps_unknown_fields_drops_none() -> None:
    definition = _veleros("1.17.2")[_UPLOAD]
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = {"x-kubernetes-preserve-unknown-fields": True}
    assert find_dropped(definition) == ()


@pytest.mark.parametrize(
    ("definitions", "next_velero"),
    [(_ours(), False), (_veleros("main"), True), ({}, False)],
    ids=["ours", "1.19", "none"],
)
def test_definitions_with_every_field_are_not_reported(definitions: dict[str, JsonDict], next_velero: bool) -> None:
    report = judge_definitions(definitions.values())
    assert (report.message, report.warning, report.next_velero) == ("", False, next_velero)


def test_those_of_an_older_velero_server_need_no_action() -> None:
    report = judge_definitions(_veleros("1.18.3").values())
    assert not report.warning
    assert not report.next_velero
    assert report.message.startswith(
        f"definition {_DOWNLOAD} lacks spec.restoreType, spec.csiSnapshot, status.activities, "
    )
    assert report.message.endswith(": as Velero before 1.19 does, whose server uses none")


def _labeled(definition: JsonDict, **annotations: str) -> JsonDict:
    meta = {"labels": {"app.kubernetes.io/part-of": "node-agent"}, "annotations": annotations}
    return definition | {"metadata": definition["metadata"] | meta}


def test_ours_of_an_older_version_are_installed_again() -> None:
    report = judge_definitions([*(_ours() | {_UPLOAD: _labeled(_veleros("1.17.2")[_UPLOAD])}).values()])
    assert report.warning
    assert report.message == (
        "definition datauploads.velero.io lacks spec.parentSnapshot, status.activities, status.fallbackFull, "
        "status.incrementalBytes, status.sourceSize: the API server drops these fields; "
        "run nodeagent install --crds-only"
    )


def test_those_of_a_release_are_restored_by_helm() -> None:
    older = _labeled(_veleros("1.18.3")[_UPLOAD], **{"meta.helm.sh/release-name": "agents"})
    report = judge_definitions([older])
    assert report.warning
    assert report.message.endswith("the API server drops these fields; upgrade the release agents of Helm")


def test_an_older_one_among_those_of_velero_1_19_has_replaced_a_newer_one() -> None:
    report = judge_definitions((_veleros("main") | {_UPLOAD: _veleros("1.18.3")[_UPLOAD]}).values())
    assert (report.warning, report.next_velero) == (True, True)
    assert report.message.endswith("apply the Velero server's again")


def test_one_of_ours_beside_those_of_an_older_server_changes_nothing() -> None:
    report = judge_definitions((_veleros("1.18.3") | {_UPLOAD: _ours()[_UPLOAD]}).values())
    assert not report.warning
    assert _UPLOAD not in report.message


def test_the_agent_may_read_these_definitions_alone() -> None:
    (names,) = [one.names for one in agent_permissions() if one.path == "customresourcedefinitions"]
    assert sorted(names) == sorted(_NAMES)
