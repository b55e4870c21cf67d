"""What refers to kopia snapshots in the cluster, and what it means if that cannot be read."""

from typing import Any, Final

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import BACKUPS, DATA_UPLOADS
from core.kube.transport import Retry
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Attempts
from datamover.kopia.references import CompletedTransfer, References
from datamover.pod.snapshot_report import read_cluster_references
from tests.support.fakekube import FakeKube

_V1: Final = "velero.io/v1"
_V2: Final = "velero.io/v2alpha1"


def _put(kube: FakeKube, api_version: str, kind: str, name: str, **more: Any) -> None:
    meta = {"namespace": "velero", "name": name, "uid": f"uid-of-{name}"} | more.pop("metadata", {})
    kube.put({"apiVersion": api_version, "kind": kind, "metadata": meta, **more})


async def _read(kube: FakeKube) -> References:
    return await read_cluster_references(KubeClient(kube, Retry(SystemClock(), attempts=1)), "velero")


async def test_backups_refer_by_their_status_and_restores_until_they_have_ended() -> None:
    kube = FakeKube()
    again = {"annotations": {ATTEMPTS_ANNOTATION: Attempts(number=2).to_json()}}
    _put(kube, _V2, "DataUpload", "du", status={"phase": "Completed", "snapshotID": "a"}, metadata=again)
    _put(kube, _V1, "PodVolumeBackup", "pvb", status={"phase": "InProgress", "snapshotID": "b"})
    _put(kube, _V2, "DataUpload", "new")
    _put(kube, _V2, "DataDownload", "dd", spec={"snapshotID": "c"}, status={"phase": "InProgress"})
    _put(kube, _V1, "PodVolumeRestore", "pvr", spec={"snapshotID": "d"})
    for phase in ("Completed", "Failed", "Canceled"):
        _put(kube, _V2, "DataDownload", phase.lower(), spec={"snapshotID": phase}, status={"phase": phase})
    _put(kube, _V1, "Backup", "one")
    _put(kube, _V1, "Backup", "elsewhere", metadata={"namespace": "other"})
    assert await _read(kube) == References(
        {
            "a": "DataUpload velero/du",
            "b": "PodVolumeBackup velero/pvb",
            "c": "DataDownload velero/dd",
            "d": "PodVolumeRestore velero/pvr",
        },
        {"uid-of-du": CompletedTransfer("DataUpload velero/du", 2)},
        frozenset({"uid-of-one"}),
    )


@pytest.mark.parametrize("resource", [BACKUPS, DATA_UPLOADS])
async def test_a_resource_that_is_not_defined_is_said(resource: Any) -> None:
    kube = FakeKube()
    kube.unserved.add(resource)
    references = await _read(kube)
    assert references.unread is not None
    assert references.unread.startswith(f"a resource of Velero is not defined in this cluster: list {resource.kind}")


@pytest.mark.parametrize(
    "status", [{"snapshotID": 1}, "Completed", {"snapshotID": ["a"]}], ids=["number", "text", "list"]
)
async def test_a_malformed_transfer_is_said(status: Any) -> None:
    kube = FakeKube()
    _put(kube, _V2, "DataUpload", "du", status=status)
    assert (await _read(kube)).unread == "DataUpload du is malformed"


async def test_a_malformed_backup_is_said() -> None:
    kube = FakeKube()
    _put(kube, _V1, "Backup", "one", metadata={"labels": 1})
    assert (await _read(kube)).unread == "a Backup in namespace velero is malformed"


async def test_a_refused_list_is_said() -> None:
    kube = FakeKube()
    kube.fail_next("GET", "/backups", 403)
    assert "403" in ((await _read(kube)).unread or "")
