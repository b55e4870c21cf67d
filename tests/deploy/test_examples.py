"""The examples against the models, each other and the test bed (the definitions: `test_schemas`)."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.models.base import CustomResource
from core.models.storage import BackupStorageLocation
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from tests.testbed import settings
from tests.testbed.storage.objects import DRIVER, class_objects

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "examples"
_MODELS: dict[str, type[CustomResource]] = {
    "dataupload": DataUpload,
    "datadownload": DataDownload,
    "podvolumebackup": PodVolumeBackup,
    "podvolumerestore": PodVolumeRestore,
    "location": BackupStorageLocation,
}


def _load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((_EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", _MODELS)
def test_a_custom_resource_fits_its_model(name: str) -> None:
    (example,) = _load(name)
    assert _MODELS[name].parse(example).metadata.namespace == "velero"


def test_the_bucket_is_that_of_the_test_bed() -> None:
    ((secret,), (location,)) = _load("credentials"), _load("location")
    keys = dict(re.findall(r"(\w+) = (\w+)", secret["stringData"]["cloud"]))
    assert keys == {"aws_access_key_id": settings.S3_ACCESS_KEY, "aws_secret_access_key": settings.S3_SECRET_KEY}
    assert location["spec"]["objectStorage"]["bucket"] == settings.BUCKET
    assert location["spec"]["config"]["s3Url"] == f"http://{settings.S3_ADDRESS}:{settings.S3_PORT}"
    assert location["spec"]["credential"] == {"name": secret["metadata"]["name"], "key": "cloud"}


def test_classes_driver_and_image_are_those_of_the_test_bed() -> None:
    classes = {(body["kind"], body["metadata"]["name"]) for _, body in class_objects()}
    snapshot = _load("dataupload")[0]["spec"]["csiSnapshot"]
    _, claim, pod = _load("source")
    assert snapshot["driver"] == DRIVER
    for name in (snapshot["storageClass"], claim["spec"]["storageClassName"]):
        assert ("StorageClass", name) in classes
    for name in (snapshot["snapshotClass"], _load("snapshot")[0]["spec"]["volumeSnapshotClassName"]):
        assert ("VolumeSnapshotClass", name) in classes
    assert pod["spec"]["containers"][0]["image"] == settings.AGENT_IMAGE


def test_every_example_is_in_the_guide_and_every_command_finds_its_file() -> None:
    guide = (_EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"[a-z]+\.yaml", guide)) == {path.name for path in _EXAMPLES.glob("*.yaml")}
