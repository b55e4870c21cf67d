"""Objects of each version of Velero are read, and written without the loss of a field."""

from typing import Any

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.base import CustomResource, JsonDict
from core.models.phases import Phase
from core.models.storage import BackupRepository
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.status import Change, StatusWriter
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube
from tests.support.versions import KINDS, VERSIONS, golden

pytestmark = pytest.mark.parametrize("version", VERSIONS)

MODELS: dict[str, type[CustomResource]] = {
    "dataupload": DataUpload,
    "datadownload": DataDownload,
    "podvolumebackup": PodVolumeBackup,
    "podvolumerestore": PodVolumeRestore,
    "backuprepository": BackupRepository,
}
ADAPTERS = {
    "dataupload": DataUploadKind,
    "datadownload": DataDownloadKind,
    "podvolumebackup": PodVolumeBackupKind,
    "podvolumerestore": PodVolumeRestoreKind,
}


def adapter(kind: str) -> Kind[Any]:
    """Return the adapter of a kind, which exposes nothing here."""
    exposer: Any = None
    built: Kind[Any] = ADAPTERS[kind](exposer, exposer, Settings("").datamover_names)
    return built


def read_fields(model: Any, raw: Any) -> Any:
    """Return the part of `raw` that `model` has too."""
    if not isinstance(model, dict) or not isinstance(raw, dict):
        return raw
    return {key: read_fields(model[key], value) for key, value in raw.items() if key in model}


def held(raw: Any, model: Any) -> Any:
    """Return the part of `model` that `raw` has too; an empty text was read as none."""
    if not isinstance(model, dict) or not isinstance(raw, dict):
        return "" if model is None else model
    return {key: held(raw[key], value) for key, value in model.items() if key in raw}


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_that_is_read_is_read_as_it_is(version: str, kind: str) -> None:
    raw = golden(version, kind)
    wire = MODELS[kind].parse(raw).to_wire()
    for part in ("spec", "status"):
        assert held(raw[part], wire[part]) == read_fields(wire[part], raw[part])


def test_the_fields_of_the_last_version_are_read_where_they_are(version: str) -> None:
    upload, backup = DataUpload.parse(golden(version, "dataupload")), PodVolumeBackup.parse(golden(version, KINDS[2]))
    download = DataDownload.parse(golden(version, "datadownload"))
    found = (upload.spec.parent_snapshot, backup.spec.parent_snapshot)
    assert found == (("none", "none") if version == "main" else (None, None))
    # Unknown, so that a cache volume is used.
    assert (download.spec.snapshot_size == 0) is (version == "1.17.2")


@pytest.mark.parametrize("kind", ADAPTERS)
async def test_no_field_is_lost_when_a_transfer_is_written(version: str, kind: str) -> None:
    raw = golden(version, kind)
    raw["status"] = {"phase": "New", "progress": {}}
    adapted, kube = adapter(kind), FakeKube()
    stored: JsonDict = kube.put(raw)
    writer = StatusWriter(KubeClient(kube, Retry(HandClock())), HandClock())

    cr: Transfer = adapted.parse(stored)
    for phase in (Phase.ACCEPTED, Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED):
        cr = await writer.move(adapted, cr, phase, Change({"message": "m", "acceptedByNode": "node-a"}))

    after = kube.objects(adapted.spec.resource)[0]
    assert after["spec"] == raw["spec"]
    assert after["metadata"].items() >= {key: raw["metadata"][key] for key in ("uid", "ownerReferences")}.items()
