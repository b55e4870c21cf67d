"""Every custom resource that the peer's cluster showed goes through the models unharmed."""

import json
from pathlib import Path

import pytest

from core.errors import ContractError
from core.models.base import CustomResource, JsonDict
from core.models.loads import DataDownload, DataUpload, Load, PodVolumeBackup, PodVolumeRestore
from core.models.phases import Phase
from core.models.storage import BackupRepository, BackupStorageLocation

__all__: list[str] = []

_FOLDER = Path(__file__).parents[1] / "recordings" / "velero-1.18.2"
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
def test_recorded_object_loses_nothing(obj: JsonDict) -> None:
    parsed = _MODELS[obj["kind"]].parse(obj)
    assert _without_nulls(parsed.to_wire()) == _without_nulls(obj)
    assert (parsed.name, parsed.uid) == (obj["metadata"]["name"], obj["metadata"]["uid"])


@pytest.mark.parametrize("obj", [obj for obj in _RECORDED if obj["kind"] != "BackupRepository"], ids=_id)
def test_recorded_load_tells_its_phase_and_repository(obj: JsonDict) -> None:
    load = _MODELS[obj["kind"]].parse(obj)
    assert isinstance(load, Load)
    assert load.phase == ((obj.get("status") or {}).get("phase") or Phase.NEW)
    assert load.repository_namespace
    assert isinstance(load.settings, dict)


def test_fields_of_a_newer_peer_are_kept() -> None:
    obj = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"name": "default", "namespace": "velero", "new": {"a": [1]}},
        "spec": {"provider": "aws", "objectStorage": {"bucket": "b", "tier": "cold"}, "other": None},
    }
    assert BackupStorageLocation.parse(obj).to_wire() == obj


def test_message_names_the_object_and_every_wrong_field() -> None:
    obj = {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataUpload",
        "metadata": {"name": "b1", "namespace": "velero"},
        "spec": {"snapshotType": "CSI", "sourceNamespace": "shop", "backupStorageLocation": "default", "cancel": "?"},
    }
    with pytest.raises(ContractError, match=r"DataUpload velero/b1 cannot be read: .*spec\.cancel.*spec\.sourcePVC"):
        DataUpload.parse(obj)


def _without_nulls(value: object) -> object:
    """Go writes an absent map as null; both say the same."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None and item != {}}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
