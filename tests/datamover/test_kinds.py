import json
from pathlib import Path
from typing import Any

import pytest

from core.contract import MoverVerb
from core.errors import ConfigError
from core.models.names import BACKUP_ANNOTATION, BACKUP_TAG, BACKUP_UID_TAG, CLAIM_ANNOTATION, CLAIM_TAG
from core.models.transfer_settings import Compression
from core.models.transfers import PodVolumeRestore
from datamover.kinds import TRANSFER_KINDS, BackupPlan, UploaderSettings, parse_settings, plan_of

_RECORDINGS = Path(__file__).parents[1] / "recordings" / "velero-1.18.2"


def _recorded(name: str) -> Any:
    return json.loads((_RECORDINGS / f"{name}.json").read_text())


def _raw(flag: str) -> Any:
    """Return the custom resource of a kind as Velero wrote it."""
    return _recorded(TRANSFER_KINDS[flag].resource.kind.lower())[-1]["object"]


def _plan(flag: str, raw: Any = None) -> BackupPlan | str:
    return plan_of(TRANSFER_KINDS[flag].model.parse(raw or _raw(flag)))


def _backup(flag: str, raw: Any = None) -> BackupPlan:
    plan = _plan(flag, raw)
    assert isinstance(plan, BackupPlan)
    return plan


_BACKUPS = pytest.mark.parametrize("flag", ["data-upload", "pod-volume-backup"])


@_BACKUPS
def test_a_backup_has_the_source_and_tags_of_veleros_snapshot(flag: str) -> None:
    plan = _backup(flag)
    snapshots = {one["source"]["path"]: one["tags"] for one in _recorded("kopia-snapshots")}
    # The one that is ours, for the snapshot report.
    assert snapshots[plan.source] == {key: value for key, value in plan.tags.items() if key != BACKUP_UID_TAG}


@_BACKUPS
@pytest.mark.parametrize(("named", "parent"), [("", "auto"), ("auto", "auto"), ("none", "none"), ("0a1b", "0a1b")])
def test_the_parent_of_a_backup_is_the_last_one_unless_another_is_named(flag: str, named: str, parent: str) -> None:
    raw = _raw(flag)
    raw["spec"]["parentSnapshot"] = named
    assert _backup(flag, raw).parent == parent


def test_a_pod_volume_snapshot_has_the_uid_of_its_backup_if_the_resource_has_it() -> None:
    raw = _raw("pod-volume-backup")
    raw["spec"]["tags"] = {"backup": "nightly", "backup-uid": "6bc33b7d", "pod": "writer"}
    tags = {"snapshot-requester": "snapshot-pod-volume", "snapshot-uploader": "kopia", "backup-uid": "6bc33b7d"}
    assert _backup("pod-volume-backup", raw).tags == tags
    # A volume without a PVC is backed up under its own name.
    del raw["metadata"]["annotations"]
    assert _backup("pod-volume-backup", raw).source == "snapshot-pod-volume/kopia/app/writer/fs"


_CLAIM = '{"namespace":"app","name":"data"}'


@_BACKUPS
@pytest.mark.parametrize(
    ("name", "claim", "found"),
    [("night", _CLAIM, {BACKUP_TAG: "night", CLAIM_TAG: _CLAIM}), ("../x", "{", {})],
    ids=["both", "invalid"],
)
def test_a_backup_that_the_transfer_names_is_in_the_tags(flag: str, name: str, claim: str, found: Any) -> None:
    raw = _raw(flag)
    raw["metadata"]["annotations"] = {BACKUP_ANNOTATION: name, CLAIM_ANNOTATION: claim}
    tags = _backup(flag, raw).tags
    assert {key: value for key, value in tags.items() if key in {BACKUP_TAG, CLAIM_TAG}} == found


def test_a_pod_volume_restore_writes_the_file_that_the_workload_waits_for() -> None:
    waiting = _recorded("workload-pod-restored")[-1]["object"]["spec"]["initContainers"][0]
    assert PodVolumeRestore.parse(_raw("pod-volume-restore")).restore_uid == waiting["args"][0]
    assert _plan("pod-volume-restore") == "cd06b7e6e1bc80e0ede56dbc172bdb31"
    assert _plan("data-download") == "74b385d6f9a63c4ff9a796d7a49bf992"


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
    raw = _raw("pod-volume-restore")
    raw["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": kind, "name": "n", "uid": f"uid-of-{kind}"} for kind in owners
    ]
    raw["metadata"]["labels"] = labels
    assert PodVolumeRestore.parse(raw).restore_uid == uid


def test_a_backup_by_block_has_its_own_source_and_uploader() -> None:
    raw = _raw("data-upload")
    raw["spec"]["datamover"] = "velero-block"
    plan = _backup("data-upload", raw)
    assert plan.by_block
    claim = f"{raw['spec']['sourceNamespace']}/{raw['spec']['sourcePVC']}"
    assert plan.source == f"snapshot-data-upload-download/velero-block/{claim}"
    assert plan.tags["snapshot-uploader"] == "velero-block"


_BACKUP, _RESTORE = MoverVerb.BACKUP, MoverVerb.RESTORE
_UPLOAD, _DOWNLOAD, _ALGORITHM = "ParallelFilesUpload", "ParallelFilesDownload", "Compression"
_READ_ALL, _SPARSE = "ReadAllFiles", "WriteSparseFiles"
_ALL = {"ParallelFilesUpload": "7", "ParallelFilesDownload": "3", "WriteSparseFiles": "true", "New": "x"}


def test_settings_of_the_direction_are_parsed_and_others_named() -> None:
    backup = ("New (unknown)", "ParallelFilesDownload (not of a backup)", "WriteSparseFiles (not of a backup)")
    restore = ("New (unknown)", "ParallelFilesUpload (not of a restore)")
    assert parse_settings(_ALL, _BACKUP) == UploaderSettings(7, ignored=backup)
    assert parse_settings(_ALL, _RESTORE) == UploaderSettings(None, 3, write_sparse_files=True, ignored=restore)


@pytest.mark.parametrize(
    ("verb", "settings", "expected"),
    [
        (_BACKUP, {}, UploaderSettings()),
        (_BACKUP, {_UPLOAD: "0"}, UploaderSettings()),
        (_BACKUP, {_UPLOAD: "+4"}, UploaderSettings(4)),
        (_BACKUP, {_UPLOAD: "-3"}, UploaderSettings(ignored=(f"{_UPLOAD} (negative)",))),
        (_BACKUP, {_ALGORITHM: " zstd "}, UploaderSettings(compression=Compression.ZSTD)),
        (_BACKUP, {_ALGORITHM: "none"}, UploaderSettings(compression=Compression.NONE)),
        (_BACKUP, {_ALGORITHM: ""}, UploaderSettings()),
        (_BACKUP, {_READ_ALL: "true"}, UploaderSettings(read_all_files=True)),
        (_RESTORE, {_READ_ALL: "true"}, UploaderSettings(ignored=(f"{_READ_ALL} (not of a restore)",))),
        (_RESTORE, {_ALGORITHM: "zip"}, UploaderSettings(ignored=(f"{_ALGORITHM} (not of a restore)",))),
        (_RESTORE, {}, UploaderSettings()),
        (_RESTORE, {_DOWNLOAD: "+4"}, UploaderSettings(None, 4)),
        (_RESTORE, {_DOWNLOAD: "-3"}, UploaderSettings(ignored=(f"{_DOWNLOAD} (negative)",))),
    ],
)
def test_what_has_no_effect_is_named(verb: MoverVerb, settings: dict[str, str], expected: UploaderSettings) -> None:
    assert parse_settings(settings, verb) == expected


@pytest.mark.parametrize(
    ("verb", "name", "value", "message"),
    [
        (_BACKUP, _UPLOAD, "many", 'must be a number of files, such as 4: "many"'),
        (_BACKUP, _UPLOAD, "", 'must be a number of files, such as 4: ""'),
        (_RESTORE, _DOWNLOAD, "1.5", 'must be a number of files, such as 4: "1.5"'),
        (_BACKUP, _ALGORITHM, "zst", 'must be one of none, .*: "zst" .did you mean zstd?'),
        (_RESTORE, _SPARSE, "yes", 'must be true or false: "yes"'),
    ],
)
def test_an_invalid_value_is_rejected_with_its_name(verb: MoverVerb, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {name}: {message}"):
        parse_settings({name: value}, verb)
