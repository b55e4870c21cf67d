"""What each kind asks its exposer for: from a recorded custom resource and the active configuration.

With what the recorded cluster was configured with, these are the very requests from which
`tests/exposer/test_pods_velero.py` builds the recorded pods.
Objects of each version of Velero are read, and written without the loss of a field.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.base import CustomResource, JsonDict
from core.models.phases import Phase
from core.models.storage import BackupRepository
from core.models.transfer_settings import InPlace
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from exposer.model import Exposed, Pending, PodVolumeRequest, RestoreRequest, SnapshotRequest
from exposer.settings import BackupPVCSettings, CacheVolume, PlacementRule, PlacementRules
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.status import Change, StatusWriter
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request, template
from tests.exposer.support.world import no_guard
from tests.nodeagent.support.configured import build_settings
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube
from tests.support.golden import recorded
from tests.support.versions import KINDS, VERSIONS, golden

ADAPTERS: dict[str, type[Kind[Any]]] = {
    "dataupload": DataUploadKind,
    "datadownload": DataDownloadKind,
    "podvolumebackup": PodVolumeBackupKind,
    "podvolumerestore": PodVolumeRestoreKind,
}
RECORDED: JsonDict = {
    "backupPVC": {"hostpath": {"annotations": {"a/b": "c"}}},
    "podAnnotations": {"note": "x"},
    "podLabels": {"team": "storage"},
    "podResources": {"cpuRequest": "100m", "cpuLimit": "4", "memoryRequest": "64Mi", "memoryLimit": "2Gi"},
    "priorityClassName": "data-mover-low",
}
"""The recorded ConfigMap, as far as pods and claims go."""

EVERYTHING: JsonDict = RECORDED | {
    "backupPVC": {"hostpath": {"storageClass": "shallow", "readOnly": True, "spcNoRelabeling": True}},
    "cachePVC": {"storageClass": "fast"},
    "loadAffinity": [{"nodeSelector": {"matchLabels": {"pool": "movers"}}, "storageClass": "shallow"}],
    "restorePVC": {"ignoreDelayBinding": True},
}
RULES = PlacementRules((PlacementRule(({"key": "pool", "operator": "In", "values": ["movers"]},), "shallow"),))
CACHE = CacheVolume("fast", 5000)


@dataclass
class RecordingExposer:
    """Records what it is asked to expose."""

    requests: list[Any] = field(default_factory=list)

    async def ensure(self, request: Any, guard: Any) -> Exposed | Pending:
        self.requests.append(request)
        return Pending("Recorded", "")


async def ask(kind: str, raw: JsonDict, document: JsonDict, *, limit_mib: int = 5000) -> Any:
    """Return what the adapter of that kind asks for."""
    exposer: Any = RecordingExposer()
    settings = build_settings(document, template(tolerations=[]), cache_limit_mib=limit_mib)
    names = frozenset({"velero", ""})
    adapter: Kind[Any] = ADAPTERS[kind.removeprefix("block-")](exposer, lambda: settings, names)
    transfer: Transfer = adapter.parse(raw)
    await adapter.ensure_exposed(transfer, no_guard)
    (request,) = exposer.requests
    return request


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        ("dataupload", snapshot_request()),
        ("block-dataupload", snapshot_request("block-dataupload")),
        ("datadownload", restore_request()),
        ("block-datadownload", restore_request("block-datadownload")),
        ("podvolumebackup", pod_volume_request()),
        ("podvolumerestore", pod_volume_request("podvolumerestore")),
    ],
)
async def test_the_recorded_configuration_leads_to_the_recorded_pods(recording: str, expected: Any) -> None:
    assert await ask(recording, recorded(recording), RECORDED) == expected


async def test_every_key_about_volumes_reaches_its_kind() -> None:
    upload: SnapshotRequest = await ask("dataupload", recorded("dataupload"), EVERYTHING)
    download: RestoreRequest = await ask("datadownload", recorded("datadownload"), EVERYTHING)
    backup: PodVolumeRequest = await ask("podvolumebackup", recorded("podvolumebackup"), EVERYTHING)
    restore: PodVolumeRequest = await ask("podvolumerestore", recorded("podvolumerestore"), EVERYTHING)
    assert upload.backup_pvc == BackupPVCSettings("shallow", read_only=True, no_relabeling=True)
    assert upload.settings.nodes == download.settings.nodes == RULES
    assert (download.settings.ignore_delay_binding, download.cache) == (True, CACHE)
    assert (backup.cache, restore.cache) == (None, CACHE)


@pytest.mark.parametrize(("node_os", "windows"), [("windows", True), ("linux", False), ("auto", False), ("", False)])
async def test_a_restore_is_for_linux_unless_it_says_windows(node_os: str, windows: bool) -> None:
    raw = recorded("datadownload")
    raw["spec"]["nodeOS"] = node_os
    assert (await ask("datadownload", raw, {})).for_windows is windows


@pytest.mark.parametrize("wanted", ["full", "Incremental", "none", ""])
async def test_the_restore_type_of_a_pods_volume_reaches_the_exposer(wanted: str) -> None:
    raw = recorded("podvolumerestore")
    raw["spec"] |= {"restoreType": wanted, "uploaderSettings": {"CompareContent": "true"}}
    request: PodVolumeRequest = await ask("podvolumerestore", raw, {})
    incremental = wanted.lower() == "incremental"
    expected = InPlace(incremental=incremental, compare_content=True) if wanted not in {"", "none"} else None
    assert request.in_place == expected


@pytest.mark.parametrize(("snapshot_bytes", "cached"), [(0, True), (1 << 20, False), (1 << 30, True)])
@pytest.mark.parametrize("kind", ["datadownload", "podvolumerestore"])
async def test_the_size_of_the_snapshot_decides_about_a_cache(kind: str, snapshot_bytes: int, cached: bool) -> None:
    raw = recorded(kind)
    raw["spec"]["snapshotSize"] = snapshot_bytes
    document = {"cachePVC": {"storageClass": "fast", "residentThresholdInMB": 1024}}
    assert (await ask(kind, raw, document)).cache == (CACHE if cached else None)


@pytest.mark.parametrize(("limit_mib", "cache"), [(5000, CACHE), (100, CacheVolume("fast", 100)), (0, None)])
@pytest.mark.parametrize("kind", ["datadownload", "podvolumerestore"])
async def test_the_configured_limit_decides_about_a_cache(kind: str, limit_mib: int, cache: CacheVolume | None) -> None:
    assert (await ask(kind, recorded(kind), EVERYTHING, limit_mib=limit_mib)).cache == cache


async def test_a_source_of_another_class_is_not_set_up() -> None:
    raw = recorded("dataupload")
    raw["spec"]["csiSnapshot"]["storageClass"] = "other"
    request: SnapshotRequest = await ask("dataupload", raw, EVERYTHING)
    assert request.backup_pvc == BackupPVCSettings()
    assert request.backup_class == "other"


_EACH_VERSION = pytest.mark.parametrize("version", VERSIONS)

MODELS: dict[str, type[CustomResource]] = {
    "dataupload": DataUpload,
    "datadownload": DataDownload,
    "podvolumebackup": PodVolumeBackup,
    "podvolumerestore": PodVolumeRestore,
    "backuprepository": BackupRepository,
}


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


@_EACH_VERSION
@pytest.mark.parametrize("kind", KINDS)
def test_each_field_that_is_read_is_read_as_it_is(version: str, kind: str) -> None:
    raw = golden(version, kind)
    wire = MODELS[kind].parse(raw).to_wire()
    for part in ("spec", "status"):
        assert held(raw[part], wire[part]) == read_fields(wire[part], raw[part])


@_EACH_VERSION
def test_the_fields_of_the_last_version_are_read_where_they_are(version: str) -> None:
    upload, backup = DataUpload.parse(golden(version, "dataupload")), PodVolumeBackup.parse(golden(version, KINDS[2]))
    download = DataDownload.parse(golden(version, "datadownload"))
    found = (upload.spec.parent_snapshot, backup.spec.parent_snapshot)
    assert found == (("none", "none") if version == "main" else (None, None))
    # Unknown, so that a cache volume is used.
    assert (download.spec.snapshot_size == 0) is (version == "1.17.2")


@_EACH_VERSION
@pytest.mark.parametrize("kind", ADAPTERS)
async def test_no_field_is_lost_when_a_transfer_is_written(version: str, kind: str) -> None:
    raw = golden(version, kind)
    raw["status"] = {"phase": "New", "progress": {}}
    adapted, kube = bare(ADAPTERS[kind]), FakeKube()
    stored: JsonDict = kube.put(raw)
    writer = StatusWriter(KubeClient(kube, Retry(HandClock())), HandClock().now)
    cr: Transfer = adapted.parse(stored)
    for phase in (Phase.ACCEPTED, Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED):
        cr = await writer.move(adapted, cr, phase, Change({"message": "m", "acceptedByNode": "node-a"}))
    after = kube.objects(adapted.spec.resource)[0]
    assert after["spec"] == raw["spec"]
    assert after["metadata"].items() >= {key: raw["metadata"][key] for key in ("uid", "ownerReferences")}.items()
