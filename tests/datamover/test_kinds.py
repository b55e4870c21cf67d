import json
from pathlib import Path
from typing import Any

import pytest

from core.models.names import BACKUP_ANNOTATION, BACKUP_TAG, BACKUP_UID_TAG, CLAIM_ANNOTATION, CLAIM_TAG
from datamover.kinds import TRANSFER_KINDS, BackupPlan, RestorePlan, plan_of

_RECORDINGS = Path(__file__).parents[1] / "recordings" / "velero-1.18.2"


def _recorded(name: str) -> Any:
    return json.loads((_RECORDINGS / f"{name}.json").read_text())


def _plan(flag: str, recording: str) -> BackupPlan | RestorePlan:
    raw = _recorded(recording)[-1]["object"]
    return plan_of(TRANSFER_KINDS[flag].model.parse(raw))


@pytest.mark.parametrize(
    ("flag", "recording"), [("data-upload", "dataupload"), ("pod-volume-backup", "podvolumebackup")]
)
def test_a_backup_has_the_source_and_tags_of_veleros_snapshot(flag: str, recording: str) -> None:
    plan = _plan(flag, recording)
    assert isinstance(plan, BackupPlan)
    snapshots = {one["source"]["path"]: one["tags"] for one in _recorded("kopia-snapshots")}
    # The one that is ours, for the snapshot report.
    assert snapshots[plan.source] == {key: value for key, value in plan.tags.items() if key != BACKUP_UID_TAG}


@pytest.mark.parametrize(
    ("flag", "recording"), [("data-upload", "dataupload"), ("pod-volume-backup", "podvolumebackup")]
)
@pytest.mark.parametrize(("named", "parent"), [("", "auto"), ("auto", "auto"), ("none", "none"), ("0a1b", "0a1b")])
def test_the_parent_of_a_backup_is_the_last_one_unless_another_is_named(
    flag: str, recording: str, named: str, parent: str
) -> None:
    raw = _recorded(recording)[-1]["object"]
    raw["spec"]["parentSnapshot"] = named
    plan = plan_of(TRANSFER_KINDS[flag].model.parse(raw))
    assert isinstance(plan, BackupPlan)
    assert plan.parent == parent


def test_a_volume_without_a_pvc_is_backed_up_under_its_own_name() -> None:
    raw = _recorded("podvolumebackup")[-1]["object"]
    del raw["metadata"]["annotations"]
    plan = plan_of(TRANSFER_KINDS["pod-volume-backup"].model.parse(raw))
    assert isinstance(plan, BackupPlan)
    assert plan.source == "snapshot-pod-volume/kopia/app/writer/fs"


def test_a_pod_volume_snapshot_has_the_uid_of_its_backup_if_the_resource_has_it() -> None:
    raw = _recorded("podvolumebackup")[-1]["object"]
    raw["spec"]["tags"] = {"backup": "nightly", "backup-uid": "6bc33b7d", "pod": "writer"}
    plan = plan_of(TRANSFER_KINDS["pod-volume-backup"].model.parse(raw))
    assert isinstance(plan, BackupPlan)
    assert plan.tags == {
        "snapshot-requester": "snapshot-pod-volume",
        "snapshot-uploader": "kopia",
        "backup-uid": "6bc33b7d",
    }


@pytest.mark.parametrize(
    ("flag", "recording"), [("data-upload", "dataupload"), ("pod-volume-backup", "podvolumebackup")]
)
@pytest.mark.parametrize(
    ("name", "claim", "found"),
    [
        pytest.param("night", '{"namespace":"app","name":"data"}', {BACKUP_TAG, CLAIM_TAG}, id="both"),
        pytest.param("../x", "{", set(), id="invalid"),
    ],
)
def test_a_backup_that_the_transfer_names_is_in_the_tags(
    flag: str, recording: str, name: str, claim: str, found: set[str]
) -> None:
    raw = _recorded(recording)[-1]["object"]
    raw["metadata"]["annotations"] = {BACKUP_ANNOTATION: name, CLAIM_ANNOTATION: claim}
    plan = plan_of(TRANSFER_KINDS[flag].model.parse(raw))
    assert isinstance(plan, BackupPlan)
    assert {key: plan.tags.get(key) for key in found} == {
        key: {BACKUP_TAG: name, CLAIM_TAG: claim}[key] for key in found
    }
    assert found == plan.tags.keys() & {BACKUP_TAG, CLAIM_TAG}


def test_a_data_download_writes_no_done_file() -> None:
    assert _plan("data-download", "datadownload") == RestorePlan("74b385d6f9a63c4ff9a796d7a49bf992")


def test_a_pod_volume_restore_writes_the_file_that_the_workload_waits_for() -> None:
    plan = _plan("pod-volume-restore", "podvolumerestore")
    waiting = _recorded("workload-pod-restored")[-1]["object"]["spec"]["initContainers"][0]
    assert plan == RestorePlan("cd06b7e6e1bc80e0ede56dbc172bdb31", waiting["args"][0])


@pytest.mark.parametrize(
    ("owners", "labels", "uid"),
    [
        (["Backup", "Restore"], {}, "uid-of-Restore"),
        (["ConfigMap"], {"velero.io/restore-uid": "labeled"}, "uid-of-ConfigMap"),
        ([], {"velero.io/restore-uid": "labeled"}, "labeled"),
        ([], {}, None),
    ],
    ids=["a Restore goes first", "the first owner whatever it is", "the label", "nothing"],
)
def test_the_done_file_is_named_after_the_restore(owners: list[str], labels: dict[str, str], uid: str | None) -> None:
    raw = _recorded("podvolumerestore")[-1]["object"]
    raw["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": kind, "name": "n", "uid": f"uid-of-{kind}"} for kind in owners
    ]
    raw["metadata"]["labels"] = labels
    plan = plan_of(TRANSFER_KINDS["pod-volume-restore"].model.parse(raw))
    assert isinstance(plan, RestorePlan)
    assert plan.done_owner_uid == uid


def test_a_backup_by_block_has_its_own_source_and_uploader() -> None:
    raw = _recorded("dataupload")[-1]["object"]
    raw["spec"]["datamover"] = "velero-block"
    plan = plan_of(TRANSFER_KINDS["data-upload"].model.parse(raw))
    assert isinstance(plan, BackupPlan)
    assert plan.by_block
    claim = f"{raw['spec']['sourceNamespace']}/{raw['spec']['sourcePVC']}"
    assert plan.source == f"snapshot-data-upload-download/velero-block/{claim}"
    assert plan.tags["snapshot-uploader"] == "velero-block"
