"""The models read every custom resource that a cluster with Velero had, and the product reads every field."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ContractError
from core.models import base, storage, transfers
from core.models.base import CustomResource, JsonDict, WireModel
from core.models.phases import Phase
from core.models.storage import BackupRepository, BackupStorageLocation
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from tests.support.golden import recorded_objects

_NOT_READ: dict[str, set[str]] = {
    "DataUpload": {".spec.csiSnapshot.driver", ".spec.csiSnapshot.snapshotClass"},
    "DataDownload": set(),
    "PodVolumeBackup": {".spec.pod.kind", ".spec.repoIdentifier"},
    "PodVolumeRestore": {".spec.pod.kind", ".spec.repoIdentifier"},
    "BackupRepository": {".spec.resticIdentifier"},
}
"""Fields of a spec that Velero sets and nothing here reads."""
_TRANSFERS = (DataUpload, DataDownload, PodVolumeBackup, PodVolumeRestore)
_MODELS: dict[str, type[CustomResource]] = {
    model.kind_name: model for model in (*_TRANSFERS, BackupRepository, BackupStorageLocation)
}


_RECORDED = [obj for obj in recorded_objects() if obj.get("kind") in _MODELS]


def _id(obj: JsonDict) -> str:
    return f"{obj['kind']}-{obj['metadata']['name']}-{obj['metadata']['resourceVersion']}"


def test_all_kinds_of_transfer_and_the_repository_are_recorded() -> None:
    assert {obj["kind"] for obj in _RECORDED} == _MODELS.keys() - {"BackupStorageLocation"}


def _leaves(value: object, path: str = "") -> JsonDict:
    """Return the fields in `value` by their paths, except those that are null or empty."""
    if not isinstance(value, dict):
        return {} if value in (None, "") else {path: value}
    return {place: leaf for key, field in value.items() for place, leaf in _leaves(field, f"{path}.{key}").items()}


@pytest.mark.parametrize("obj", _RECORDED, ids=_id)
def test_recorded_object_is_read_as_it_is(obj: JsonDict) -> None:
    parsed = _MODELS[obj["kind"]].parse(obj)
    recorded = {path: leaf for path, leaf in _leaves(obj).items() if path.startswith((".spec.", ".status."))}
    read = {path: leaf for path, leaf in _leaves(parsed.to_wire()).items() if path in recorded}
    assert read == {path: leaf for path, leaf in recorded.items() if path not in _NOT_READ[obj["kind"]]}
    assert (parsed.name, parsed.uid) == (obj["metadata"]["name"], obj["metadata"]["uid"])


@pytest.mark.parametrize("obj", [obj for obj in _RECORDED if obj["kind"] != "BackupRepository"], ids=_id)
def test_recorded_transfer_has_phase_and_repository(obj: JsonDict) -> None:
    transfer = _MODELS[obj["kind"]].parse(obj)
    assert isinstance(transfer, Transfer)
    assert transfer.phase == ((obj.get("status") or {}).get("phase") or Phase.NEW)
    assert transfer.repository_namespace
    assert isinstance(transfer.settings, dict)


def test_unknown_fields_of_a_newer_velero_are_ignored() -> None:
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
    assert (location.spec.config, location.spec.object_storage.prefix, location.status.phase) == ({}, "", None)


def nested(depth: int) -> JsonDict:
    value: JsonDict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cancel": "?"}, r"spec\.cancel: Expected `bool`, got `str`"),
        ({"sourcePVC": None}, "spec: Object missing required field `sourcePVC`"),
        ({"operationTimeout": "soon"}, "spec: operationTimeout: not a duration"),
        ({"operationTimeout": "100000000000h"}, "spec: operationTimeout: duration longer than 292 years"),
        ({"dataMoverConfig": nested(2000)}, "nested too deeply"),
    ],
)
def test_message_names_the_object_and_the_invalid_field(wrong: JsonDict, message: str) -> None:
    spec = {"snapshotType": "CSI", "sourceNamespace": "shop", "backupStorageLocation": "default", "sourcePVC": "data"}
    obj = {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataUpload",
        "metadata": {"name": "b1", "namespace": "velero"},
        "spec": spec | wrong,
    }
    with pytest.raises(ContractError, match=f"invalid DataUpload velero/b1: {message}"):
        DataUpload.parse(obj)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": ["no", "object"]},
        {"status": {"startTimestamp": "2026-11-21T12:00:00"}},
        {"status": {"progress": {"totalBytes": 10**30}}},
    ],
    ids=["metadata", "time without zone", "integer beyond Go's"],
)
def test_what_go_cannot_hold_is_invalid(wrong: JsonDict) -> None:
    recorded = next(obj for obj in _RECORDED if obj["kind"] == "DataUpload")
    with pytest.raises(ContractError, match="invalid DataUpload"):
        DataUpload.parse(recorded | wrong)


_ROOT = Path(__file__).parents[3]
_PACKAGES = ("core", "exposer", "nodeagent", "client", "datamover")


def _models() -> Iterator[type[WireModel]]:
    for module in (base, storage, transfers):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, WireModel) and value.__module__ == module.__name__:
                yield value


@pytest.fixture(scope="module")
def read() -> set[str]:
    """The names of all attributes that the product reads."""
    files = [file for package in _PACKAGES for file in (_ROOT / package).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("model", [m for m in _models() if m not in {WireModel, CustomResource}])
def test_every_field_is_read(model: type[WireModel], read: set[str]) -> None:
    unread = set(model.__struct_fields__) - read
    assert unread == set()
