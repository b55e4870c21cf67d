"""The copies that transfers are: what the rules need of them, and which transfers are not ours."""

from dataclasses import replace
from typing import Any

import pytest

from client.backups.copies import build_copy
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from tests.client.support.copies import make_copy


def _meta(**more: Any) -> JsonDict:
    labels = {"nodeagent.io/backup": "night"} | more.pop("labels", {})
    annotations = {"nodeagent.io/backup": "night", "nodeagent.io/backup-ttl": "24h"} | more.pop("annotations", {})
    own = {"name": "night-1", "namespace": "velero", "uid": "u1", "creationTimestamp": "2026-11-20T12:00:00Z"}
    return {**own, "labels": labels, "annotations": annotations, **more}


def _upload(**meta: Any) -> DataUpload:
    spec = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    status = {"phase": "Completed", "snapshotID": "s1", "progress": {"totalBytes": 7}}
    raw = {"apiVersion": "v2alpha1", "kind": "DataUpload", "metadata": _meta(**meta), "spec": spec, "status": status}
    return DataUpload.parse(raw)


def test_a_copy_has_what_the_rules_need_of_its_transfer() -> None:
    failed = {"nodeagent.io/verification": '{"at":"2026-11-20T12:00:00Z","outcome":"failed"}'}
    expected = make_copy("night", 1, transfer="night-1", uid="u1", snapshot_id="s1", bytes=7)
    assert build_copy(_upload()) == expected
    assert build_copy(_upload(annotations=failed)) == replace(expected, damaged=True)
    shrunk = {"nodeagent.io/shrunk": '{"bytes":1,"fullBytes":100}'}
    assert build_copy(_upload(annotations=shrunk)) == replace(expected, shrunk=True)
    pod = {"namespace": "app", "name": "writer", "uid": "p"}
    spec = {"node": "a", "pod": pod, "volume": "vol", "backupStorageLocation": "default"}
    raw = {"apiVersion": "v1", "kind": "PodVolumeBackup", "metadata": _meta(), "spec": spec}
    copy = build_copy(PodVolumeBackup.parse(raw))
    assert copy is not None
    assert (copy.volume, copy.phase, copy.complete) == (("app", "writer:vol"), Phase.NEW, False)


@pytest.mark.parametrize(
    ("meta", "foreign"),
    [
        ({"labels": {"nodeagent.io/backup": "day"}}, "its label nodeagent.io/backup is of another backup"),
        ({"labels": {"velero.io/backup-name": "b"}}, "it has Velero's label velero.io/backup-name"),
        ({"labels": {"velero.io/restore-name": "b"}}, "it has Velero's label velero.io/restore-name"),
        (
            {"ownerReferences": [{"apiVersion": "v1", "kind": "Backup", "name": "b", "uid": "u"}]},
            "Backup b owns it",
        ),
    ],
    ids=str,
)
def test_a_transfer_with_an_owner_or_a_label_of_velero_is_foreign(meta: JsonDict, foreign: str) -> None:
    copy = build_copy(_upload(**meta))
    assert copy is not None
    assert (copy.foreign, copy.complete) == (f"is not of nodeagent backup create alone: {foreign}", False)


def test_a_transfer_of_no_backup_of_ours_is_no_copy() -> None:
    assert build_copy(_upload(annotations={"nodeagent.io/backup": ""})) is None


@pytest.mark.parametrize("text", ["soon", "0s", "-1h"])
def test_a_backup_whose_ttl_cannot_be_read_never_expires(text: str) -> None:
    copy = build_copy(_upload(annotations={"nodeagent.io/backup-ttl": text}))
    assert copy is not None
    assert copy.ttl is None
