"""The models read every custom resource that the peer's cluster showed."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ContractError
from core.models.base import CustomResource, JsonDict
from core.models.phases import Phase
from core.models.storage import BackupRepository, BackupStorageLocation
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer

__all__: list[str] = []

_FOLDER = Path(__file__).parents[2] / "recordings" / "velero-1.18.2"
_MODELS: dict[str, type[CustomResource]] = {
    model.kind_name: model
    for model in (
        DataUpload,
        DataDownload,
        PodVolumeBackup,
        PodVolumeRestore,
        BackupRepository,
        BackupStorageLocation,
    )
}


def _objects() -> list[JsonDict]:
    """Every object in every recording; watches hold it in `object`."""
    found: list[JsonDict] = []
    for file in sorted(_FOLDER.glob("*.json")):
        content = json.loads(file.read_text())
        if isinstance(content, list):
            found += [entry.get("object", entry) for entry in content]
    return found


_RECORDED = [obj for obj in _objects() if obj.get("kind") in _MODELS]


def _id(obj: JsonDict) -> str:
    return f"{obj['kind']}-{obj['metadata']['name']}-{obj['metadata']['resourceVersion']}"


def test_all_kinds_of_load_and_the_repository_are_recorded() -> None:
    assert {obj["kind"] for obj in _RECORDED} == _MODELS.keys() - {"BackupStorageLocation"}


@pytest.mark.parametrize("obj", _RECORDED, ids=_id)
def test_recorded_object_is_read_as_it_is(obj: JsonDict) -> None:
    parsed = _MODELS[obj["kind"]].parse(obj)
    told = _said(parsed.to_wire(), obj)
    said = _said(obj, obj)
    assert (told["spec"], told.get("status")) == (said["spec"], said.get("status"))
    assert (parsed.name, parsed.uid) == (obj["metadata"]["name"], obj["metadata"]["uid"])


@pytest.mark.parametrize("obj", [obj for obj in _RECORDED if obj["kind"] != "BackupRepository"], ids=_id)
def test_recorded_load_tells_its_phase_and_repository(obj: JsonDict) -> None:
    load = _MODELS[obj["kind"]].parse(obj)
    assert isinstance(load, Transfer)
    assert load.phase == ((obj.get("status") or {}).get("phase") or Phase.NEW)
    assert load.repository_namespace
    assert isinstance(load.settings, dict)


def test_fields_of_a_newer_peer_are_no_obstacle() -> None:
    obj = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"name": "default", "namespace": "velero", "new": {"a": [1]}},
        "spec": {"provider": "aws", "objectStorage": {"bucket": "b", "tier": "cold"}, "other": None},
    }
    assert BackupStorageLocation.parse(obj).spec.object_storage.bucket == "b"


@pytest.mark.parametrize("absent", [None, {}])
def test_null_reads_as_absent(absent: object) -> None:
    obj = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"name": "default", "namespace": "velero"},
        "spec": {"provider": "aws", "objectStorage": {"bucket": "b", "prefix": None}, "config": absent},
        "status": None,
    }
    location = BackupStorageLocation.parse(obj)
    assert (location.spec.config, location.spec.object_storage.prefix, location.status.phase) == ({}, "", "")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cancel": "?"}, r"spec\.cancel: Expected `bool`, got `str`"),
        ({"sourcePVC": None}, "spec: Object missing required field `sourcePVC`"),
        ({"operationTimeout": "soon"}, "spec: operationTimeout: 'soon' is not a duration"),
    ],
)
def test_message_names_the_object_and_the_wrong_field(wrong: JsonDict, told: str) -> None:
    spec = {"snapshotType": "CSI", "sourceNamespace": "shop", "backupStorageLocation": "default", "sourcePVC": "data"}
    obj = {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataUpload",
        "metadata": {"name": "b1", "namespace": "velero"},
        "spec": spec | wrong,
    }
    with pytest.raises(ContractError, match=f"DataUpload velero/b1 cannot be read: {told}"):
        DataUpload.parse(obj)


def _said(value: object, original: object) -> Any:
    """What `value` says of the fields that are in `original`; a null says what an absent field does."""
    if isinstance(value, dict) and isinstance(original, dict):
        told = {key: _said(field, original[key]) for key, field in value.items() if original.get(key) is not None}
        return {key: field for key, field in told.items() if field not in (None, {})}
    return value
